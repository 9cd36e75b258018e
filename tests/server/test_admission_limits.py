"""The engine's limits hold for requests over HTTP, and for callers from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.server.app import create_app
from engine.server.options import ServerSettings
from guided.errors import ConstraintTooLarge
from guided.limits import Limits


def test_what_one_request_may_be(tiny_llama_dir: Path) -> None:
    limits = Limits(max_nesting=3, max_choices=3, max_repetition=5)
    engine = AsyncLLM(str(tiny_llama_dir), "inline", EngineConfig(max_num_seqs=2, limits=limits), dtype="float32")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"n": 3}, "invalid_request", "n is 3; the limit is 2"),
        ({"regex": "a{6}"}, "constraint_too_large", "limit of 5"),
        ({"guided_choice": ["a", "b", "c", "d"]}, "constraint_too_large", "4 entries; the limit is 3"),
        ({"json_schema": {"properties": {"a": {"items": {}}}}}, "constraint_too_large", "deeper than 3 levels"),
        ({"json_object": True, "whitespace_pattern": " {6}"}, "constraint_too_large", "limit of 5"),
    ]
    with TestClient(create_app(engine, ServerSettings())) as client:
        for asked, code, says in cases:
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **asked})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, code)
            assert says in error["message"]
            assert error["param"] == next(iter(asked))
    with pytest.raises(ConstraintTooLarge, match="limit of 5"):
        engine.engine.admit("one", "a", SamplingParams(regex="a{6}", max_tokens=1))
    engine.shutdown()
