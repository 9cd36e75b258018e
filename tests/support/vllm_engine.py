"""vLLM's engine with the plugin. The engine core is a process of its own, as in vLLM's server."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid
import warnings
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from guided.integrations.vllm.error_reports import REQUEST_ID, take

PLUGIN = "guided.integrations.vllm.processor:GuidedLogitsProcessor"
DROP_IN = {"guided": {"pool": "ray", "num_actors": 2}}
"""With the switch: two actors, and defaults for the rest."""
OPTIONS = {"guided": {**DROP_IN["guided"], "max_replays": 0, "step_wait": 20}}
"""With the logits processor: actors that die fail requests, and a busy machine does not."""
MAX_MODEL_LEN = 512
ALSO_ENDS = "<|user|>"
"""The model's second end token."""
WAIT = 240.0
Result = TypeVar("Result")


@dataclass
class Answer:
    """vLLM's final output of one request."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """Code of the reported error."""


class Engine:
    """vLLM's `AsyncLLM` with the plugin, on an event loop of its own."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._engine = self.submit(self._make(model, arguments)).result(WAIT)

    async def _make(self, model: Path, arguments: Mapping[str, Any]) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = {
            "model": str(model),
            "load_format": "dummy",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "logits_processors": [PLUGIN],
            "additional_config": OPTIONS,
            **arguments,
        }
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, requests: Mapping[str, Any], seen: Callable[[str, Answer], None] | None = None) -> dict[str, Answer]:
        """Run all requests (sampling parameters by id) at once.

        Args:
            seen: called with a request's answer so far, after each output.
        """

        async def all_of_them() -> dict[str, Answer]:
            answers = await asyncio.gather(*(self.follow(name, params, seen) for name, params in requests.items()))
            return dict(zip(requests, answers, strict=True))

        return self.submit(all_of_them()).result(WAIT)

    def ask_once(self, params: Any) -> list[Any]:
        """Run one request. Returns vLLM's outputs, one per choice."""

        async def generate() -> list[Any]:
            outputs: list[Any] = []
            async for output in self._engine.generate("Text: ", params, uuid.uuid4().hex):
                outputs = output.outputs
            return outputs

        return self.submit(generate()).result(WAIT)

    async def follow(self, name: str, params: Any, seen: Callable[[str, Answer], None] | None = None) -> Answer:
        answer = Answer()
        async for output in self._engine.generate("Text: ", params, name):
            one = output.outputs[0]
            answer.text, answer.tokens, answer.finish_reason = one.text, len(one.token_ids), one.finish_reason
            if seen is not None:
                seen(name, answer)
        reported = take((params.extra_args or {}).get(REQUEST_ID, name))
        answer.error = None if reported is None else reported.code
        return answer

    def abort(self, name: str) -> None:
        self.submit(self._engine.abort(name)).result(WAIT)

    def is_alive(self) -> bool:
        self.submit(self._engine.check_health()).result(WAIT)
        return not self._engine.errored

    def close(self) -> None:
        self._engine.shutdown()
        self.submit(_end_tasks()).result(WAIT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()
        with warnings.catch_warnings():  # vLLM leaves sockets open
            warnings.simplefilter("ignore", ResourceWarning)
            del self._engine
            gc.collect()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def mask_actors(pid: int | None = None) -> list[psutil.Process]:
    """The running mask actors of this process's engine, or of process `pid`."""
    family = psutil.Process(pid).children(recursive=True)
    return [process for process in family if process.name().startswith("ray::MaskActor")]
