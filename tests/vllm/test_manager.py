"""`GuidedManager` in vLLM's engine, in this process, with a pool that fails rows or
makes them late as told."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from byte_vocabulary import LETTERS, STOP
from faulty_pool import FaultyPool

from benchmarks import fake_device
from guided.bitmask import allowed_ids
from guided.constraint import Constraint
from guided.errors import PoolUnavailable
from guided.integrations.vllm import activation
from guided.integrations.vllm.request_params import GuidedParams
from guided.pools.inline import InlinePool
from guided.pools.options import RayPoolOptions
from guided.vocabulary import Vocabulary
from tests.vllm.sample_constraints import CITIES, DATE, SCHEMA, matches, satisfies
from tests.vllm.vllm_server import MAX_MODEL_LEN

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
import vllm.v1.engine.core
from vllm import LLM, SamplingParams
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.parser.engine.parser_engine import ReasoningEnd
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request

from guided.integrations.vllm.manager import GuidedManager, StepClock, find_pool

OWN: list[tuple[dict[str, Any], Any]] = [
    ({"json": SCHEMA, "disable_any_whitespace": True}, satisfies(SCHEMA)),
    ({"regex": DATE}, matches(DATE)),
    ({"choice": CITIES}, CITIES.__contains__),
    ({"regex": "[a-f]{30}"}, matches("[a-f]{30}")),
]


class Host:
    """vLLM's engine in this process."""

    def __init__(self, model: Path, pool: list[FaultyPool], **arguments: Any) -> None:
        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            disable_log_stats=True,
            **arguments,
        )
        (self.pool,) = pool
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

    def ask(self, *kinds: dict[str, Any], free: int = 1) -> tuple[list[Any], list[Any]]:
        """Run requests with these constraints beside `free` ones. Returns the outputs
        of both."""
        params = [
            SamplingParams(
                max_tokens=200,
                temperature=0,
                structured_outputs=StructuredOutputsParams(**kind),
            )
            for kind in kinds
        ]
        params += [
            SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
            for _ in range(free)
        ]
        outputs = self.llm.generate(["Text: "] * len(params), params, use_tqdm=False)
        found = [output.outputs[0] for output in outputs]
        return found[: len(kinds)], found[len(kinds) :]

    def calm(self) -> None:
        self.pool.delay = lambda sequence_id, position: 0
        self.pool.fails = lambda sequence_id, position: False


DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


def schedule_asynchronously(patched: pytest.MonkeyPatch) -> None:
    """Have vLLM schedule a step before it has the tokens of the one before, as it does
    on GPUs, but not on CPUs."""
    fake_device.use(patched.setattr)
    # a CPU computes in the order of the calls
    for name in ("Event", "Stream", "current_stream", "stream"):
        patched.setattr(torch.cuda, name, MagicMock())


ENGINES = (
    ["v2", "v2-drafts"]
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    else ["sync", "async", "drafts"]
)
"""The V2 runner's environment is not for V1: `test_v2.py` runs these tests in it."""


@pytest.fixture(scope="module", params=ENGINES)
def host(request: pytest.FixtureRequest, vllm_model: Path) -> Iterator[Host]:
    pools: list[FaultyPool] = []

    def open_pool(vocabulary: Vocabulary) -> FaultyPool:
        pools.append(FaultyPool(vocabulary))
        return pools[-1]

    with pytest.MonkeyPatch.context() as patched:
        for place, name in (
            (vllm.v1.engine.core, "StructuredOutputManager"),
            (SamplingParams, "_validate_structured_outputs"),
        ):
            patched.setattr(place, name, getattr(place, name))  # restored at the end
        patched.setattr(
            "guided.integrations.vllm.manager.find_pool",
            lambda name, options: open_pool,
        )
        patched.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patched.setenv("GUIDED_VLLM", "1")
        activation.activate()
        if request.param not in ("sync", "drafts"):
            schedule_asynchronously(patched)
        host = Host(
            vllm_model,
            pools,
            speculative_config=DRAFTS if "drafts" in request.param else None,
        )
        config = host.scheduler.vllm_config
        assert config.scheduler_config.async_scheduling == (
            request.param not in ("sync", "drafts")
        )
        assert config.use_v2_model_runner == ("v2" in request.param)
        yield host
        host.llm.llm_engine.engine_core.shutdown()


