"""GuidedManager: vLLM's manager of structured outputs, with masks from a pool.

vLLM's own manager compiles grammars and fills masks in the engine's process. This one asks the pool. A request waits
for its grammar in vLLM's state for that, outside of the batch. A request without its mask at the deadline leaves the
batch: vLLM's scheduler preempts it, discards the token of this step, and continues it when the mask is ready
(`scheduling.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from guided.errors import GuidedError, TokenRejected
from guided.integrations.vllm import error_reports
from guided.integrations.vllm.configuration import pool_opener, step_wait, stop_token
from guided.integrations.vllm.masker import GuidedRequest, GuidedRow, Masker
from guided.integrations.vllm.request_params import GuidedParams
from guided.integrations.vllm.scheduling import guided_scheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_QUICK_MASKS = 16
"""Number of successive masks, each ready within a step, after which a slow request is an ordinary one again."""


@dataclass(eq=False, slots=True)
class _Output:
    """The output of one structured request."""

    request: GuidedRequest
    stops: frozenset[int] = frozenset()
    """Tokens at which vLLM ends the request. They are allowed when the constraint is satisfied, and only then."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens that the grammar has consumed, without those of the reasoning."""
    masks: NDArray[np.int32] | None = None
    """`[1 + drafts, words]`: the masks of the last step."""
    asked: int = -1
    """Number of output tokens when a slow request's mask was last requested."""
    quick: int = 0
    """Number of masks requested for a slow request since one took longer than a step."""


@dataclass(slots=True)
class _Step:
    """The lines of one step's bitmask."""

    drafts: list[tuple[str, list[int]]]
    """The requests and their draft tokens."""
    rows: list[GuidedRow] = field(default_factory=list)
    """The lines with a mask. The others are unconstrained: reasoning, and padding after the draft tokens."""
    lines: dict[str, range] = field(default_factory=dict)
    """Lines of each request: one per draft token, and one more."""
    count: int = 0


