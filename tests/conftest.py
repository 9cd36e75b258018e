"""Shared fixtures: a tiny tokenizer and a tiny model, made here without downloads, and
a local Ray.

torch and transformers are imported by fixtures: xdist's own process, which runs no
test, would need seconds for them before the others start.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from engine.model.loader import LoadedModel

# On CI the examples are fixed, so that a failure is due to the change. Elsewhere each
# run tries new ones. A busy machine and examples that are thrown away are no failures.
QUIET = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("local", QUIET, max_examples=40)
settings.register_profile("ci", QUIET, max_examples=40, derandomize=True)
settings.register_profile("fuzz", QUIET, max_examples=5000)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A process in the background of a shell ignores SIGINT, and its children inherit that.
# Tests send SIGINT to children.
signal.signal(signal.SIGINT, signal.default_int_handler)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it writes a letter to its friend.",
    '{"name": "Ada", "age": 36, "tags": ["math", "engines"], "address": {"city": "London"}, "ok": true, "x": null}',
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë.",
    "敏捷的棕色狐狸跳过了懒狗。 いろはにほへと ちりぬるを。 안녕하세요 세계. Привет, мир! שלום עולם",
    "Emoji: 😀 🎉 👩‍👩‍👧 🇫🇷 and symbols ≤ ∑ → ½.",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


LONGEST = (
    "test_serve_app.py",
    "test_docs.py",
    "test_two_nodes.py",
    "test_server_faults.py",
    "test_default_server.py",
    "test_hostile.py",
    "test_replays.py",
)
WAITING = ("actors", "deploy", "examples", "faults", "server", "test_docs.py")
"""Where tests start servers and clusters, and mostly wait for them: the files that take
minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Alternate files that mostly wait, the longest first, and files that compute,
    which are short and come last.

    With several processes (`-n`), xdist's own order ends with files that take minutes,
    and one process is left alone.
    """
    files = list(dict.fromkeys(item.path for item in items))
    waiting = [
        path
        for path in files
        if path.relative_to(Path(__file__).parent).parts[0] in WAITING
    ]
    waiting.sort(
        key=lambda path: (
            LONGEST.index(path.name) if path.name in LONGEST else len(LONGEST)
        )
    )
    computing = [path for path in files if path not in waiting]
    rank = {path: 2 * number for number, path in enumerate(waiting)}
    rank |= {path: 2 * number + 1 for number, path in enumerate(computing)}
    items.sort(key=lambda item: rank[item.path])


@pytest.fixture(scope="session", autouse=True)
def single_threaded() -> None:
    """Tiny models gain nothing from threads, and on busy cores OpenMP's spinning
    barriers make them slow."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 600 tokens for any UTF-8 text. Most non-ASCII characters take
    several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        "<|begin|>",
        "<|end|>",
        "<|pad|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=special[3:],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tiny_llama_dir(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Hugging Face checkpoint of a random Llama with `tiny_tokenizer`, with logits
    padded to 640.

    The weights are large, so that the best tokens differ clearly and outputs don't
    repeat themselves.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=640,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_model(tiny_llama_dir: Path) -> LoadedModel:
    from engine.model.loader import load_model

    return load_model(str(tiny_llama_dir), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A local Ray, started once and shared by all pools. Their processes know the
    backend "faulty" (`faulty_backend`)."""
    import faulty_backend

    from actors.cluster import Cluster

    with pytest.MonkeyPatch.context() as patched:
        for path in faulty_backend.PATHS:  # compile processes get it from here
            patched.syspath_prepend(path)
        with pytest.MonkeyPatch.context() as environment:
            for name, value in faulty_backend.environment().items():
                environment.setenv(name, value)
            environment.setenv("GUIDED_API_KEY", "not for Ray")
            cluster = Cluster.join()
            cluster.session(threading.Event()).close()
        yield
        cluster.leave()
