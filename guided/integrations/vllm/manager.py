"""GuidedManager: vLLM's manager of structured outputs, with masks from a pool.

A request waits for its grammar in vLLM's state for that, outside of the batch. A request without its mask at the
deadline leaves the batch: vLLM's scheduler preempts it, discards the token of this step, and continues it when the mask
is ready.

vLLM's `StructuredOutputBackend` would be the narrower interface, but a row can't be late there: a grammar is asked for
one row at a time, and each answer is waited for.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from vllm.outputs import RequestError
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from guided.bitmask import words
from guided.errors import GuidedError, InvalidRequest, TokenRejected
from guided.integrations.vllm import metrics
from guided.integrations.vllm.masker import GuidedRequest, GuidedRow, Masker
from guided.pools.inline import InlinePool
from guided.pools.opening import LazyPool
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import MaskPool
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger("guided.integrations")
_QUICK_MASKS = 16
"""Number of successive masks, each ready within a step, after which a slow request is an ordinary one again."""


@dataclass(slots=True)
class _Step:
    """The lines of one step's bitmask: for each request one per draft token, one more, and unused ones."""

    drafts: list[tuple[str, list[int]]]
    """The requests and their draft tokens."""
    rows: list[GuidedRow] = field(default_factory=list)
    """The lines with a mask. The others are unconstrained: reasoning, and padding after the draft tokens."""
    reasoning: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By request, if tokens of its output may end its reasoning: the number of lines before that end, and the line that
    has the mask of the empty output."""


class GuidedManager(StructuredOutputManager):  # type: ignore[misc]
    """vLLM's `StructuredOutputManager`, with masks from a pool."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
            raise ValueError("guided's structured outputs don't work with the executor external_launcher")
        super().__init__(vllm_config)
        self._pool, self._step_wait = lazy_pool(vllm_config)
        # vLLM accepts requests only after this: while they wait, vLLM's processes poll, and Ray would start too slowly.
        # After a failure, which is logged, requests try again.
        self._pool.opened().exception()
        weakref.finalize(self, self._pool.shutdown)
        self.errors: dict[str, RequestError] = {}
        """The errors of failed requests, by vLLM's id, until the requests are freed. Any thread adds entries."""
        self._masker = Masker(self._pool, self._note_failure)
        self._stride = 1 + vllm_config.num_speculative_tokens
        """Number of lines that a request has in a bitmask."""
        self._words = words(vllm_config.model_config.get_vocab_size())
        self._guided = self._masker.requests
        self._slow: dict[str, GuidedRequest] = {}
        """Requests that had a late mask. They join a batch only when their mask is ready, until `_QUICK_MASKS` masks in
        succession took less than a step."""
        self.missing: list[str] = []
        """Ids of requests without a mask in this step. Their tokens must be discarded."""
        self._step: _Step | None = None
        """The step that is being prepared: its masks are being computed."""
        config = vllm_config.scheduler_config
        base = config.get_scheduler_cls()
        config.scheduler_cls = type(f"Guided{base.__name__}", (_GuidedScheduling, base), {"__module__": __name__})

    def _note_failure(self, request_id: str, error: GuidedError) -> None:
        """Note a failure as vLLM answers it: with status 400, 503 (retryable) or 500."""
        # Also a client's mistake: a caller of `LLM.generate` is told no message.
        level = logging.ERROR if error.status >= 500 else logging.INFO
        _log.log(level, "guided request %s fails: %s", request_id, error)
        code = error.code if error.status >= 429 else "validation_error"
        self.errors[request_id] = RequestError(code, str(error), error.retryable)

    def grammar_init(self, request: Request) -> None:
        """Compile a request's constraint. Called by the thread that receives requests."""
        structured = request.structured_output_request
        if structured is None:
            return
        stops = frozenset(request.sampling_params.stop_token_ids or ())
        guided = GuidedRequest(request.request_id, stops.difference(self._pool.vocabulary.stop_token_ids))
        structured.grammar = guided.compiled
        self._masker.begin(guided, structured.params._backend)

    def grammar_bitmask(
        self,
        requests: Mapping[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> NDArray[np.int32] | None:
        """Return the masks of a step, int32 `[requests * stride, words]`: for each request as many lines as vLLM's."""
        if not structured_output_request_ids:
            return None
        step = self._step
        if step is None or step.drafts != _drafts(structured_output_request_ids, scheduled_spec_decode_tokens):
            step = self.prepare(requests, structured_output_request_ids, scheduled_spec_decode_tokens)
        self._step = None
        bitmask = np.full((len(step.drafts) * self._stride, self._words), -1, np.int32)
        discarded = self._masker.collect(bitmask, self._step_wait)
        for number, (request_id, drafts) in enumerate(step.drafts):
            guided = self._guided.get(request_id)
            if guided is None:
                continue
            first = number * self._stride
            guided.masks = bitmask[first : first + 1 + len(drafts)]
            if request_id in step.reasoning:
                count, beginning = step.reasoning[request_id]
                self._mask_reasoning_ends(requests[request_id], guided.masks[:count], bitmask[beginning])
            if guided.stops:
                self._allow_stops(guided)
            invalid = next((place for place in range(len(drafts)) if first + place + 1 in discarded), None)
            if invalid is not None:  # vLLM counts the drafts before the first -1 as acceptable
                scheduled_spec_decode_tokens[request_id] = [*drafts[:invalid], *[-1] * (len(drafts) - invalid)]
            if guided.late or guided.error is not None:
                self._slow[request_id], guided.quick = guided, 0
                self.missing.append(request_id)
        return bitmask

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """Return the draft tokens to be verified. The mask before an invalid one forbids it."""
        if request.request_id not in self._guided:
            return spec_tokens
        return [] if request.request_id in self._slow else list(strip_speculative_padding(spec_tokens))

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Add sampled tokens to a request's output. Returns False, which ends the request, if a mask forbids one."""
        guided = self._guided.get(request.request_id)
        if guided is None or not new_token_ids:
            return True
        start = self._get_constraint_bounds(request, new_token_ids, spec_tokens_committed=True).grammar_start
        if start > len(new_token_ids):
            return True
        request.structured_output_request.reasoning_ended = True
        for mask, token in zip(guided.masks if guided.masks is not None else (), new_token_ids, strict=False):
            if not _allows(mask, token):
                self._masker.fail(guided, TokenRejected(f"the engine sampled token {token}, which is forbidden"))
                break
        guided.tokens.extend(new_token_ids[start:])
        return guided.error is None

    def clear_backend(self) -> None:
        """Close the pool."""
        super().clear_backend()
        self._pool.shutdown()

    def hold_back(self, requests: Mapping[str, Request]) -> set[str]:
        """Return the ids of slow requests that must not join a batch now: their masks are missing.

        Requests these masks first, without waiting. Preempted requests join one at a time: vLLM computes each again
        from its beginning, and the batch waits for that.
        """
        slow = self._slow
        if not slow:
            return set()
        self._step = None
        held: set[str] = set()
        asking: list[GuidedRequest] = []
        decided = self._masker.decided()
        for name, guided in slow.items():
            request = requests.get(name)
            if request is None or request.num_output_placeholders > 0:  # its last token is being computed
                held.add(name)
            elif not guided.late <= decided:
                guided.quick = 0
            elif guided.late or guided.asked != len(guided.tokens):
                asking.append(guided)
        self._masker.prepare([GuidedRow(guided, line, guided.tokens) for line, guided in enumerate(asking)])
        self._masker.collect(np.empty((len(asking), self._words), np.int32), 0.0)
        for guided in asking:
            guided.asked = len(guided.tokens)
            guided.quick += 1
            if guided.quick >= _QUICK_MASKS and not guided.late:
                del slow[guided.request_id]
        held |= {name for name, guided in slow.items() if guided.late or guided.error is not None}
        returning = [name for name in slow if name not in held and requests[name].status == RequestStatus.PREEMPTED]
        return held.union(returning[1:])

    def free(self, request_ids: Iterable[str]) -> None:
        """Free the matchers and grammars of requests that are over. Unknown ids are ignored."""
        for request_id in request_ids:
            guided = self._guided.get(request_id)
            self._slow.pop(request_id, None)
            self.errors.pop(request_id, None)
            if guided is not None:
                self._step = None
                self._masker.end(guided)

    def prepare(
        self, requests: Mapping[str, Request], request_ids: Sequence[str], drafts: dict[str, list[int]]
    ) -> _Step:
        """Start to compute the masks of a step, while the forward pass runs. `grammar_bitmask` follows."""
        self._step = step = _Step(_drafts(request_ids, drafts))
        for number, (request_id, given) in enumerate(step.drafts):
            guided = self._guided.get(request_id)
            if guided is None:  # it is over, and vLLM still transfers its blocks
                continue
            tokens = strip_speculative_padding(given)
            grammar_start, constraint_start = self._get_constraint_bounds(requests[request_id], tokens)
            first = number * self._stride
            if constraint_start and self._implicit_ends(requests[request_id]):
                ends_before_output = grammar_start == constraint_start <= len(tokens)
                beginning = first + constraint_start if ends_before_output else first
                step.reasoning[request_id] = min(constraint_start, 1 + len(tokens)), beginning
                if not ends_before_output:
                    step.rows.append(GuidedRow(guided, first, guided.tokens))
            for count in range(constraint_start, len(tokens) + 1):
                consumed = tokens[grammar_start:count]
                before = [*guided.tokens, *consumed] if consumed else guided.tokens
                step.rows.append(GuidedRow(guided, first + count, before, len(consumed)))
        self._masker.prepare(step.rows)
        return step

    def _implicit_ends(self, request: Request) -> Collection[int]:
        """Return the tokens that end the reasoning and begin the output, such as the start of a tool call."""
        reasoner = self._get_reasoner(request)
        known = isinstance(reasoner, ParserEngineReasoningAdapter)
        return reasoner.implicit_reasoning_end_token_ids if known else ()

    def _mask_reasoning_ends(self, request: Request, masks: NDArray[np.int32], beginning: NDArray[np.int32]) -> None:
        """Forbid the tokens that end the reasoning where the output can't begin with them. Others are allowed.

        Args:
            masks: int32 `[lines, words]`, those before the end of the reasoning.
            beginning: int32 `[words]`, the mask of the empty output.
        """
        forbidden = [token for token in self._implicit_ends(request) if not _allows(beginning, token)]
        masks[:] = -1
        for token in forbidden:
            masks[:, token >> 5] &= ~_bit(token)

    def _allow_stops(self, guided: GuidedRequest) -> None:
        """Allow the request's own stop tokens in those of its masks that allow the end of the output."""
        vocabulary = self._pool.vocabulary
        assert guided.masks is not None
        for mask in guided.masks:
            complete = any(_allows(mask, token) for token in vocabulary.stop_token_ids)
            for token in guided.stops:
                word = mask[token >> 5]
                mask[token >> 5] = word | _bit(token) if complete else word & ~_bit(token)


def lazy_pool(config: VllmConfig) -> tuple[LazyPool, float]:
    """Read `--additional-config '{"guided": {...}}'`.

    Returns:
        The pool, which is not open yet, and `step_wait`: seconds that a step, with all its rows, waits for a mask.

    Raises:
        InvalidRequest: vLLM was started without a tokenizer.
        TypeError, ValueError: there is no such pool or option, or its value is out of range.
    """
    additional = config.additional_config if isinstance(config.additional_config, Mapping) else {}
    options = {"pool": "ray", "step_wait": 0.2, **(additional.get("guided") or {})}
    step_wait = options.pop("step_wait")
    if not isinstance(step_wait, int | float) or step_wait < 0:
        raise ValueError(f"step_wait is a number of seconds, 0 or more, not {step_wait!r}")
    if options["pool"] == "ray":
        options.setdefault("max_replays", 2)  # vLLM has no finish reason for another request's fault
        if config.parallel_config.distributed_executor_backend == "ray":
            options.setdefault("address", "auto")  # the cluster that vLLM itself runs on
    make = find_pool(options.pop("pool"), options)
    vocabulary = model_vocabulary(config)

    def open_reported() -> MaskPool:
        opened = make(vocabulary)
        metrics.report(opened, lambda: pool.closed)
        return opened

    pool = LazyPool(vocabulary, open_reported)
    return pool, step_wait


def find_pool(name: str, options: Mapping[str, Any]) -> Callable[[Vocabulary], MaskPool]:
    """Return a function that opens a pool: "ray" or "inline"."""
    if name == "inline":
        return partial(InlinePool, **options)
    if name != "ray":
        raise ValueError(f"pool is {name!r}; it must be ray or inline")
    return partial(import_module("actors").RayPool, options=RayPoolOptions(**options))  # `guided` needs no Ray


def model_vocabulary(config: VllmConfig) -> Vocabulary:
    """Return the vocabulary of the model's tokenizer, with all tokens that end an output."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = config.model_config
    tokenizer = cached_tokenizer_from_config(model)
    if tokenizer is None:
        raise InvalidRequest("guided's structured outputs need the tokenizer: start vLLM without --skip-tokenizer-init")
    tokenizer = getattr(tokenizer, "transformers_tokenizer", tokenizer)  # vLLM's class for Mistral models wraps it
    others = (model.try_get_generation_config() or {}).get("eos_token_id")
    stops = [tokenizer.eos_token_id, *(others if isinstance(others, list) else [others])]
    return Vocabulary.from_tokenizer(
        tokenizer, model.get_vocab_size(), list(dict.fromkeys(token for token in stops if token is not None))
    )


class _GuidedScheduling:
    """Overrides of the methods of vLLM's `Scheduler`: requests without a mask are skipped."""

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
        while manager.missing:
            request_id = manager.missing.pop()
            request = self.requests[request_id]
            if request in self.running:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic(), drop_stale_output=True)
                self.prev_step_scheduled_req_ids.discard(request_id)  # its tokens are sent again when it continues
        return output

    def update_from_output(self, *args: Any, **options: Any) -> Any:
        self.grammar_compile_error_reqs.update(self.structured_output_manager.errors)
        return super().update_from_output(*args, **options)  # type: ignore[misc]


def _drafts(request_ids: Iterable[str], drafts: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    return [(name, list(drafts.get(name, ()))) for name in request_ids]


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _bit(token: int) -> np.int32:
    """Return a token's bit in its word of a mask."""
    return np.uint32(1 << (token & 31)).view(np.int32)
