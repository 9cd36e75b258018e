"""The training script: the loss falls, and a stopped run continues with the same result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.default_model import checkpoint_path
from examples.default_model_training.train import main


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A working directory that has the tokenizer already, to save time. Torch's threads are reset."""
    threads = torch.get_num_threads()
    folder = tmp_path / "work"
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint_path() / name, folder / "tokenizer" / name)
    yield folder
    torch.set_num_threads(threads)


def train(work: Path, out: Path, steps: int) -> None:
    """Steps at one learning rate, one batch of four examples to a pool."""
    sizes = ["--pool-size", "4", "--batch-tokens", "100000", "--warmup", "1", "--decay", "1", "--threads", "1"]
    sizes.append("--no-bfloat16")  # slow on CPUs without instructions for it
    main(["--work", str(work), "--out", str(out), "--steps", str(steps), *sizes])


def test_a_stopped_run_goes_on_and_learns_as_if_it_had_not_been(work: Path, tmp_path: Path) -> None:
    other = shutil.copytree(work, tmp_path / "other")
    train(work, tmp_path / "straight", 2)
    train(other, tmp_path / "stopped", 1)
    train(other, tmp_path / "stopped", 2)
    straight = load_file(tmp_path / "straight" / "model.safetensors")
    stopped = load_file(tmp_path / "stopped" / "model.safetensors")
    assert straight.keys() == stopped.keys()
    assert all(straight[name].equal(stopped[name]) for name in straight)
    first, last = (json.loads(line) for line in (other / "log.jsonl").read_text().splitlines())
    assert (first["step"], last["step"]) == (1, 2)
    assert last["held_out_loss"] < first["held_out_loss"]
