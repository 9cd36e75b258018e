"""What an engine does with sequences is right for each kind of cache: attention of all
sorts, and recurrent layers."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool
from model_families import FAMILIES
from transformers import PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel, prepare_model
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.errors import ContextLengthExceeded
from guided.pools.protocol import MaskPool
from guided.processors.logit_post_processor import SampledEdit
from tests.engine.conftest import run
from tests.engine.test_beam_search import beams, expected
from tests.engine.test_late_rows import count_computed
from tests.engine.test_sampled import Own

KINDS = {
    "full": "Qwen 3",
    "sliding": "Mistral",
    "capped": "Gemma 2",
    "sinks": "gpt-oss",
    "chunked": "Llama 4 (text)",
    "delta net": "Qwen 3.5",
    "Mamba 2": "Granite 4",
    "convolution": "LFM 2",
    "Mamba 1": "Jamba",
}
ITEM = {
    "type": "object",
    "properties": {"kind": {"enum": ["quick", "lazy"]}},
    "required": ["kind"],
}
SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {**ITEM, "additionalProperties": False},
}
CONTENT = {"type": "json_schema", "json_schema": ITEM}
CALL = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<call>", "content": CONTENT, "end": "</call>"},
}
FIELDS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA, "whitespace_pattern": ""},
    {"regex": "[0-9]{12,20}[a-f]{2,4}"},
    {"structural_tag": CALL, "whitespace_pattern": ""},
    {"max_tokens": 24, "logprobs": 1},
]
TIGHT = {
    "block_size": 4,
    "num_blocks": 110,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 16,
}
RUNS: dict[str, dict[str, Any]] = {
    "late": {},
    "late, forced": {},
    "late, in chunks, preempted": TIGHT,
}


class Kind:
    """One tiny model, transformers' and ours, and the outputs of `requests` where
    nothing happens."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerFast) -> None:
        self.is_recurrent = name in list(KINDS)[5:]
        self.reference = make(KINDS[name])
        self.model: LoadedModel = prepare_model(make(KINDS[name]), tokenizer)
        self.expected = run(self.engine(), requests())

    def engine(
        self, pool: MaskPool | None = None, processor: Any = None, **config: Any
    ) -> LLMEngine:
        pool = pool or FaultyPool(self.model.vocabulary)
        return LLMEngine(
            self.model,
            EngineConfig(**{"max_model_len": 128, **config}),
            pool,
            processor,
        )


@pytest.fixture(scope="module", params=list(KINDS))
def kind(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast
) -> Kind:
    return Kind(request.param, tiny_tokenizer)


def make(title: str) -> Any:
    return next(one for one in FAMILIES if one.title == title).make()


def prompt(length: int) -> list[int]:
    generator = random.Random(length)
    return [generator.randrange(6, 600) for _ in range(length)]


def requests(count: int = 16) -> dict[str, tuple[Any, SamplingParams]]:
    """Requests of different lengths: JSON, a regular expression, a call, and none of
    these; greedy and random."""
    found: dict[str, tuple[Any, SamplingParams]] = {}
    for place in range(count):
        fields = {
            "max_tokens": 50,
            "temperature": place % 3 / 2,
            "seed": place,
            **FIELDS[place % 4],
        }
        found[f"{place}"] = (
            prompt(1 + place * 3),
            SamplingParams(**fields, n=1 + (place in (5, 8))),
        )
    return found


