import gc

import pytest

from engine.logprobs import Logprob, TokenLogprobs


def entries() -> TokenLogprobs:
    return TokenLogprobs([(7, -2.0, 3), (3, -0.5, 1), (5, -1.0, 2)])


def test_reads_as_a_mapping_with_the_own_token_first() -> None:
    assert list(entries()) == [7, 3, 5]
    assert len(entries()) == 3
    assert entries() == {7: Logprob(-2.0, 3), 3: Logprob(-0.5, 1), 5: Logprob(-1.0, 2)}
    assert entries()[5] == Logprob(-1.0, 2)
    assert 4 not in entries()
    with pytest.raises(KeyError):
        entries()[4]


def test_a_garbage_collection_visits_one_object_per_token() -> None:
    def visited() -> int:
        gc.collect()
        return len(gc.get_objects())

    before = visited()
    kept = [TokenLogprobs([(n + i, float(n + i), n + i) for i in range(21)]) for n in range(500)]
    assert visited() - before < 1.1 * len(kept)
