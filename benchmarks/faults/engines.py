"""The engines under test: vLLM's `AsyncLLM`, with its own masks or with ours, and our `AsyncLLM`.

vLLM's engine runs in the environment that has vLLM. Its engine core is a separate process, as it is in its server.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any, Protocol

from benchmarks.faults.requests import PROMPT, Request

MAX_MODEL_LEN = 1024

Output = tuple[str, int, str | None, str | None]
"""Text so far, number of tokens so far, finish reason, error."""


class Engine(Protocol):
    """The interface that both engines get."""

    def generate(self, request_id: str, request: Request) -> AsyncIterator[Output]:
        """Yield the output so far, after each step."""

    async def state(self) -> str:
        """Return `alive`, or the reason why the engine is dead."""


class _VLLM:
    def __init__(self, model: str, way: str, backend: str) -> None:
        if way == "switch":
            os.environ["GUIDED_VLLM"] = "1"
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=model,
            enforce_eager=True,
            max_num_seqs=16,
            max_model_len=MAX_MODEL_LEN,
            structured_outputs_config={"backend": backend, "disable_any_whitespace": backend == "guidance"},
            disable_log_stats=True,
            additional_config={"guided": {"num_actors": 2}} if way else {},
        )
        self._way = way
        self._engine = AsyncLLM.from_engine_args(arguments)

    async def generate(self, request_id: str, request: Request) -> AsyncIterator[Output]:
        from vllm.exceptions import GenerationError, VLLMValidationError
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        kind: dict[str, Any] = {}
        if request.constraint:
            kind["structured_outputs"] = StructuredOutputsParams(**request.constraint)
            if self._way and request.backend:
                kind["extra_args"] = {"guided_backend": request.backend}
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=not request.constraint, **kind)
        text, tokens = "", 0
        try:
            async for output in self._engine.generate(PROMPT, params, request_id):
                one = output.outputs[0]
                text, tokens = one.text, len(one.token_ids)
                yield text, tokens, one.finish_reason, "error" if one.finish_reason == "error" else None
        except (GenerationError, VLLMValidationError) as error:
            yield text, tokens, "error", f"{type(error).__name__}: {error}"

    async def state(self) -> str:
        if self._engine.errored:
            return f"dead: {type(self._engine.dead_error).__name__}"
        await self._engine.check_health()
        return "alive"


class _Ours:
    def __init__(self, model: str, max_replays: int) -> None:
        from engine import AsyncLLM, EngineConfig

        options = {"num_actors": 2, "max_replays": max_replays}
        config = EngineConfig(max_num_seqs=16, max_model_len=MAX_MODEL_LEN)
        self._engine = AsyncLLM(model, "ray", config, pool_options=options)

    async def generate(self, request_id: str, request: Request) -> AsyncIterator[Output]:
        from engine import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=request.max_tokens, ignore_eos=not request.constraint, **_plain(request)
        )
        async for output in self._engine.generate(PROMPT, params, request_id):
            one = output.outputs[0]
            error = None if output.error is None else f"{output.error.code}: {output.error}"
            yield one.text, len(one.token_ids), one.finish_reason, error

    async def state(self) -> str:
        health = self._engine.health()
        return "alive" if health.alive else f"dead: {health.error}"


def _plain(request: Request) -> dict[str, Any]:
    """Return the constraint under the names of our API."""
    names = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
    constraint: dict[str, Any] = {names[kind]: source for kind, source in request.constraint.items()}
    if "json_schema" in constraint:
        constraint["whitespace_pattern"] = ""
    return {**constraint, "backend": request.backend or "llguidance"} if constraint else {}


def vllm(model: str, way: str = "", backend: str = "guidance") -> Engine:
    """Return vLLM's engine, with defaults for the rest.

    Args:
        way: "": vLLM's own masks. "switch": `GUIDED_VLLM=1`.
        backend: of structured outputs.
    """
    return _VLLM(model, way, backend)


def ours(model: str, max_replays: int) -> Engine:
    """Return our engine with two mask actors, and defaults for the rest."""
    return _Ours(model, max_replays)