class TestLateMasks:
    @pytest.mark.parametrize(
        "positions", [[3], range(0, 200, 7), range(200)], ids=["one", "some", "all"]
    )
    def test_a_late_row_leaves_the_batch_and_its_output_is_the_same(
        self, host: Host, positions: Any
    ) -> None:
        host.calm()
        expected, free = host.ask(*[kind for kind, _ in OWN])
        assert all(
            is_valid(one.text) for (_, is_valid), one in zip(OWN, expected, strict=True)
        ), expected
        before = len(host.pool.opened)

        def delay(sequence_id: int, position: int) -> int:
            """Every other sequence that is opened from now on is late."""
            return 2 * (
                sequence_id in host.pool.opened[before::2] and position in positions
            )

        host.pool.delay = delay
        found, also_free = host.ask(*[kind for kind, _ in OWN])
        assert [one.text for one in found] == [one.text for one in expected]
        assert [one.finish_reason for one in found] == ["stop"] * len(OWN)
        assert [one.token_ids for one in also_free] == [one.token_ids for one in free]

    @pytest.mark.parametrize("scarce", [False, True], ids=["kept", "scarce"])
    def test_a_late_request_keeps_its_blocks(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, scarce: bool
    ) -> None:
        """Only its last token is computed again, if the others can get blocks."""
        host.calm()
        kinds = [{"regex": "[a-f]{30}"}] * 3
        expected, _ = host.ask(*kinds)
        host.scheduler.reset_prefix_cache()
        blocks = host.scheduler.kv_cache_manager.block_pool
        taken = (
            blocks.get_new_blocks(blocks.get_num_free_blocks() - 4) if scarce else []
        )
        joined = joining_again(host, monkeypatch)
        host.pool.delay = lambda sequence_id, position: 3 * (position in (3, 9))
        found, _ = host.ask(*kinds)
        blocks.free_blocks(taken)
        assert [one.text for one in found] == [one.text for one in expected]
        assert len(joined) >= 6
        assert (max(joined) > 1) == scarce

    def test_a_mask_is_waited_for_once(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Under asynchronous scheduling, the request's last token is computed in each
        step until its mask is there."""
        host.calm()
        joined = joining_again(host, monkeypatch)
        asked: Counter[tuple[int, int]] = Counter()
        submit = host.pool.submit

        def counted(sequences: Any, *batch: int | None) -> None:
            asked.update(
                (each.sequence_id, len(each.output_token_ids)) for each in sequences
            )
            submit(sequences, *batch)

        monkeypatch.setattr(host.pool, "submit", counted)
        host.pool.delay = lambda sequence_id, position: 5 * (position == 3)
        (found,), _ = host.ask({"regex": "[a-f]{30}"})
        assert found.finish_reason == "stop"
        assert (
            max(count for (_, position), count in asked.items() if position == 3) == 2
        )
        assert {count for (_, position), count in asked.items() if position > 10} == {1}
        if host.scheduler.scheduler_config.async_scheduling:
            assert len(joined) > 2
        else:
            assert len(joined) <= 2, (
                "once, or as itself and as a position behind draft tokens"
            )

    def test_a_prompt_is_computed_while_its_grammar_compiles(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host.calm()
        schedule, computed = host.scheduler.schedule, list[int]()

        def scheduled(*args: Any) -> Any:
            output = schedule(*args)
            computed.append(output.total_num_scheduled_tokens)
            if len(computed) == 20:
                host.pool.finish_compiles()
            return output

        monkeypatch.setattr(host.scheduler, "schedule", scheduled)
        host.pool.hold_compiles = True
        try:
            (found,), _ = host.ask({"choice": ["yes", "no"]}, free=0)
        finally:
            host.pool.hold_compiles = False
        assert found.text in ("yes", "no")
        assert max(computed[:20]) > 1, "its prompt"

    @pytest.mark.parametrize("lost", [False, True], ids=["failed", "lost"])
    def test_a_failed_row_ends_with_an_error_and_no_unmasked_token(
        self, host: Host, lost: bool
    ) -> None:
        host.calm()
        before = len(host.pool.opened)

        def fails(sequence_id: int, position: int) -> bool:
            culprit = host.pool.opened.index(sequence_id) == before and position == 5
            if culprit and lost:
                host.pool.lose(sequence_id)
            return culprit and not lost

        host.pool.fails = fails
        found, free = host.ask(*[kind for kind, _ in OWN])
        reasons = [one.finish_reason for one in found]
        assert sorted(reasons) == ["error", "stop", "stop", "stop"]
        assert lost or len(found[reasons.index("error")].token_ids) == 5
        for (_, is_valid), one in zip(OWN, found, strict=True):
            assert one.finish_reason == "error" or is_valid(one.text)
        assert free[0].finish_reason == "length"

    def test_everything_is_freed(self, host: Host) -> None:
        host.calm()
        host.ask(*[kind for kind, _ in OWN])
        host.ask()
        assert host.pool.status().workers[0].open_sequences == 0

    def test_the_same_parameters_twice(self, host: Host) -> None:
        """vLLM keeps what validation wrote into the caller's object."""
        host.calm()
        params = SamplingParams(
            max_tokens=20,
            structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
        )
        for _ in range(2):
            outputs = host.llm.generate(["a", "b"], params, use_tqdm=False)
            assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}


