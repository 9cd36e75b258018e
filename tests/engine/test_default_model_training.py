"""The training script: the loss falls, and a checkpoint is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.default_model import checkpoint_path
from examples.default_model_training.train import main


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working directory that has the tokenizer already, to save time."""
    folder = tmp_path / "work"
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint_path() / name, folder / "tokenizer" / name)
    return folder


def test_the_loss_falls_and_the_checkpoint_is_written(work: Path, tmp_path: Path) -> None:
    """Two steps at one learning rate, one batch of four examples to a pool."""
    sizes = ["--pool-size", "4", "--batch-tokens", "100000", "--warmup", "1", "--decay", "1"]
    sizes.append("--no-bfloat16")  # slow on CPUs without instructions for it
    losses = []
    for steps in (1, 2):
        out = tmp_path / f"after-{steps}"
        main(["--work", str(work), "--out", str(out), "--steps", str(steps), *sizes])
        losses.append(json.loads((work / "log.jsonl").read_text().splitlines()[-1])["held_out_loss"])
        assert load_file(out / "model.safetensors")["model.norm.weight"].isfinite().all()
    assert losses[1] < losses[0]
