"""Notes on sampling in vLLM 0.6.2 (w@hidva.com, "vllm 中的 sampling"), in their order:
the batch of their figure."""

from __future__ import annotations

from typing import Any

import pytest

from engine.model.loader import LoadedModel
from engine.sampling_params import SamplingParams
from engine.step.prefills import Chunk
from engine.step.scheduler import Batch
from tests.engine.conftest import MakeEngine, run
from tests.sources.step_views import (
    SamplingMetadata,
    SamplingType,
    seq_group_metadata_list,
)

source = pytest.mark.source


@pytest.fixture
def batch(make_engine: MakeEngine) -> Batch:
    """sg1, sg2 and sg3 are prefills of 4, 3 and 5 tokens; sg2's prompt is longer. sg4
    decodes two sequences."""
    admit, scores = make_engine().admit, SamplingParams(prompt_logprobs=1, seed=1)
    sg1, sg2 = (
        admit("sg1", [11, 12, 13, 14], scores),
        admit("sg2", [21, 22, 23, 24, 25], scores),
    )
    sg3 = admit("sg3", [31, 32, 33, 34, 35], SamplingParams(temperature=0.0))
    sg4 = admit("sg4", [41], SamplingParams(n=2))
    for sequence in sg4.sequences:
        sequence.append(42)
    prefills = [
        Chunk(sg1.sequences, 0, 4),
        Chunk(sg2.sequences, 0, 3),
        Chunk(sg3.sequences, 0, 5),
    ]
    return Batch(prefills, sg4.sequences, [], [])


@source("prompt_logprobs outputs the probabilities of all prompt tokens but the first")
def test_prompt_logprobs(make_engine: MakeEngine) -> None:
    params = SamplingParams(prompt_logprobs=2, max_tokens=2)
    prompt = [11, 12, 13, 14]
    scored = run(make_engine(), {"r": (prompt, params)})["r"].prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert [
        entry is not None and token in entry
        for token, entry in zip(prompt, scored, strict=True)
    ][1:] == [True] * 3


@source("groups in the prefill phase come before groups in the decode phase")
@source(
    "SamplingMetadata.prepare(seq_group_metadata_list, seq_lens, query_lens)",
    differs="a Batch has the rows; tests/sources/step_views.py reads the document's objects off it",
)
def test_the_lists_of_a_batch(make_engine: MakeEngine, batch: Batch) -> None:
    seq_lens = [one.end for one in batch.prefills] + [
        one.length for one in batch.decodes
    ]
    query_lens = [one.end - one.start for one in batch.prefills] + [1] * len(
        batch.decodes
    )
    assert (seq_lens, query_lens) == ([4, 3, 5, 2, 2], [4, 3, 5, 1, 1])
    engine = make_engine()
    engine.add_request("decoding", [5, 6], SamplingParams(max_tokens=9, n=2))
    engine.step()
    engine.add_request("new", [7, 8, 9], SamplingParams(max_tokens=9))
    groups = seq_group_metadata_list(engine.scheduler.schedule(), engine.blocks)
    assert [(one.request_id, one.is_prompt, len(one.seq_data)) for one in groups] == [
        ("new", True, 1),
        ("decoding", False, 2),
    ]
    assert all(one.block_tables.keys() == one.seq_data.keys() for one in groups)


@source(
    "selected_token_indices: the rows of model_output that sampling processes, [0, 1, 2, 3, 4, 5, 6, 11, 12, 13]"
)
@source(
    "prompt_logprob_indices and sample_indices: the rows of a group in sampling_input"
)
@source(
    "sample_len + prompt_logprob_len = query_len of a prefill; prompt_logprob_len = 0 of a decode"
)
@source(
    "categorized_sample_indices[sample_type]: (logit_idx, sample_idx) of each output token"
)
@source(
    "prompt rows are removed: at each group's sample_idx begins its part of the rows that are sampled"
)
def test_the_rows_of_the_figure(batch: Batch) -> None:
    metadata = SamplingMetadata(batch)
    assert metadata.selected_token_indices == [0, 1, 2, 3, 4, 5, 6, 11, 12, 13]
    assert metadata.seq_groups == [
        ([0, 1, 2], [3]),
        ([4, 5, 6], []),
        ([], [7]),
        ([], [8, 9]),
    ]
    assert metadata.categorized_sample_indices == {
        SamplingType.RANDOM_SEED: [(3, 0)],
        SamplingType.GREEDY: [(7, 1)],
        SamplingType.RANDOM: [(8, 2), (9, 3)],
    }
    assert batch.sequences == [
        batch.prefills[0].sequences[0],
        batch.prefills[2].sequences[0],
        *batch.decodes,
    ]
    assert batch.selected == [3, 11, 12, 13]


@source("rows 7 to 10 are dropped, so that the last layer need not compute them")
def test_the_head_computes_no_row_that_is_dropped(
    make_engine: MakeEngine, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    head = tiny_model.head.forward
    monkeypatch.setattr(
        tiny_model.head,
        "forward",
        lambda hidden: rows.append(len(hidden)) or head(hidden),
    )
    run(make_engine(), {"r": ([5] * 20, SamplingParams(max_tokens=2))})
    assert rows == [1, 1]


@source("_apply_top_k_top_p sorts the logits and restores their order")
@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}])
def test_top_k_and_top_p(make_engine: MakeEngine, fields: dict[str, Any]) -> None:
    greedy = run(
        make_engine(), {"r": ("So?", SamplingParams(temperature=0.0, max_tokens=9))}
    )["r"]
    random = run(
        make_engine(),
        {"r": ("So?", SamplingParams(temperature=1.0, max_tokens=9, **fields))},
    )["r"]
    assert random.outputs[0].token_ids == greedy.outputs[0].token_ids
