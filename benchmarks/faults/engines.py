"""Engines that are asked the same: vLLM's `AsyncLLM`, with its own masks or our plugin, and ours, as their servers are.

vLLM's runs in the environment that has vLLM: its engine core is a process of its own there, as it is behind its server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from benchmarks.faults.asked import PROMPT, Asked

__all__ = ["Engine", "ours", "vllm"]

MAX_MODEL_LEN = 1024
PLUGIN = "guided.integrations.vllm.processor:GuidedLogitsProcessor"


class Engine(Protocol):
    """What the host needs of an engine."""

    def generate(self, request_id: str, asked: Asked) -> AsyncIterator[tuple[str, int, str | None, str | None]]:
        """Text so far, tokens so far, finish reason, error."""

    async def state(self) -> str:
        """`alive`, or what it says of its death."""


class _VLLM:
    def __init__(self, model: str, plugin: bool) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=model,
            enforce_eager=True,
            max_num_seqs=16,
            max_model_len=MAX_MODEL_LEN,
            structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
            disable_log_stats=True,
            logits_processors=[PLUGIN] if plugin else None,
            additional_config={"guided": {"num_actors": 2}} if plugin else {},
        )
        self._plugin = plugin
        self._engine = AsyncLLM.from_engine_args(arguments)

    async def generate(self, request_id: str, asked: Asked) -> AsyncIterator[tuple[str, int, str | None, str | None]]:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        kind: dict[str, Any] = {}
        if asked.constraint and self._plugin:
            kind["extra_args"] = {**_plain(asked), "guided_request_id": request_id}
        elif asked.constraint:
            kind["structured_outputs"] = StructuredOutputsParams(**asked.constraint)
        params = SamplingParams(temperature=0, max_tokens=asked.max_tokens, ignore_eos=not asked.constraint, **kind)
        async for output in self._engine.generate(PROMPT, params, request_id):
            one = output.outputs[0]
            error = self._reported(request_id) if one.finish_reason and self._plugin else None
            yield one.text, len(one.token_ids), one.finish_reason, error

    @staticmethod
    def _reported(request_id: str) -> str | None:
        """What the plugin reported out of band: what its middleware makes an error of."""
        from guided.integrations.vllm.error_reports import take

        error = take(request_id)
        return None if error is None else f"{error.code}: {error}"

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

    async def generate(self, request_id: str, asked: Asked) -> AsyncIterator[tuple[str, int, str | None, str | None]]:
        from engine import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=asked.max_tokens, ignore_eos=not asked.constraint, **_plain(asked)
        )
        async for output in self._engine.generate(PROMPT, params, request_id):
            one = output.outputs[0]
            error = None if output.error is None else f"{output.error.code}: {output.error}"
            yield one.text, len(one.token_ids), one.finish_reason, error

    async def state(self) -> str:
        health = self._engine.health()
        return "alive" if health.alive else f"dead: {health.error}"


def _plain(asked: Asked) -> dict[str, Any]:
    """The constraint, as our names have it."""
    names = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
    constraint: dict[str, Any] = {names[kind]: source for kind, source in asked.constraint.items()}
    if "json_schema" in constraint:
        constraint["whitespace_pattern"] = ""
    return {**constraint, "backend": "llguidance"} if constraint else {}


def vllm(model: str, plugin: bool = False) -> Engine:
    """vLLM's engine, its guidance backend or our plugin, everything else by default."""
    return _VLLM(model, plugin)


def ours(model: str, max_replays: int) -> Engine:
    """Ours, two mask actors, everything else by default."""
    return _Ours(model, max_replays)
