from __future__ import annotations

from pathlib import Path

from faulty_pool import FaultyPool

from engine.compile_turns import CompileTurns
from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model_loader import load_model
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceGroup


def group(client: str) -> SequenceGroup:
    return SequenceGroup("", [], SamplingParams(), client=client)


def test_each_client_has_its_own_turns_in_its_own_order() -> None:
    turns = CompileTurns(2)
    first, second, third, fourth = (group("a") for _ in range(4))
    assert [turns.enter(each) for each in (first, second, third, fourth)] == [True, True, False, False]
    assert turns.enter(group("b"))
    assert not turns.has_next
    turns.leave(first)
    turns.leave(first)
    assert turns.has_next
    assert list(turns.next()) == [third]
    turns.cancel(fourth)  # it has ended in the queue
    turns.cancel(third)  # it has ended, and the pool goes on compiling
    assert not turns.has_next
    turns.leave(third)
    assert list(turns.next()) == []
    assert turns.enter(group("a"))


def test_a_flood_of_constraints_leaves_room_in_the_pools_queue(tiny_llama_dir: Path) -> None:
    """In the end all are compiled, except for one that is aborted before its turn. Aborted ones leave no room for more
    while the pool compiles them."""
    model = load_model(str(tiny_llama_dir), dtype="float32", device="cpu")
    pool = FaultyPool(model.vocabulary)
    pool.hold_compiles = True
    engine = LLMEngine(model, EngineConfig(max_num_seqs=8), pool)
    try:
        for number in range(200):
            engine.add_request(str(number), "a", SamplingParams(choice=[f"{number}"], max_tokens=1))
        engine.step()
        in_pool = pool.num_held
        assert 0 < in_pool < 200
        other = engine.admit("other", "a", SamplingParams(choice=["b"], max_tokens=1))
        other.client = "other"
        engine.submit(other)
        assert pool.num_held == in_pool + 1
        engine.abort_request("199")
        engine.abort_request("0")
        ended = {output.request_id: output.outputs[0].finish_reason for output in engine.step()}
        assert pool.num_held == in_pool + 1
        pool.hold_compiles = False
        pool.finish_compiles()
        while engine.has_unfinished:
            ended.update({output.request_id: output.outputs[0].finish_reason for output in engine.step()})
        assert (ended.pop("0"), ended.pop("199")) == ("abort", "abort")
        assert set(ended.values()) == {"length"}
        assert len(ended) == 199
    finally:
        pool.shutdown()
