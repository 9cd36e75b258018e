"""The part of `GuidedManager` in vLLM's scheduler: a request without its mask leaves the batch for some steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import RequestError
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.request import Request

    from guided.integrations.vllm.manager import GuidedManager


def guided_scheduler(base: type[Any]) -> type[Any]:
    """Return a subclass of vLLM's scheduler class `base` that skips requests without a mask."""
    return type(f"Guided{base.__name__}", (_GuidedScheduling, base), {"__module__": __name__})


class _GuidedScheduling:
    """Overrides of the methods of vLLM's `Scheduler`."""

    structured_output_manager: GuidedManager
    requests: dict[str, Request]
    running: list[Request]
    current_step: int
    grammar_compile_error_reqs: dict[str, RequestError]
    """vLLM ends these requests with their errors, after this step."""
    prev_step_scheduled_req_ids: set[str]
    _preempt_request: Any
    _held_back: frozenset[str] | set[str] = frozenset()

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        manager = self.structured_output_manager
        self._held_back = manager.hold_back(self.requests)
        for request_id in self._held_back:
            request = self.requests.get(request_id)
            if request is not None:  # a running request is skipped until this step
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
        output: SchedulerOutput = super().schedule(*args, **options)  # type: ignore[misc]
        manager.free(output.finished_req_ids)
        if output.has_structured_output_requests and not output.pending_structured_output_tokens:
            request_ids = [
                request_id
                for request_id in output.num_scheduled_tokens
                if (request := self.requests[request_id]).use_structured_output and not request.is_prefill_chunk
            ]
            manager.prepare(self.requests, request_ids, output.scheduled_spec_decode_tokens)
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if request.request_id in self._held_back:
            return False
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        return ready

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        output: GrammarOutput | None = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        manager = self.structured_output_manager
        for request_id in manager.take_missing():
            request = self.requests[request_id]
            if request in self.running:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic(), drop_stale_output=True)
                self.prev_step_scheduled_req_ids.discard(request_id)  # its tokens are sent again when it continues
        return output

    def update_from_output(self, *args: Any, **options: Any) -> Any:
        self.grammar_compile_error_reqs.update(self.structured_output_manager.errors)
        return super().update_from_output(*args, **options)  # type: ignore[misc]
