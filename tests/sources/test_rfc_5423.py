"""vLLM's RFC 5423, "Improve guided decoding (logit_processor) APIs and performance", in
its order.

The class and `sampled` are copied from the RFC. Only their imports are changed.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
from collections.abc import Sequence
from typing import Any, Dict, List, Tuple  # noqa: UP035  as in the RFC
from unittest import mock

import pytest
import torch
from driven_pool import placement
from faulty_pool import FaultyPool

from actors import RayPool
from engine import LLM
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.step.logprobs import Logprob
from engine.step.sequence import SequenceStatus
from guided.errors import InternalError, PostProcessorFailed, WorkerDied
from guided.pools.inline import InlinePool
from guided.processors.guided_processor import GuidedProcessor
from guided.processors.logit_post_processor import ApplyReport, LogitPostProcessor
from guided.processors.post_processors import PostProcessors
from guided.sequence import GuidedSequence
from tests.engine.conftest import MakeEngine, finish

source = pytest.mark.source
SequenceGroupMetadata, LogitProcessorConfig = GuidedSequence, Any
PROMPT = "As JSON: "
FREE = SamplingParams(temperature=0.0, max_tokens=8)
DIGITS = SamplingParams(regex="[0-9]{8}", temperature=0.0, max_tokens=12)


def engine_with(
    model: LoadedModel, *processors: Any, pool: Any = None, **config: Any
) -> LLMEngine:
    pool = pool or InlinePool(model.vocabulary)
    engine: LLMEngine = LLM(
        model, pool, processor=processors[0] if processors else None, **config
    ).engine
    return engine


# -- motivation


@source("Problem: guided decoding parameters are not supported with SamplingParams")
@source(
    "Problem: the current support is kind of broken, it doesn't work for input batches or beam search"
)
def test_constraints_are_sampling_parameters(tiny_model: LoadedModel) -> None:
    params = [
        SamplingParams(regex="a{4}"),
        SamplingParams(choice=["b"]),
        SamplingParams(json_schema={"const": 1}),
    ]
    params.append(
        SamplingParams(choice=["yes", "no"], n=3, use_beam_search=True, temperature=0.0)
    )
    outputs = LLM(tiny_model, "inline").generate(
        ["a", "b", "c", "d"], params, use_tqdm=False
    )
    assert [{one.text for one in output.outputs} for output in outputs] == [
        {"aaaa"},
        {"b"},
        {"1"},
        {"yes", "no"},
    ]
    assert [one.index for one in outputs[-1].outputs] == [0, 1], (
        "fewer beams where the constraint has fewer"
    )


@source("Problem: It is not possible to support batch/async logit processing")
@source(
    "we can use parallel processing (e.g., ray or thread pool) to improve the logit processing performance"
)
@source(
    "We are also considering to upstream Ray based batch processing implementation with lmformatenforcer"
)
@pytest.mark.parametrize("backend", ["auto", "lm-format-enforcer"])
def test_masks_of_a_batch_are_computed_by_ray_actors_meanwhile(
    tiny_model: LoadedModel, local_ray: None, backend: str
) -> None:
    params = SamplingParams(
        choice=[f"{number:08}" for number in range(1000)],
        backend=backend,
        max_tokens=12,
    )
    with LLM(tiny_model, "ray", pool_options={"num_actors": 2}) as llm:
        outputs = llm.generate([PROMPT] * 8, params, use_tqdm=False)
        assert all(
            re.fullmatch("[0-9]{8}", output.outputs[0].text) for output in outputs
        )
        assert llm.engine.stats.hidden_seconds > 0


# -- "Upon failures, engine will die"


class Doing:
    """The methods of the RFC's class and of its `SequenceController`. They change
    nothing."""

    all_rows = True
    max_rollback = 1

    def initialize(self, config: Any) -> None: ...

    def prepare(self, rows: Any) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def sampled(
        self, seq: GuidedSequence, token_id: int, logprobs: Any
    ) -> tuple[int, list[int], bool]:
        return 0, [token_id], False


def raising(method: str, all_rows: bool) -> Any:
    """A processor that raises once in a method: after two calls, or at once if that
    method is called rarely."""
    processor: Any = Doing() if method == "sampled" else LogitPostProcessor()
    processor.all_rows, processor.max_rollback, processor.needs_samples = (
        all_rows,
        1,
        True,
    )
    processor.calls, processor.raised = 0, False
    real = getattr(processor, method)

    def raise_once(*arguments: Any, **named: Any) -> Any:
        processor.calls += 1
        if processor.calls >= (1 if "free" in method else 3) and not processor.raised:
            processor.raised = True
            raise LookupError(f"once, in {method}")
        return real(*arguments, **named)

    setattr(processor, method, raise_once)
    return processor


RARE = ("initialize", "sampled", "rollback", "free_sequence")
METHODS = [*RARE, "free", "prepare", "apply", "edits", "decided"]


def under_load(model: LoadedModel, processor: Any) -> LLMEngine:
    """An engine with 8 free and 8 guided requests: of several outputs, beams, some with
    late masks."""
    pool = FaultyPool(model.vocabulary)
    pool.delay = lambda sequence_id, position: 1 if position % 4 == 3 else 0
    engine = engine_with(
        model, *(() if processor is None else [processor]), pool=pool, max_model_len=128
    )
    for number in range(8):
        engine.add_request(
            f"free {number}",
            [5 + number, 6],
            SamplingParams(seed=number, max_tokens=20 + number),
        )
        fields: dict[str, Any] = {"n": 1 + number % 2, "seed": number}
        if number > 5:
            fields = {"n": 2, "use_beam_search": True, "temperature": 0.0}
        params = SamplingParams(
            regex=f"[0-9]{{{2 + number},18}}", max_tokens=24, **fields
        )
        engine.add_request(f"guided {number}", [9 + number], params)
    return engine


def said(
    outputs: dict[str, RequestOutput],
) -> dict[str, list[tuple[int, list[int], str | None]]]:
    return {
        name: [(one.index, one.token_ids, one.finish_reason) for one in output.outputs]
        for name, output in outputs.items()
    }


@pytest.fixture(scope="module")
def expected(tiny_model: LoadedModel) -> dict[str, Any]:
    """What an engine without the processor says."""
    return said(finish(under_load(tiny_model, None)))


@source("Problem: upon failures, engine will die")
@source("When it happens, we should fail the seq_group immediately")
@source('We will introduce a new status "FINISHED_INTERNAL_ERROR = enum.auto()"')
@source(
    "If any logit processor is failed, we will mark the relevant seq_group as failed"
)
@pytest.mark.parametrize("all_rows", [False, True], ids=["guided-rows", "all-rows"])
@pytest.mark.parametrize("method", METHODS)
def test_a_processor_that_raises_ends_its_groups_only(
    tiny_model: LoadedModel, expected: dict[str, Any], method: str, all_rows: bool
) -> None:
    processor = raising(method, all_rows)
    engine = under_load(tiny_model, processor)
    groups = dict(engine.groups)
    found = finish(engine)
    failed = {
        name: output.error for name, output in found.items() if output.error is not None
    }
    assert processor.raised
    assert {type(error) for error in failed.values()} <= {PostProcessorFailed}
    assert all(
        groups[name].get_seqs(SequenceStatus.FINISHED_INTERNAL_ERROR) for name in failed
    )
    others = {name: value for name, value in said(found).items() if name not in failed}
    assert others == {name: expected[name] for name in others}, "byte for byte"
    # else all that had begun
    least, most = (1, 1) if method in RARE else (14 if all_rows else 6, 16)
    assert not failed if method == "free" else least <= len(failed) <= most
    assert all_rows or not [name for name in failed if name.startswith("free")]
    engine.add_request("next", PROMPT, DIGITS)
    engine.add_request("free", PROMPT, FREE)
    again = finish(engine)
    assert [again[name].error for name in ("next", "free")] == [None, None], (
        "the next requests go on"
    )


WRONG: dict[str, Any] = {
    "sampled: a token that is none": {
        "sampled": lambda seq, token, logprobs: (0, [token, 99999], False)
    },
    "sampled: no token": {
        "sampled": lambda seq, token, logprobs: (0, [token, None], False)
    },
    "sampled: a negative count": {
        "sampled": lambda seq, token, logprobs: (-2, [token + 1], False)
    },
    "sampled: no count": {
        "sampled": lambda seq, token, logprobs: (0.5, [token], False)
    },
    "edits: a list": {"edits": lambda sequences, samples: [1]},
    "edits: no edit": {
        "edits": lambda sequences, samples: {sequences[0].sequence_id: (1,)}
    },
    "apply: a list": {"apply": lambda logits, deadline: ApplyReport(failed=[1])},
    "apply: a text": {
        "apply": lambda logits, deadline: ApplyReport(failed={0: "text"})
    },
    "apply: logits": {"apply": lambda logits, deadline: logits},
    "apply: another shape": {
        "sampled": Doing.sampled,
        "apply": lambda logits: logits[:, 1:],
    },
}


@source(
    "If any logit processor is failed, we will mark the relevant seq_group as failed"
)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_does_not_stop_the_engine(
    tiny_model: LoadedModel, name: str
) -> None:
    base = Doing if "sampled" in WRONG[name] else LogitPostProcessor
    processor: Any = type("Wrong", (base,), {"all_rows": False})()
    for method, wrong in WRONG[name].items():
        setattr(processor, method, wrong)
    engine = engine_with(tiny_model, processor)
    engine.add_request("free", PROMPT, FREE)
    engine.add_request("guided", PROMPT, DIGITS)
    found = finish(engine)
    assert found["free"].error is None


@source(
    "Upon failures, the engine goes on",
    differs="Ctrl-C in a step goes to the caller; the step's requests go on",
)
@pytest.mark.parametrize(
    "where",
    [
        lambda engine, processor: (processor, "prepare"),
        lambda engine, processor: (engine.runner, "execute"),
    ],
    ids=["prepare", "forward"],
)
def test_after_ctrl_c_the_engine_goes_on(
    tiny_model: LoadedModel, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for is_interrupted in (False, True):
        processor = LogitPostProcessor()
        engine = engine_with(tiny_model, processor)
        engine.add_request("guided", PROMPT, DIGITS)
        engine.step()
        engine.step()
        with monkeypatch.context() as patched:
            if is_interrupted:
                patched.setattr(
                    *where(engine, processor), mock.Mock(side_effect=KeyboardInterrupt)
                )
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
        texts.append(said(finish(engine)))
    assert texts[0] == texts[1]


# -- performance


class Literal:
    """The RFC's class."""

    def initialize(self, logit_processor_config: LogitProcessorConfig):  # type: ignore[no-untyped-def]
        """Initialize the post processor. Post processor may have states
        such as thread pool or Ray actors. It should be initialized
        here.
        """
        self.calls, self.config = ["initialize"], logit_processor_config

    def prepare(self, seq_gruop_metadata_list: List[SequenceGroupMetadata]):  # type: ignore[no-untyped-def]  # noqa: UP006
        """Asynchronously prepare logit masks."""
        self.calls.append("prepare")
        self.rows = seq_gruop_metadata_list

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the prepared masks to a given logits."""
        self.calls.append("apply")
        assert len(logits) == len(self.rows)
        after = logits.clone()
        after[:, 70:] = -torch.inf
        return after


@source(
    "class LogitPostProcessor: initialize(logit_processor_config), prepare(seq_group_metadata_list), apply(logits)"
)
@source("prepare and apply assume 1:1 calls")
@source(
    "Problem: logit processors APIs are applied row by row blocking. Instead, we can use parallel processing"
)
@source(
    "there is only one LogitPostProcessor per LLMEngine - it handles logits for all sequences in the current batch"
)
@source("add some sort of free() API so resources can be freed")
def test_the_literal_class_works_beside_the_standard_one(
    tiny_model: LoadedModel,
) -> None:
    literal, ended, pool = Literal(), list[str](), FaultyPool(tiny_model.vocabulary)
    literal.free = ended.append  # type: ignore[attr-defined]
    engine = engine_with(tiny_model, literal, pool=pool)
    engine.add_request("free", PROMPT, FREE)
    engine.add_request(
        "guided", PROMPT, SamplingParams(regex="[0-9a-zA-Z]{6}", max_tokens=12)
    )
    found = finish(engine)
    assert literal.config.model_config.max_model_len == engine.max_model_len
    assert literal.calls[0] == "initialize"
    assert set(zip(literal.calls[1::2], literal.calls[2::2], strict=True)) == {
        ("prepare", "apply")
    }
    assert all(
        token < 70 for output in found.values() for token in output.outputs[0].token_ids
    )
    assert re.fullmatch("[0-9a-zA-Z]{6}", found["guided"].outputs[0].text)
    assert sorted(ended) == ["free", "guided"]
    assert len(pool.freed) == 1


@source(
    "self.model.prepare_logits(...), then model_executable(...), then self.model.compute_logits(...)"
)
def test_the_order_within_a_step(tiny_model: LoadedModel) -> None:
    step = inspect.getsource(LLMEngine.step)
    verbs = [
        "schedule",
        "prepare",
        "execute",
        "compute_logits",
        "apply",
        "sample",
        "append",
    ]
    places = [step.index(f"self.{verb}(") for verb in verbs]
    assert places == sorted(places)


# -- failure handling


@source("if we use Ray, Ray actors can die")
@source("we should fail the seq_group immediately")
def test_kill_9_of_an_actor_is_finished_internal_error(
    tiny_model: LoadedModel, local_ray: None
) -> None:
    """With `max_replays=0`, the default: the groups with a matcher on the actor end.
    All others go on."""
    with LLM(tiny_model, "ray", pool_options={"num_actors": 2}) as llm:
        params = SamplingParams(regex="[0-9]{200,}", temperature=0.0, max_tokens=300)
        groups = [
            llm.engine.add_request(str(number), PROMPT, params) for number in range(6)
        ]
        while any(group.sequences[0].num_output_tokens < 5 for group in groups):
            llm.engine.step()
        groups.append(
            llm.engine.add_request(
                "free", PROMPT, SamplingParams(max_tokens=300, ignore_eos=True)
            )
        )
        assert isinstance(llm.pool, RayPool)
        pid, lost = next((pid, ids) for pid, ids in placement(llm.pool).items() if ids)
        os.kill(pid, signal.SIGKILL)
        finish(llm.engine)
    for [sequence] in (group.sequences for group in groups):
        is_lost = sequence.seq_id in lost
        assert (sequence.status is SequenceStatus.FINISHED_INTERNAL_ERROR) == is_lost
        assert isinstance(sequence.error, WorkerDied if is_lost else type(None))


# -- the discussion


@source(
    "maybe initialize() can be async? the reason is that we don't start scheduling sequences"
)
def test_a_sequence_waits_while_its_grammar_compiles(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    pool.hold_compiles = True
    engine = make_engine(pool)
    group = engine.add_request("guided", PROMPT, DIGITS)
    engine.add_request("free", PROMPT, FREE)
    engine.step()
    assert group.sequences[0].status is SequenceStatus.WAITING_FOR_GRAMMAR
    assert engine.scheduler.running
    pool.finish_compiles()
    engine.step()
    assert group.sequences[0].status is SequenceStatus.RUNNING


class SequenceController(Doing):
    """`sampled` is the RFC's."""

    # fmt: off
    def sampled(self, seq: "Sequence", token_id: int, logprobs: Dict[int, "Logprob"]) -> Tuple[int, List[int], bool]:  # type: ignore[type-arg]  # noqa: UP006,UP037
        # fmt: on
        """
        Informs the controller a given token has been sampled.
        Returns the number of tokens to backtrack, the tokens to append,
        and whether to stop.
        """
        if token_id == seq.eos_token_id:  # type: ignore[attr-defined]
            return 0, [], True
        return 0, [token_id], False


