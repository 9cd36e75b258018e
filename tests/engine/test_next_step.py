"""The decode step that is launched before the host knows its tokens. CUDA graphs are
replaced, as in `test_cuda_graphs.py`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model import runner as model_runner
from engine.model.loader import LoadedModel
from engine.sampling_params import SamplingParams
from guided.pools.inline import InlinePool
from guided.processors.logit_post_processor import LogitPostProcessor, SampledEdit
from guided.sequence import GuidedSequence
from tests.engine.conftest import MakeEngine, finish
from tests.engine.test_cuda_graphs import Calls

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(model_runner, "graph_calls", lambda device: calls)
    return calls


def count_forwards(
    engine: LLMEngine, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return a list that gets the number of replays before each step's tokens are
    appended."""
    counts: list[int] = []
    append = engine.append

    def counting(*arguments: Any) -> None:
        counts.append(calls.log.count("replay"))
        append(*arguments)

    monkeypatch.setattr(engine, "append", counting)
    return counts


def test_a_step_is_launched_before_the_last_is_appended(
    make_engine: MakeEngine, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=4, block_size=4)
    calls.log.clear()
    counts = count_forwards(engine, calls, monkeypatch)
    for name in ("a", "b"):
        engine.add_request(name, [5, 6, 7], GREEDY)
    finish(engine)
    # The prefill launches the first decode. No step follows the last token.
    assert counts == [*range(1, 10), 9]


def test_rows_that_go_on_are_not_computed_again(
    make_engine: MakeEngine, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends early, and one starts late: the step of the others stays."""
    engine = make_engine(max_num_seqs=4, block_size=4)
    calls.log.clear()
    counts = count_forwards(engine, calls, monkeypatch)
    engine.add_request(
        "short", [5, 6], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    )
    engine.add_request("long", [7, 8, 9], GREEDY)
    for _ in range(6):
        engine.step()
    engine.add_request(
        "late", [9, 9], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    )
    finish(engine)
    assert counts == [*range(1, 10), 9]


def test_log_probabilities_are_not_read_behind_the_next_step(
    make_engine: MakeEngine, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=4)
    calls.log.clear()
    counts = count_forwards(engine, calls, monkeypatch)
    engine.add_request(
        "a",
        [5, 6, 7],
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1),
    )
    finish(engine)
    assert counts == list(range(5))


class Changing(LogitPostProcessor):
    """Takes tokens back, so that they are sampled again, and appends others."""

    all_rows = True
    max_rollback = 3

    def __init__(self) -> None:
        self._changes: Counter[int] = Counter()
        """How often each sequence was changed."""

    def prepare(
        self, sequences: Sequence[GuidedSequence], *arguments: Any, **named: Any
    ) -> None:
        pass

    def edits(
        self, sequences: Sequence[GuidedSequence], samples: Any = ()
    ) -> dict[int, SampledEdit]:
        edits = {}
        for sequence in sequences:
            output = sequence.output_token_ids
            changes = self._changes[sequence.sequence_id]
            if len(output) > 2 and output[-1] % 3 == 0 and changes < 3:
                self._changes[sequence.sequence_id] += 1
                append = [301] if changes == 1 and not sequence.constrained else []
                edits[sequence.sequence_id] = SampledEdit(
                    rollback=1 + changes, append=append
                )
        return edits


def churn(engine: LLMEngine, seed: int) -> dict[str, list[list[int]]]:
    """Add requests of all kinds at random steps, abort some, and return the tokens of
    the others."""
    generator = random.Random(seed)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3, "n": 2},
        {"regex": "[0-9]{6,20}", "temperature": 0.8, "seed": 1},
        {
            "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
            "seed": 2,
        },
        {"temperature": 0.0, "frequency_penalty": 0.7},
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.0, "use_beam_search": True, "best_of": 2},
    ]
    tokens: dict[str, list[list[int]]] = {}
    aborted = set()
    for number in range(24):
        name = str(number)
        params: dict[str, Any] = {
            "max_tokens": generator.randint(1, 24),
            **generator.choice(kinds),
        }
        prompt = [generator.randint(5, 250) for _ in range(generator.randint(1, 30))]
        engine.add_request(name, prompt, SamplingParams(**params))
        tokens[name] = []
        for _ in range(generator.randint(0, 4)):
            for output in engine.step():
                tokens[output.request_id] = [part.token_ids for part in output.outputs]
        if generator.random() < 0.2:
            aborted.add(name)
            engine.abort_request(name)
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] = [part.token_ids for part in output.outputs]
    return {name: found for name, found in tokens.items() if name not in aborted}


@pytest.mark.parametrize("processor", [None, Changing], ids=["plain", "edits"])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_those_of_eager_steps(
    tiny_model: LoadedModel, calls: Calls, seed: int, processor: type[Changing] | None
) -> None:
    outputs = []
    for enforce_eager in (True, False):
        config = EngineConfig(
            max_model_len=128,
            max_num_seqs=6,
            block_size=4,
            num_blocks=70,
            enforce_eager=enforce_eager,
        )
        pool = InlinePool(tiny_model.vocabulary)
        engine = LLMEngine(tiny_model, config, pool, processor() if processor else None)
        outputs.append(churn(engine, seed))
        assert engine.blocks.num_free == engine.blocks.num_blocks
    assert calls.log.count("replay") > 40
    assert outputs[1] == outputs[0]
