"""Two kinds of servers: the application in this process (fast, any settings), and a
real server process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_pool import FaultyPool
from serving import ServerProcess, serving
from starlette.testclient import TestClient

from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.server.app import create_app
from engine.server.options import ServerSettings


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """Undo what `guided serve` in this process does to the loggers: its handler keeps a
    stream that the test closes."""
    loggers = [logging.getLogger(name) for name in ("guided", "actors", "engine")]
    before = [
        (logger.handlers[:], logger.level, logger.propagate) for logger in loggers
    ]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny_engine(tiny_llama_dir: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        str(tiny_llama_dir), "inline", EngineConfig(max_num_seqs=8), dtype="float32"
    )
    yield engine
    engine.shutdown()


@pytest.fixture
def client_with(tiny_engine: AsyncLLM) -> Iterator[Callable[..., TestClient]]:
    """Make a client of an application with the given settings, around one real
    engine."""
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> TestClient:
            app = create_app(tiny_engine, ServerSettings(model_name="tiny", **settings))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield make


@pytest.fixture
def client(client_with: Callable[..., TestClient]) -> TestClient:
    return client_with()


@pytest.fixture
def hermes(client_with: Callable[..., TestClient]) -> TestClient:
    """A client of an application with function calls."""
    return client_with(tool_format="hermes")


@pytest.fixture
def thinking(
    client_with: Callable[..., TestClient],
    tiny_engine: AsyncLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], TestClient]:
    """Make a client of a model with a chat template that ends in a given way."""

    def make(end: str) -> TestClient:
        template = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}<|assistant|>"
        monkeypatch.setattr(tiny_engine.tokenizer, "chat_template", template + end)
        return client_with(reasoning_format="think")

    return make


@pytest.fixture
def failing(tiny_engine: AsyncLLM) -> Iterator[TestClient]:
    """A client of an application in which the fourth mask fails, after the first tokens
    have reached their request."""
    pool = FaultyPool(tiny_engine.model.vocabulary)
    pool.fails = lambda sequence_id, position: position >= 3
    engine = AsyncLLM(tiny_engine.model, pool, EngineConfig(max_num_seqs=8))
    with TestClient(
        create_app(engine, ServerSettings()), raise_server_exceptions=False
    ) as client:
        yield client
    engine.shutdown()


@pytest.fixture(scope="session")
def inline_server() -> Iterator[ServerProcess]:
    """The default model, masks inline."""
    with serving("--pool", "inline") as server:
        yield server