@source(
    "def sampled(self, seq, token_id, logprobs): Informs the controller a given token has been sampled"
)
def test_the_literal_sampled_changes_nothing(tiny_model: LoadedModel) -> None:
    texts = []
    for processors in ([], [SequenceController()]):
        engine = engine_with(tiny_model, *processors)
        engine.add_request("free", PROMPT, SamplingParams(seed=3, max_tokens=30))
        engine.add_request("guided", PROMPT, DIGITS)
        texts.append(said(finish(engine)))
    assert texts[0] == texts[1]


@source(
    "Returns the number of tokens to backtrack, the tokens to append, and whether to stop"
)
@source("I'm the one asking for ff_tokens and backtracking")
def test_sampled_gets_token_and_logprobs_and_edits(tiny_model: LoadedModel) -> None:
    class Controller(Doing):
        max_rollback = 2

        def __init__(self) -> None:
            self.told: list[tuple[int, float, list[int]]] = []

        def sampled(
            self, seq: GuidedSequence, token_id: int, logprobs: Any
        ) -> tuple[int, list[int], bool]:
            self.told.append(
                (token_id, logprobs[token_id].logprob, list(seq.output_token_ids))
            )
            match len(self.told):
                case 3:
                    return 1, [30, 31, 32], False  # two tokens become three
                case 6:
                    return 0, [token_id], True
            return 0, [token_id], False

    controller = Controller()
    engine = engine_with(tiny_model, controller)
    engine.add_request(
        "free", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, stop=["never"])
    )
    output = finish(engine)["free"].outputs[0]
    (first, *_), (second, *_), (third, _, seen), (*_, after) = controller.told[:4]
    assert seen == [first, second, third], "the output has the token already"
    assert all(logprob <= 0.0 for _, logprob, _ in controller.told)
    assert after[:4] == output.token_ids[:4] == [first, 30, 31, 32]
    assert (output.token_ids[4:], output.finish_reason) == (
        [token for token, *_ in controller.told[3:]],
        "stop",
    )
    assert output.text == tiny_model.tokenizer.decode(output.token_ids)