class GuidedManager(StructuredOutputManager):  # type: ignore[misc]
    """vLLM's `StructuredOutputManager`, with masks from a pool."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        if not self._use_async_grammar_compilation:
            raise ValueError(
                "guided's structured outputs don't work with distributed_executor_backend=external_launcher"
            )
        self._opener = pool_opener(vllm_config)
        weakref.finalize(self, self._opener.close)
        self._masker = Masker(self._opener, self._note_failure, vllm_config.model_config.get_vocab_size())
        self._step_wait = step_wait(vllm_config)
        self._outputs: dict[str, _Output] = {}
        """By vLLM's request id. The thread that receives requests adds entries."""
        self._slow: dict[str, _Output] = {}
        """Requests that had a late mask. They join a batch only when their mask is ready, until `_QUICK_MASKS` masks in
        succession took less than a step."""
        self._failed: list[str] = []
        """Ids of requests that failed since the last `take_failed`."""
        self._missing: list[str] = []
        """Ids of requests without a mask in this step."""
        self._step: _Step | None = None
        """The step that is being prepared: its masks are being computed."""
        config = vllm_config.scheduler_config
        config.scheduler_cls = guided_scheduler(config.get_scheduler_cls())

    def _note_failure(self, request_id: str, error: GuidedError) -> None:
        self._failed.append(request_id)
        error_reports.report_engine_request(request_id, error)

    # vLLM's interface

    def grammar_init(self, request: Request) -> None:
        """Compile a request's constraint. Called by the thread that receives requests."""
        structured = request.structured_output_request
        if structured is None:
            return
        params = GuidedParams.from_text(structured.params._backend)
        guided = self._masker.begin(params, stop_token(request.sampling_params), request.request_id)
        stops = frozenset(request.sampling_params.stop_token_ids or ())
        self._outputs[request.request_id] = _Output(guided, stops)
        structured.grammar = guided.compiled

    def grammar_bitmask(
        self,
        requests: Mapping[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> NDArray[np.int32] | None:
        """Return the masks of a step, int32 `[rows, words]`: one row per request and one per draft token."""
        if not structured_output_request_ids:
            return None
        step = self._step
        if step is None or step.drafts != _drafts(structured_output_request_ids, scheduled_spec_decode_tokens):
            step = self.prepare(requests, structured_output_request_ids, scheduled_spec_decode_tokens)
        self._step = None
        bitmask = self._masker.collect(self._step_wait, may_be_late=True)
        if len(bitmask) < step.count:
            constrained, bitmask = bitmask, np.full((step.count, bitmask.shape[1]), -1, np.int32)
            bitmask[[row.logits_row for row in step.rows]] = constrained
        discarded = {step.rows[index].logits_row for index in self._masker.discarded}
        for request_id, lines in step.lines.items():
            output = self._outputs[request_id]
            output.masks = bitmask[lines.start : lines.stop]
            if output.stops:
                self._allow_stops(output)
            invalid = next((index for index, line in enumerate(lines[1:]) if line in discarded), None)
            if invalid is not None:  # vLLM counts the drafts before the first -1 as acceptable
                tokens = scheduled_spec_decode_tokens[request_id]
                scheduled_spec_decode_tokens[request_id] = [*tokens[:invalid], *[-1] * (len(tokens) - invalid)]
            if output.request.late or output.request.error is not None:
                self._slow[request_id], output.quick = output, 0
                self._missing.append(request_id)
        return bitmask

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """Return the draft tokens to be verified. The mask before an invalid one forbids it."""
        output = self._outputs.get(request.request_id)
        if output is None:
            return spec_tokens
        return [] if request.request_id in self._slow else list(strip_speculative_padding(spec_tokens))

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Add sampled tokens to a request's output. Returns False, which ends the request, if a mask forbids one."""
        output = self._outputs.get(request.request_id)
        if output is None or not new_token_ids:
            return True
        start = 0
        if self.reasoner_cls is not None:
            start = self._get_constraint_bounds(request, new_token_ids, spec_tokens_committed=True).grammar_start
            if start > len(new_token_ids):
                return True
            request.structured_output_request.reasoning_ended = True
        for mask, token in zip(output.masks if output.masks is not None else (), new_token_ids, strict=False):
            if not int(mask[token >> 5]) >> (token & 31) & 1:
                self._masker.fail(
                    output.request, TokenRejected(f"the engine sampled token {token}, which is forbidden")
                )
                break
        output.tokens.extend(new_token_ids[start:])
        return output.request.error is None

    def clear_backend(self) -> None:
        """Close the pool."""
        super().clear_backend()
        self._opener.close()

    # the scheduler's interface

    def hold_back(self, in_flight: Callable[[str], bool], is_preempted: Callable[[str], bool]) -> set[str]:
        """Return the ids of slow requests that must not join a batch now: their masks are missing.

        Requests these masks first, without waiting. Preempted requests join one at a time: vLLM computes each again
        from its beginning, and the batch waits for that.

        Args:
            in_flight: whether a token of a request is being computed.
            is_preempted: whether a request has to be computed again.
        """
        slow = self._slow
        if not slow:
            return set()
        held = {name for name, output in slow.items() if output.request.error is not None or in_flight(name)}
        decided = self._masker.decided()
        asking: dict[str, _Output] = {}
        for name, output in slow.items():
            late = output.request.late
            if late and not late <= decided:
                output.quick = 0
            elif name not in held and (late or output.asked != len(output.tokens)):
                asking[name] = output
        if asking:
            self._step = None
            self._masker.prepare([GuidedRow(output.request, 0, output.tokens) for output in asking.values()])
            self._masker.collect(0.0, may_be_late=True)
        for name, output in asking.items():
            output.asked = len(output.tokens)
            output.quick += 1
            if output.quick >= _QUICK_MASKS and not output.request.late:
                del slow[name]
        held |= {name for name, output in slow.items() if output.request.late or output.request.error is not None}
        returning = [name for name in slow if name not in held and is_preempted(name)]
        return held.union(returning[1:])

    def take_missing(self) -> list[str]:
        """Return the ids of requests without a mask in the last step, once. Their tokens must be discarded."""
        missing, self._missing = self._missing, []
        return missing

    def take_failed(self) -> list[str]:
        """Return the ids of requests that failed, once."""
        failed, self._failed = self._failed, []
        return failed

    def free(self, request_ids: Iterable[str]) -> None:
        """Free the matchers and grammars of requests that are over. Unknown ids are ignored."""
        for request_id in request_ids:
            output = self._outputs.pop(request_id, None)
            self._slow.pop(request_id, None)
            if output is not None:
                self._masker.end(output.request)

    # steps

    def prepare(
        self, requests: Mapping[str, Request], request_ids: Sequence[str], drafts: dict[str, list[int]]
    ) -> _Step:
        """Start to compute the masks of a step, while the forward pass runs. `grammar_bitmask` follows."""
        self._step = step = _Step(_drafts(request_ids, drafts))
        for request_id, given in step.drafts:
            output = self._outputs[request_id]
            tokens = strip_speculative_padding(given)
            grammar_start = constraint_start = 0
            if self.reasoner_cls is not None:
                grammar_start, constraint_start = self._get_constraint_bounds(requests[request_id], tokens)
            step.lines[request_id] = lines = range(step.count, step.count + 1 + len(given))
            step.count = lines.stop
            for count in range(constraint_start, len(tokens) + 1):
                consumed = tokens[grammar_start:count]
                before = [*output.tokens, *consumed] if consumed else output.tokens
                step.rows.append(GuidedRow(output.request, lines[count], before, len(consumed)))
        self._masker.prepare(step.rows)
        return step

    def _allow_stops(self, output: _Output) -> None:
        """Allow the request's own stop tokens in those of its masks that allow the end of the output."""
        assert output.masks is not None
        for mask in output.masks:
            complete = any(int(mask[token >> 5]) >> (token & 31) & 1 for token in self._masker.stop_token_ids)
            for token in output.stops - self._masker.stop_token_ids:
                word = mask[token >> 5]
                mask[token >> 5] = word | _bit(token) if complete else word & ~_bit(token)


def _drafts(request_ids: Iterable[str], drafts: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    return [(name, list(drafts.get(name, ()))) for name in request_ids]


def _bit(token: int) -> np.int32:
    """Return a token's bit in its word of a mask."""
    return np.uint32(1 << (token & 31)).view(np.int32)
