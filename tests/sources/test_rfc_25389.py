"""vLLM's RFC 25389, "Revise Logits Processor Programming Model", in its order.

(https://github.com/vllm-project/vllm/issues/25389)
"""

from __future__ import annotations

from typing import Any, Optional

import numpy.typing as npt
import pytest
import torch
from sample_processors import DummyLogitsProcessor

from engine.logits_processors import (
    BatchUpdate,
    LogitsProcessor,
    SamplingParams,
    VllmConfig,
)
from engine.outputs import RequestOutput
from tests.engine.conftest import MakeEngine, run

source = pytest.mark.source
Requests = dict[str, tuple[Any, SamplingParams]]
PROMPT = [5, 6, 7]

# Persistent index of removed request
RemovedRequest = int

# (params, prompt length, persistent index) tuples for new
# requests added to the batch
AddedRequest = tuple[SamplingParams, int, int]


class TargetToken(LogitsProcessor):
    """Allows only `target_token` of a request's `extra_args`, with the signatures of
    the RFC. It records the calls; the list is the newest instance's."""

    calls: list[tuple[Any, ...]]
    newest: TargetToken

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ):
        self.targets: dict[int, int] = {}
        self.order: list[int] = []
        TargetToken.calls, TargetToken.newest = [], self

    def is_argmax_invariant(self) -> bool:
        return False

    def add_request(self, req_info: AddedRequest) -> None:
        self.calls.append(("add_request", req_info))
        params, _, pdx = req_info
        if params.extra_args:
            self.targets[pdx] = params.extra_args["target_token"]

    def remove_request(self, req_pdx: RemovedRequest) -> None:
        self.calls.append(("remove_request", req_pdx))
        self.targets.pop(req_pdx, None)

    def update_state(
        self,
        index_mapping: Optional[npt.NDArray],  # noqa: UP045
        token_ids: npt.NDArray,
        seq_lens: npt.NDArray,
    ) -> None:
        mapping = None if index_mapping is None else index_mapping.tolist()
        self.calls.append(("update_state", mapping, token_ids.copy(), seq_lens.copy()))
        self.order = self.order if mapping is None else mapping

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, pdx in enumerate(self.order):
            if (target := self.targets.get(pdx)) is not None:
                kept = logits[row, target].item()
                logits[row] = float("-inf")
                logits[row, target] = kept
        return logits


def calls(name: str) -> list[Any]:
    """The arguments of the calls of a method."""
    return [call[1:] for call in TargetToken.calls if call[0] == name]


def target(token: int | None, max_tokens: int) -> SamplingParams:
    extra = None if token is None else {"target_token": token}
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
    )


def tokens(found: dict[str, RequestOutput]) -> dict[str, list[int]]:
    return {name: list(output.outputs[0].token_ids) for name, output in found.items()}


@source(
    "The current model, with update_state(batch_update), is the interface of a processor."
)
@source(
    "The BatchUpdate data structure is no longer necessary.",
    differs="Both models run: a class that defines add_request is of the RFC's model, any other gets BatchUpdates.",
)
def test_both_models_run_together(make_engine: MakeEngine) -> None:
    seen: list[Any] = []

    class Current(DummyLogitsProcessor):
        def update_state(self, batch_update: BatchUpdate | None) -> None:
            seen.append(batch_update)

    found = run(
        make_engine(logits_processors=(Current, TargetToken)),
        {"67": (PROMPT, target(67, 2))},
    )
    assert tokens(found) == {"67": [67, 67]}
    assert [type(update) for update in seen] == [BatchUpdate, type(None)]


@source(
    "RemovedRequest is the persistent index; AddedRequest is (params, prompt length, persistent index)."
)
@source("Adding and removing requests is separated from update_state.")
@source("add_request adds information about a new request, or changes nothing.")
@source("remove_request removes the information, if such information is present.")
def test_add_request_and_remove_request(make_engine: MakeEngine) -> None:
    free = {"free": ([8, 9], target(None, 3))}
    expected = tokens(run(make_engine(), free))
    requests = {"67": (PROMPT, target(67, 1)), **free, "68": (PROMPT, target(68, 2))}
    engine = make_engine(logits_processors=(TargetToken,))
    assert tokens(run(engine, requests)) == {"67": [67], **expected, "68": [68, 68]}
    assert [info for (info,) in calls("add_request")] == [
        (params, len(prompt), index)
        for index, (prompt, params) in enumerate(requests.values())
    ]
    assert calls("remove_request") == [(0,), (2,)]
    run(engine, {"69": (PROMPT, target(69, 1))})
    assert calls("remove_request") == [(0,), (2,), (1,)]
    assert [*TargetToken.newest.targets.values()] == [69]


@source(
    "The rows of the logits are mapped to requests by the current stepwise ordering: index_mapping."
)
@source("index_mapping None: the ordering is unchanged from the previous step.")
@source(
    "Each step applies a new order on-the-fly; the persistent batch is not reordered."
)
def test_index_mapping(make_engine: MakeEngine) -> None:
    lengths = [2, 4, 1, 4]
    requests = {
        f"{n}": (PROMPT, target(100 + n, length)) for n, length in enumerate(lengths)
    }
    engine = make_engine(logits_processors=(TargetToken,))
    assert tokens(run(engine, requests)) == {
        f"{n}": [100 + n] * length for n, length in enumerate(lengths)
    }
    assert [call[0] for call in calls("update_state")] == [
        [0, 1, 2, 3],
        [0, 1, 3],
        [1, 3],
        None,
    ]


@source(
    "update_state accepts a mapping from persistent index to stepwise index.",
    differs="It is the stepwise ordering, as the RFC says further down: index_mapping[row] is the persistent index.",
)
@source(
    "index_mapping has the size of the persistent batch.",
    differs="It has one entry for each row of the logits: a sequence that is not sampled in a step has none.",
)
def test_index_mapping_has_one_entry_per_row(make_engine: MakeEngine) -> None:
    engine = make_engine(
        logits_processors=(TargetToken,), max_num_seqs=4, max_num_batched_tokens=32
    )
    run(engine, {"short": (PROMPT, target(67, 3)), "long": ([5] * 40, target(68, 1))})
    assert [call[0] for call in calls("update_state")] == [[0], [1, 0], [0]]


@source(
    "token_ids: a row per persistent index, with the request's prompt ids and output ids concatenated."
)
@source(
    "seq_lens: for each persistent index, the total length (prompt and output tokens)."
)
@source(
    "With index_mapping None, a processor may still use the updated token_ids and seq_lens."
)
def test_token_ids_and_seq_lens(make_engine: MakeEngine) -> None:
    run(
        make_engine(logits_processors=(TargetToken,)),
        {"67": ([8, 9], target(67, 3)), "68": (PROMPT, target(68, 3))},
    )
    for step, (mapping, token_ids, seq_lens) in enumerate(calls("update_state")):
        assert (mapping is None) == (step > 0)
        assert seq_lens[:2].tolist() == [2 + step, 3 + step]
        assert token_ids[0, : 2 + step].tolist() == [8, 9, *[67] * step]
        assert token_ids[1, : 3 + step].tolist() == [*PROMPT, *[68] * step]
