"""GuidedManager: vLLM's manager of structured outputs, with masks from a pool.

A request without its mask at the deadline, which is the expected end of the step's
forward pass, leaves the batch. Its token of this step is discarded. It keeps its
blocks, and joins a batch again when its mask is there. The prompt of a new request is
computed while its grammar is compiled; if that takes longer, the request leaves in the
same way.

vLLM's `StructuredOutputBackend` would be the narrower interface, but a row can't be
late there: a grammar is asked for one row at a time, and each answer is waited for.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from vllm.outputs import RequestError
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from guided.bitmask import words
from guided.errors import GuidedError, InvalidRequest, PoolUnavailable, TokenRejected
from guided.integrations.vllm import metrics
from guided.integrations.vllm.masker import GuidedRequest, GuidedRow, Masker
from guided.pools.inline import InlinePool
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import MaskPool
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger("guided.integrations")
_LOST_STEPS = 3
"""Number of steps that a late request loses about. Waiting for it costs all others."""


class StepClock:
    """Measures the engine's steps. Its deadline for masks is the expected end of a
    step's forward pass."""

    def __init__(self) -> None:
        # Seconds that the last steps took. The first entry is a guess, for the first
        # steps.
        self._durations = deque([0.1], maxlen=32)
        self._dispatched = 0.0
        self._updated = 0.0
        # A step with late rows does not count: it waited until its deadline, and
        # deadlines would grow with it.
        self.has_late_rows = False

    def dispatch(self) -> None:
        """Note that a forward pass was sent to the device. It starts when the step
        before it has ended."""
        self._dispatched = time.perf_counter()

    def update(self, tokens: int) -> None:
        """Note that a step with this number of tokens has ended. It took the time since
        the end of the one before."""
        now = time.perf_counter()
        if tokens and not self.has_late_rows:
            self._durations.append(now - self._updated)
        self._updated = now
        self.has_late_rows = False

    @property
    def step(self) -> float:
        """The seconds that a step takes. The median: a pause is no step, and few steps
        compute a long prompt."""
        return statistics.median(self._durations)

    def remaining(self) -> float:
        """Return the seconds until the deadline."""
        return max(
            0.0,
            max(self._dispatched, self._updated)
            + 1.05 * self.step
            - time.perf_counter(),
        )