def joining_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of computed tokens, without drafts, of each
    request that joins again."""
    schedule, joined = host.scheduler.schedule, list[int]()

    def scheduled(*args: Any) -> Any:
        output = schedule(*args)
        joining = [
            *output.scheduled_cached_reqs.resumed_req_ids,
            *(new.req_id for new in output.scheduled_new_reqs),
        ]
        for request_id in joining:
            if host.scheduler.requests[request_id].num_output_tokens:
                drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                joined.append(output.num_scheduled_tokens[request_id] - drafts)
        return output

    monkeypatch.setattr(host.scheduler, "schedule", scheduled)
    return joined


class TestDeadline:
    def test_it_follows_the_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(
            "guided.integrations.vllm.manager.time.perf_counter", lambda: now[0]
        )
        clock = StepClock()

        def step(seconds: float, tokens: int = 1) -> None:
            clock.dispatch()
            now[0] += seconds
            clock.update(tokens)

        for _ in range(9):
            step(0.004)
        assert clock.remaining() == pytest.approx(0.0042)
        now[0] += 0.003
        assert clock.remaining() == pytest.approx(0.0012)
        step(5.0)
        assert clock.remaining() == pytest.approx(0.0042), "a pause"
        for _ in range(50):
            step(0.001, tokens=0)
            clock.has_late_rows = True
            step(0.01)
        assert clock.remaining() == pytest.approx(0.0042), (
            "steps without tokens, and those that waited for a mask"
        )
        for _ in range(40):
            step(0.008)
        assert clock.remaining() == pytest.approx(0.0084)


# the gates of reasoning, and draft tokens: no engine

END_OF_THOUGHT, STRIDE = 19, 5


def use_pool(
    monkeypatch: pytest.MonkeyPatch, open_pool: Callable[[], InlinePool]
) -> None:
    """Have managers open this pool."""
    monkeypatch.setattr(
        "guided.integrations.vllm.manager.open_pool", lambda config: open_pool()
    )


class Reasoner:
    def __init__(self, tokenizer: object = None) -> None:
        pass

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return END_OF_THOUGHT in list(input_ids)

    def is_reasoning_end_streaming(
        self, input_ids: list[int], delta_ids: list[int]
    ) -> bool:
        return END_OF_THOUGHT in list(delta_ids)


class ToolReasoner(ParserEngineReasoningAdapter):
    """Its reasoning ends at `END_OF_THOUGHT`, or at 1 or 9, with which the output
    begins then."""

    implicit_reasoning_end_token_ids = frozenset({1, 9})
    reasoning_end_token_ids = frozenset({1, 9, END_OF_THOUGHT})

    def __init__(self, tokenizer: object = None) -> None:
        pass

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return False

    def is_reasoning_end_streaming(
        self, input_ids: list[int], delta_ids: list[int]
    ) -> bool:
        return not self.reasoning_end_token_ids.isdisjoint(delta_ids)

    def find_reasoning_end(self, token_ids: Sequence[int]) -> ReasoningEnd | None:
        place = next(
            (
                place
                for place, token in enumerate(token_ids)
                if token in self.reasoning_end_token_ids
            ),
            None,
        )
        return (
            None
            if place is None
            else ReasoningEnd(place, token_ids[place] != END_OF_THOUGHT)
        )


def subject_config() -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
        scheduler_config=SimpleNamespace(
            max_num_seqs=4, get_scheduler_cls=lambda: object
        ),
        model_config=SimpleNamespace(
            skip_tokenizer_init=True,
            get_vocab_size=lambda: LETTERS.padded_vocab_size,
            is_diffusion=False,
        ),
        structured_outputs_config=SimpleNamespace(enable_in_reasoning=False),
        additional_config={},
        num_speculative_tokens=STRIDE - 1,
    )


def structured_request(
    reasoning_ended: bool | None = None, stops: Sequence[int] = ()
) -> Request:
    outputs = StructuredOutputsParams(choice=["abcd"])
    params = SamplingParams(structured_outputs=outputs, stop_token_ids=list(stops))
    params.structured_outputs._backend = GuidedParams(
        Constraint.choice(["abcd"])
    ).to_text()
    params.update_from_generation_config({}, STOP)
    return Request("r", [5], params, None, reasoning_ended=reasoning_ended)


class Subject:
    """A manager and one request for the tokens 1, 2, 3, 4."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        reasoner: type[Any] | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        use_pool(monkeypatch, lambda: InlinePool(LETTERS))
        self.manager = GuidedManager(subject_config())
        self.manager.tokenizer = None
        self.manager.reasoner_cls = reasoner
        self.request = structured_request(None if reasoner is None else False, stops)
        self.manager.grammar_init(self.request)
        self.request.structured_output_request._grammar.result(60)

    def rows(self, drafts: list[int]) -> list[list[int] | str]:
        """Return the allowed tokens of each row; "all" for a row without a
        constraint."""
        self.drafts = {"r": drafts}
        masks = self.manager.grammar_bitmask({"r": self.request}, ["r"], self.drafts)
        assert masks is not None
        assert len(masks) == STRIDE
        return [
            "all" if (row == -1).all() else allowed_ids(row).tolist()
            for row in masks[: 1 + len(drafts)]
        ]

    def accept(self, *tokens: int) -> bool:
        self.request.append_output_token_ids(list(tokens))
        return bool(self.manager.accept_tokens(self.request, list(tokens)))