class Configured(LogitPostProcessor):
    newest: Any = None

    def __init__(self, config: Any) -> None:
        Configured.newest = config.tokenizer


class Broken(LogitPostProcessor):
    def __init__(self) -> None:
        raise OSError("no file")


@source(
    "Problem: why would we need an initialize method, couldn't a regular constructor be used for this?"
)
def test_a_class_is_made_with_the_engines_config(tiny_model: LoadedModel) -> None:
    with LLM(tiny_model, "inline", processor=f"{__name__}:Configured") as llm:
        llm.generate(PROMPT, FREE, use_tqdm=False)
    assert Configured.newest is tiny_model.tokenizer


def with_method(name: str, method: Any) -> tuple[type, str]:
    return type(
        "Wrong", (LogitPostProcessor,), {name: method}
    ), f"Wrong needs the method {name}"


@source(
    "class LogitPostProcessor",
    differs="a class with other signatures is refused when it is loaded",
)
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("nowhere:It", "It can't be loaded"),
        (dict, "not a subclass"),
        (Broken, "can't be made"),
        with_method("prepare", lambda self, sequences: None),
        with_method("apply", lambda self, *, logits, deadline: None),
        with_method("initialize", lambda self, config: None),
        with_method("edits", lambda self, sequences: {}),
    ],
)
def test_what_is_no_post_processor_is_refused(
    tiny_model: LoadedModel, wrong: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        LLM(tiny_model, "inline", processor=wrong)


@source("there is only one LogitPostProcessor per LLMEngine")
def test_a_constraint_needs_the_standard_processor(tiny_model: LoadedModel) -> None:
    without = LLMEngine(tiny_model, processor=LogitPostProcessor())
    with pytest.raises(InternalError, match="enforces constraints"):
        without.add_request("r", PROMPT, DIGITS)


@source(
    "for our internal impl, we just need seq_data, seq_ids, request_id, and sampling params",
    differs="prepare gets one GuidedSequence per sequence, made once, in place of a SequenceGroupMetadata per step",
)
@source(
    'it handles "logits for all sequences in the current batch"',
    differs="the standard processor gets the constrained rows only (`all_rows` is False)",
)
@source(
    "it's easy to write a LogitPostProcessor that bundles an arbitrary number of LogitPostProcessors"
)
def test_prepare_gets_what_the_rfc_needs_of_each_row(tiny_model: LoadedModel) -> None:
    order: list[bool] = []

    class Looking(LogitPostProcessor):
        def __init__(self, all_rows: bool) -> None:
            self.all_rows, self.seen = all_rows, dict[GuidedSequence, None]()

        def apply(
            self, logits: torch.Tensor, deadline: float | None = None
        ) -> ApplyReport | None:
            order.append(self.all_rows)
            return None

        def prepare(self, sequences: Any, *rows: Any, **named: Any) -> None:
            self.seen.update(dict.fromkeys(sequences))

    pool, every, some = InlinePool(tiny_model.vocabulary), Looking(True), Looking(False)
    engine = LLMEngine(
        tiny_model,
        pool=pool,
        processor=PostProcessors(GuidedProcessor(pool), every, some),
    )
    groups = (
        engine.add_request("free", [5, 6], FREE),
        engine.add_request("guided", [7], DIGITS),
    )
    finish(engine)
    assert order[:4] == [True, False] * 2, "the members run in order"
    assert [one.request_id for one in some.seen] == ["guided"]
    for one, group in zip(every.seen, groups, strict=True):
        sequence = group.sequences[0]
        assert (one.sequence_id, one.sampling_params) == (
            sequence.seq_id,
            group.sampling_params,
        )
        assert (one.prompt_token_ids, one.output_token_ids) == (
            sequence.prompt_token_ids,
            sequence.output_token_ids,
        )
        assert (one.request_id, one.constrained) == (
            group.request_id,
            group.request_id == "guided",
        )