@dataclass(slots=True)
class _BitmaskStep:
    """The lines of one step's bitmask: for each request one per draft token, one more,
    and unused ones."""

    drafts: list[tuple[str, list[int]]]
    """The requests and their draft tokens."""
    rows: list[GuidedRow] = field(default_factory=list)
    """The lines with a mask. The others are unconstrained: reasoning, and padding after
    the draft tokens."""
    reasoning: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The requests with tokens that may end their reasoning, by id: the number of lines
    before that end, and the line with the mask of the empty output."""


class GuidedManager(StructuredOutputManager):  # type: ignore[misc]
    """vLLM's `StructuredOutputManager`, with masks from a pool."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        if (
            vllm_config.parallel_config.distributed_executor_backend
            == "external_launcher"
        ):
            raise ValueError(
                "guided's structured outputs don't work with the executor external_launcher"
            )
        super().__init__(vllm_config)
        self._pool = open_pool(vllm_config)
        shutdown = self._shutdown = weakref.finalize(self, self._pool.shutdown)
        metrics.report(self._pool, lambda: not shutdown.alive)
        self.errors: dict[str, RequestError] = {}
        """The errors of failed requests, by vLLM's id, until the requests are freed.
        Any thread adds entries."""
        self._masker = Masker(self._pool, self._note_failure)
        self._stride = 1 + vllm_config.num_speculative_tokens
        """Number of lines that a request has in a bitmask."""
        self._words = words(vllm_config.model_config.get_vocab_size())
        self._guided = self._masker.requests
        # Requests that left the batch without a mask, until they have one
        self.late: dict[str, GuidedRequest] = {}
        self.clock = StepClock()
        self.missing: list[str] = []
        """The ids of requests without a mask in this step. Their tokens must be
        discarded."""
        self._step: _BitmaskStep | None = None
        """The step that is being prepared: its masks are being computed."""
        config = vllm_config.scheduler_config
        base = config.get_scheduler_cls()
        config.scheduler_cls = type(
            f"Guided{base.__name__}",
            (_GuidedScheduling, base),
            {"__module__": __name__},
        )

    def _note_failure(self, request_id: str, error: GuidedError) -> None:
        """Record a failure as vLLM answers it: with status 400, 503 (retryable) or
        500."""
        # Also a client's mistake: a caller of `LLM.generate` is told no message.
        if error.status >= 500:
            level = logging.ERROR
        else:
            level = logging.INFO
        _log.log(level, "guided request %s fails: %s", request_id, error)
        if error.status >= 429:
            code = error.code
        else:
            code = "validation_error"
        self.errors[request_id] = RequestError(code, str(error), error.retryable)

    def grammar_init(self, request: Request) -> None:
        """Compile a request's constraint. Called by the thread that receives
        requests."""
        structured = request.structured_output_request
        if structured is None:
            return
        stops = frozenset(request.sampling_params.stop_token_ids or ())
        guided = GuidedRequest(
            request.request_id, stops.difference(self._pool.vocabulary.stop_token_ids)
        )
        structured.grammar = guided.compiled
        self._masker.begin(guided, structured.params._backend)

    def grammar_bitmask(
        self,
        requests: Mapping[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> NDArray[np.int32] | None:
        """Return the masks of a step, int32 `[requests * stride, words]`: for each
        request as many lines as vLLM's."""
        step = self._step or self.prepare(
            requests, structured_output_request_ids, scheduled_spec_decode_tokens
        )
        self._step = None
        bitmask = np.full((len(step.drafts) * self._stride, self._words), -1, np.int32)
        discarded = self._masker.collect(
            bitmask, self.clock.remaining(), _LOST_STEPS * self.clock.step
        )
        for number, (request_id, drafts) in enumerate(step.drafts):
            guided = self._guided.get(request_id)
            if guided is None:
                continue
            first = number * self._stride
            guided.masks = bitmask[first : first + 1 + len(drafts)]
            if request_id in step.reasoning:
                count, beginning = step.reasoning[request_id]
                self._mask_reasoning_ends(
                    requests[request_id], guided.masks[:count], bitmask[beginning]
                )
            if guided.stops:
                self._allow_stops(guided)
            invalid = next(
                (
                    place
                    for place in range(len(drafts))
                    if first + place + 1 in discarded
                ),
                None,
            )
            # vLLM counts the drafts before the first -1 as acceptable
            if invalid is not None:
                scheduled_spec_decode_tokens[request_id] = [
                    *drafts[:invalid],
                    *[-1] * (len(drafts) - invalid),
                ]
            if guided.is_missing:
                self.clock.has_late_rows |= request_id not in self.late
                self.late[request_id] = guided
                self.missing.append(request_id)
            else:
                self.late.pop(request_id, None)
        return bitmask

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """Return the draft tokens to be verified. The mask before an invalid one
        forbids it."""
        if request.request_id not in self._guided:
            return spec_tokens
        # Draft tokens of a late request follow a token that was discarded.
        if request.request_id in self.late:
            return []
        return list(strip_speculative_padding(spec_tokens))

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Add sampled tokens to a request's output. Returns False, which ends the
        request, if a mask forbids one."""
        guided = self._guided.get(request.request_id)
        if guided is None or not new_token_ids:
            return True
        start = self._get_constraint_bounds(
            request, new_token_ids, spec_tokens_committed=True
        ).grammar_start
        if start > len(new_token_ids):
            return True
        request.structured_output_request.reasoning_ended = True
        for mask, token in zip(guided.masks, new_token_ids, strict=False):
            if not _allows(mask, token):
                self._masker.fail(
                    guided,
                    TokenRejected(
                        f"the engine sampled token {token}, which is forbidden"
                    ),
                )
                break
        guided.tokens.extend(new_token_ids[start:])
        return guided.error is None

    def clear_backend(self) -> None:
        """Close the pool."""
        super().clear_backend()
        self._shutdown()

    def held_back(self) -> set[str]:
        """Return the ids of late requests that still wait for their masks."""
        if not self.late:
            return set()
        self._step = None
        decided = self._masker.decided()
        return {
            request_id
            for request_id, guided in self.late.items()
            if not guided.is_decided(decided)
        }

    def free(self, request_ids: Iterable[str]) -> None:
        """Free the matchers and grammars of requests that are over. Unknown ids are
        ignored."""
        for request_id in request_ids:
            guided = self._guided.get(request_id)
            self.late.pop(request_id, None)
            self.errors.pop(request_id, None)
            if guided is not None:
                self._step = None
                self._masker.end(guided)

    def prepare(
        self,
        requests: Mapping[str, Request],
        request_ids: Sequence[str],
        drafts: dict[str, list[int]],
    ) -> _BitmaskStep:
        """Start to compute the masks of a step, while the forward pass runs.
        `grammar_bitmask` follows."""
        self._step = step = _BitmaskStep(
            [
                (request_id, list(drafts.get(request_id, ())))
                for request_id in request_ids
            ]
        )
        for number, (request_id, given) in enumerate(step.drafts):
            guided = self._guided.get(request_id)
            if guided is None:  # it is over, and vLLM still transfers its blocks
                continue
            tokens = strip_speculative_padding(given)
            grammar_start, constraint_start = self._get_constraint_bounds(
                requests[request_id], tokens
            )
            first = number * self._stride
            if constraint_start and self._implicit_ends(requests[request_id]):
                ends_before_output = grammar_start == constraint_start <= len(tokens)
                beginning = first
                if ends_before_output:
                    beginning += constraint_start
                else:
                    step.rows.append(GuidedRow(guided, first, guided.tokens))
                step.reasoning[request_id] = (
                    min(constraint_start, 1 + len(tokens)),
                    beginning,
                )
            for count in range(constraint_start, len(tokens) + 1):
                consumed = tokens[grammar_start:count]
                if consumed:
                    before = [*guided.tokens, *consumed]
                else:
                    before = guided.tokens
                step.rows.append(
                    GuidedRow(guided, first + count, before, len(consumed))
                )
        self._masker.prepare(step.rows)
        return step

    def _implicit_ends(self, request: Request) -> Collection[int]:
        """Return the tokens that end the reasoning and begin the output, such as the
        start of a tool call."""
        reasoner = self._get_reasoner(request)
        known = isinstance(reasoner, ParserEngineReasoningAdapter)
        return reasoner.implicit_reasoning_end_token_ids if known else ()

    def _mask_reasoning_ends(
        self, request: Request, masks: NDArray[np.int32], beginning: NDArray[np.int32]
    ) -> None:
        """Forbid the tokens that end the reasoning where the output can't begin with
        them. Others are allowed.

        Args:
            masks: int32 `[lines, words]`, those before the end of the reasoning.
            beginning: int32 `[words]`, the mask of the empty output.
        """
        forbidden = [
            token
            for token in self._implicit_ends(request)
            if not _allows(beginning, token)
        ]
        masks[:] = -1
        for token in forbidden:
            masks[:, token >> 5] &= ~_bit(token)

    def _allow_stops(self, guided: GuidedRequest) -> None:
        """Allow the request's own stop tokens in those of its masks that allow the end
        of the output."""
        vocabulary = self._pool.vocabulary
        for mask in guided.masks:
            complete = any(_allows(mask, token) for token in vocabulary.stop_token_ids)
            for token in guided.stops:
                word = mask[token >> 5]
                if complete:
                    mask[token >> 5] = word | _bit(token)
                else:
                    mask[token >> 5] = word & ~_bit(token)


def open_pool(config: VllmConfig) -> MaskPool:
    """Open the pool of `--additional-config '{"guided": {...}}'`.

    Raises:
        InvalidRequest: vLLM was started without a tokenizer.
        TypeError, ValueError: there is no such pool or option, or its value is out of
            range.
    """
    additional = (
        config.additional_config
        if isinstance(config.additional_config, Mapping)
        else {}
    )
    options = {"pool": "ray", **(additional.get("guided") or {})}
    if options["pool"] == "ray":
        # vLLM has no finish reason for another request's fault
        options.setdefault("max_replays", 2)
        if config.parallel_config.distributed_executor_backend == "ray":
            # the cluster that vLLM itself runs on
            options.setdefault("address", "auto")
    return find_pool(options.pop("pool"), options)(model_vocabulary(config))


def find_pool(
    name: str, options: Mapping[str, Any]
) -> Callable[[Vocabulary], MaskPool]:
    """Return a function that opens a pool: "ray" or "inline"."""
    if name == "inline":
        return partial(InlinePool, **options)
    if name != "ray":
        raise ValueError(f"pool is {name!r}; it must be ray or inline")
    return partial(_start_pool, RayPoolOptions(**options))


def _start_pool(options: RayPoolOptions, vocabulary: Vocabulary) -> MaskPool:
    """Start a pool of Ray actors, and wait until it has started, or can't be.

    vLLM accepts requests only after this: while they wait, vLLM's processes poll, and
    Ray would start too slowly.
    """
    # `guided` needs no Ray
    pool: Any = import_module("actors").RayPool(vocabulary, options)
    try:
        pool.started()
    except PoolUnavailable as error:
        _log.error("requests fail until the mask pool has started: %s", error)
    return cast("MaskPool", pool)


def model_vocabulary(config: VllmConfig) -> Vocabulary:
    """Return the vocabulary of the model's tokenizer, with all tokens that end an
    output."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = config.model_config
    tokenizer = cached_tokenizer_from_config(model)
    if tokenizer is None:
        raise InvalidRequest(
            "guided's structured outputs need the tokenizer: start vLLM without --skip-tokenizer-init"
        )
    # vLLM's class for Mistral models wraps it
    tokenizer = getattr(tokenizer, "transformers_tokenizer", tokenizer)
    others = (model.try_get_generation_config() or {}).get("eos_token_id")
    stops = [
        tokenizer.eos_token_id,
        *(others if isinstance(others, list) else [others]),
    ]
    return Vocabulary.from_tokenizer(
        tokenizer,
        model.get_vocab_size(),
        list(dict.fromkeys(token for token in stops if token is not None)),
    )


class _GuidedScheduling:
    """Overrides of the methods of vLLM's `Scheduler`: requests without a mask are
    skipped."""

    structured_output_manager: GuidedManager
    requests: dict[str, Request]
    running: list[Request]
    kv_holding_waiting: Any  # the queue of waiting requests that keep their blocks
    kv_cache_manager: Any
    has_mamba_layers: bool
    # vLLM ends these with their errors, after this step
    grammar_compile_error_reqs: dict[str, RequestError]
    prev_step_scheduled_req_ids: set[str]
    # the workers forget these, and get all tokens when one continues
    reset_preempted_req_ids: set[str]
    _preempt_request: Any
    scheduler_config: Any
    _held_back: set[str]  # late requests that still wait for their masks
    # Whether one of them may join all the same, and computes its last token, perhaps in
    # vain. An asynchronous step is scheduled while the one before is computed: a
    # request that waits outside would lose up to three steps.
    _may_guess: bool

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        manager = self.structured_output_manager
        self._held_back = manager.held_back()
        self._may_guess = self.scheduler_config.async_scheduling
        self._free_scarce_blocks()
        output: SchedulerOutput = super().schedule(*args, **options)  # type: ignore[misc]
        manager.clock.dispatch()
        manager.free(output.finished_req_ids)
        if (
            output.has_structured_output_requests
            and not output.pending_structured_output_tokens
        ):
            request_ids = [
                request_id
                for request_id in output.num_scheduled_tokens
                if (request := self.requests[request_id]).use_structured_output
                and not request.is_prefill_chunk
            ]
            manager.prepare(
                self.requests, request_ids, output.scheduled_spec_decode_tokens
            )
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if request.request_id in self._held_back:
            if not self._may_guess or request.num_computed_tokens == 0:
                return False
            self._may_guess = False
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            # its prompt can be computed without the grammar
            request.status = RequestStatus.WAITING
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        return ready

    def get_grammar_bitmask(
        self, scheduler_output: SchedulerOutput
    ) -> GrammarOutput | None:
        output: GrammarOutput | None = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        manager = self.structured_output_manager
        while manager.missing:
            request = self.requests[manager.missing.pop()]
            if request in self.running:
                self.running.remove(request)
                self._set_aside(request)
        return output

    def _set_aside(self, request: Request) -> None:
        """Discard the token that is being sampled, and have the request wait. Its last
        token is computed again."""
        # Sent again with all its tokens when it continues, by the V1 runner: V2 has no
        # such list.
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        computed = request.num_tokens - 1
        # a recurrent state can't go back by one token
        if computed == 0 or self.has_mamba_layers:
            self._preempt_request(request, time.monotonic(), True)
            return
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = computed
        request.spec_token_ids = []
        request.drop_stale_output = True
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        self.kv_holding_waiting.prepend_request(request)
        self.reset_preempted_req_ids.add(request.request_id)

    def _free_scarce_blocks(self) -> None:
        """Take the blocks of late requests if the next step could need them: otherwise
        nothing may be able to run."""
        late = [
            request
            for request in self.kv_holding_waiting
            if request.status == RequestStatus.PREEMPTED
        ]
        needed = self.kv_cache_manager.num_kv_cache_groups * (
            len(self.running) + len(late)
        )
        if late and self.kv_cache_manager.block_pool.get_num_free_blocks() < needed:
            self.kv_holding_waiting.remove_requests(late)
            for request in late:
                request.status = RequestStatus.RUNNING
                self._preempt_request(request, time.monotonic(), True)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **options: Any
    ) -> Any:
        manager = self.structured_output_manager
        manager.clock.update(scheduler_output.total_num_scheduled_tokens)
        self.grammar_compile_error_reqs.update(manager.errors)
        return super().update_from_output(scheduler_output, *args, **options)  # type: ignore[misc]


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _bit(token: int) -> np.int32:
    """Return a token's bit in its word of a mask."""
    return np.uint32(1 << (token & 31)).view(np.int32)