class TestStart:
    @pytest.mark.parametrize("fails", [False, True])
    def test_the_engine_waits_for_the_start_of_its_pool(
        self, monkeypatch: pytest.MonkeyPatch, fails: bool
    ) -> None:
        """Also if that fails. Requests that wait would have vLLM poll, and take the
        time that the start needs."""
        events: list[str] = []

        class SlowPool(InlinePool):
            def __init__(self, vocabulary: Vocabulary, options: RayPoolOptions) -> None:
                super().__init__(vocabulary)

            def started(self) -> SlowPool:
                events.append("started")
                if fails:
                    raise PoolUnavailable("told to fail")
                return self

            def compile(self, *arguments: Any) -> Any:
                raise PoolUnavailable("told to fail")

        # `host` replaces it
        monkeypatch.setattr("guided.integrations.vllm.manager.find_pool", find_pool)
        monkeypatch.setattr("actors.RayPool", SlowPool, raising=False)
        monkeypatch.setattr(
            "guided.integrations.vllm.manager.model_vocabulary", lambda config: LETTERS
        )
        manager = GuidedManager(subject_config())
        assert events == ["started"]
        manager.grammar_init(structured_request())
        error = manager.errors["r"]
        assert (error.code, error.message, error.retryable) == (
            "pool_unavailable",
            "told to fail",
            True,
        )
        assert type(error.to_exception()).__name__ == "RetryableRequestError", "a 503"


class TestDraftTokens:
    def test_a_token_that_its_mask_forbids_ends_the_request(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = Subject(monkeypatch)
        subject.rows([])
        assert not subject.accept(7)
        assert subject.manager.errors["r"].code == "token_rejected"


class TestStopTokens:
    def test_own_ones_are_allowed_at_the_end_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = Subject(monkeypatch, stops=[7])
        assert subject.rows([1, 2, 3, 4]) == [[1], [2], [3], [4], sorted([7, STOP])]


class TestReasoning:
    def test_the_constraint_begins_after_the_end_of_the_reasoning(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = Subject(monkeypatch, Reasoner)
        assert subject.rows([]) == ["all"]
        assert subject.accept(7)
        assert subject.rows([8, 9]) == ["all", "all", "all"]
        assert subject.rows([8, END_OF_THOUGHT, 1]) == ["all", "all", [1], [2]]
        assert subject.accept(8, END_OF_THOUGHT, 1, 2)
        assert subject.rows([3]) == [[3], [4]]

    @pytest.mark.parametrize("drafts", [[], [8], [8, 7]])
    def test_an_end_that_can_not_begin_the_output_is_forbidden(
        self, monkeypatch: pytest.MonkeyPatch, drafts: list[int]
    ) -> None:
        subject = Subject(monkeypatch, ToolReasoner)
        every = [token for token in range(32 * 2) if token != 9]
        assert subject.rows(drafts) == [every] * (1 + len(drafts))

    def test_a_token_that_ends_it_and_begins_the_output(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = Subject(monkeypatch, ToolReasoner)
        for drafts, masks in (
            ([8, END_OF_THOUGHT, 1], [[1], [2]]),
            ([8, 1, 2], [[2], [3]]),
        ):
            rows = subject.rows(drafts)
            assert [9 in row for row in rows[:2]] == [False, False]
            assert rows[2:] == masks
        assert subject.accept(8, 1, 2)
        assert subject.rows([3]) == [[3], [4]]