def said(outputs: dict[str, RequestOutput]) -> dict[str, list[Any]]:
    return {
        name: [(one.token_ids, one.finish_reason) for one in output.outputs]
        for name, output in outputs.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_guided_outputs_are_right_and_the_same_when_late(kind: Kind, name: str) -> None:
    pool, generator = (
        FaultyPool(kind.model.vocabulary, forced_tokens="forced" in name),
        random.Random(1),
    )
    pool.delay = lambda sequence_id, position: generator.choice([0, 0, 0, 1, 4])
    engine = kind.engine(pool, **RUNS[name])
    computed = count_computed(engine)
    found = run(engine, requests())
    assert said(found) == said(kind.expected)
    for place in range(16):
        for output in found[f"{place}"].outputs:
            text = output.text
            if place % 4 == 0:
                assert all(
                    item["kind"] in ("quick", "lazy") for item in json.loads(text)
                )
            elif place % 4 == 1:
                assert re.fullmatch(FIELDS[1]["regex"], text)
            elif place % 4 == 2:
                call = re.fullmatch("<call>(.*)</call>", text, re.DOTALL)
                assert call is not None
                assert json.loads(call[1])["kind"] in ("quick", "lazy")
    assert engine.stats.late_rows > 20
    assert (engine.scheduler.num_preemptions > 0) == ("preempted" in name)
    assert (engine.stats.forced_tokens > 10) == ("forced" in name)
    if name == "late":
        lengths = [
            (len(o.prompt_token_ids), [len(one.token_ids) for one in o.outputs])
            for o in found.values()
        ]
        assert computed() == sum(
            first + sum(count - 1 for count in counts) for first, counts in lengths
        )


def test_beams_are_those_of_transformers(kind: Kind) -> None:
    asked = {f"{length}": (prompt(length), beams(3)) for length in (2, 11)}
    found = run(
        kind.engine(block_size=4, max_num_batched_tokens=12, max_num_seqs=6), asked
    )
    for name, (tokens, params) in asked.items():
        outputs, _ = expected(
            kind.reference, tokens, params, list(kind.model.vocabulary.stop_token_ids)
        )
        assert [one.token_ids for one in found[name].outputs] == outputs


def test_what_is_rolled_back_does_not_stay(kind: Kind) -> None:
    """The rest of an output is that of a request which begins with what is left of
    it."""
    done: list[list[int]] = []

    def decide(output: list[int]) -> SampledEdit | None:
        if len(output) < 9 or done:
            return None
        done.append(output)
        return SampledEdit(rollback=4, append=[100, 101])

    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    own = Own(decide, max_rollback=4)
    own.all_rows = True
    edited = (
        run(kind.engine(processor=own), {"r": (prompt(7), greedy)})["r"]
        .outputs[0]
        .token_ids
    )
    assert edited[:7] == [*done[0][:5], 100, 101]
    rest = SamplingParams(temperature=0.0, max_tokens=13)
    alone = (
        run(kind.engine(), {"r": (prompt(7) + edited[:7], rest)})["r"]
        .outputs[0]
        .token_ids
    )
    assert edited[7:] == alone


def test_a_token_that_is_sampled_again_needs_no_forward_pass(kind: Kind) -> None:
    seen: list[list[int]] = []

    def decide(output: list[int]) -> SampledEdit | None:
        seen.append(output)
        return SampledEdit(rollback=1) if len(seen) in (1, 4, 5) else None

    own = Own(decide, max_rollback=1)
    own.all_rows = True
    engine = kind.engine(processor=own)
    computed = count_computed(engine)
    greedy = SamplingParams(temperature=0.0, max_tokens=10)
    output = run(engine, {"r": (prompt(5), greedy)})["r"].outputs[0].token_ids
    assert (
        output
        == run(kind.engine(), {"r": (prompt(5), greedy)})["r"].outputs[0].token_ids
    )
    assert len(seen) == len(output) + 3
    assert computed() == 5 + len(output) - 1


def test_known_prefixes_are_used_by_attention_only(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "engine"):
        engine = kind.engine(block_size=4)
    few = requests(6)
    for _ in range(2):
        assert said(run(engine, few)) == said(
            {name: kind.expected[name] for name in few}
        )
    assert (engine.blocks.tokens_found == 0) == kind.is_recurrent
    assert ("prefix caching is off" in caplog.text) == kind.is_recurrent


def test_a_prompt_that_is_too_long_is_refused(kind: Kind) -> None:
    group = kind.engine().add_request("long", prompt(128), SamplingParams(max_tokens=4))
    assert isinstance(group.sequences[0].error, ContextLengthExceeded)


def test_sequences_wait_for_a_slot_of_their_states(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    if kind.model.layout is None:
        pytest.skip("no recurrent layers")
    with caplog.at_level("INFO", "engine"):
        engine = kind.engine(
            kv_cache_bytes=6 * kind.model.layout.slot_bytes, num_blocks=100
        )
    assert "3 sequences fit" in caplog.text
    asked = requests(6)
    for name, (tokens, params) in asked.items():
        engine.add_request(name, tokens, params)
    most = 0
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        found.update({output.request_id: output for output in engine.step()})
        most = max(most, len(engine.scheduler.running))
    assert most == 3
    assert said(found) == said({name: kind.expected[name] for name in asked})


@pytest.mark.parametrize(
    "title", ["Qwen 3.5", "Granite 4", "Falcon H1", "Nemotron H", "LFM 2"]
)
def test_recurrent_states_are_float32_in_a_half_precision_model(
    title: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = prepare_model(make(title).to(torch.bfloat16), tiny_tokenizer)
    assert model.layout is not None
    dtypes = {kind: state.dtype for (kind, *_), state in model.layout.shapes.items()}
    assert dtypes["conv"] is torch.bfloat16
    assert dtypes.get("recurrent", torch.float32) is torch.float32
    output = run(
        LLMEngine(model, EngineConfig(max_model_len=64)),
        {"r": (prompt(9), SamplingParams(max_tokens=8))},
    )
    assert len(output["r"].outputs[0].token_ids) == 8
