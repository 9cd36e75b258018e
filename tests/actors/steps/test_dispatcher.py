"""Steps, placement, slots and deaths, with actors on threads: what the engine's thread
does, without Ray."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from byte_vocabulary import WORDS, tokens
from fake_device import GPU, fake_device
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode
from serving import wait_until as until
from thread_cluster import (
    WAIT,
    Cluster,
    ConnectedPair,
    all_ready,
    close_all,
    grammar_named,
    outcomes,
)

from actors.dispatcher import Dispatcher
from actors.packages import send_package
from actors.protocol import WAKE, Failed
from guided.errors import (
    BackendError,
    ConstraintQuarantined,
    GuidedError,
    MaskTimeout,
    PoolUnavailable,
    WorkerDied,
    to_wire,
)
from guided.pools.status import EndCause
from guided.processors.kernel import BitmaskKernel
from guided.processors.pinned_masks import pin_masks, pinned_end
from guided.sequence import GuidedSequence

# placement


def test_sequences_go_to_the_fewest_and_stay(cluster: Cluster) -> None:
    cluster.open(1, 2, 3, 4)
    cluster.step((1, ""), (2, ""), (3, ""), (4, ""))
    assert [cluster.where(number) for number in (1, 2, 3, 4)] == [0, 1, 0, 1]
    cluster.dispatcher.free([2, 4])
    cluster.open(5, 6, 7)
    for text in ("", "a", "ab"):
        assert all_ready(cluster.step((1, text), (5, text), (6, text), (7, text)))
        assert [cluster.where(number) for number in (1, 3, 5, 6, 7)] == [0, 0, 1, 1, 0]


def test_a_backend_that_holds_the_lock_has_an_actor_of_its_own(
    cluster: Cluster,
) -> None:
    holding = replace(grammar_named("fast"), backend="lm-format-enforcer")
    cluster.open(1, 2, grammar=holding)
    cluster.open(3, 4, 5)
    cluster.step(*((number, "") for number in range(1, 6)))
    assert (cluster.on(0), cluster.on(1)) == ({3, 4, 5}, {1, 2})
    cluster.end(0)
    cluster.join()
    cluster.open(6)
    cluster.open(7, grammar=holding)
    cluster.step((6, ""), (7, ""))
    assert (cluster.where(6), cluster.where(7)) == (2, 1), (
        "also after the other one was replaced"
    )
    cluster.dispatcher.free([1, 2, 7])
    cluster.open(8)
    cluster.step((8, ""))
    assert cluster.where(8) == 1


def test_a_wait_of_less_than_a_millisecond_ends_in_time(cluster: Cluster) -> None:
    """The quickest of some: the machine may be busy."""
    cluster.open(1, grammar="slow")
    cluster.submit((1, "a"))
    seconds: list[float] = []
    for _ in range(20):
        started = time.perf_counter()
        assert cluster.collect(0.0002) == ["late"]
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.0006


def test_a_large_frame_arrives_while_all_rows_are_late(cluster: Cluster) -> None:
    cluster.open(1)
    assert cluster.step((1, "a" * 2_000_000), deadline=0.0) == ["late"]
    until(lambda: cluster.dispatcher.decided([1]) == [1])


def test_an_actor_that_comes_up_ends_the_wait_of_a_step(cluster: Cluster) -> None:
    cluster.end(0)
    cluster.end(1)
    cluster.open(1, 2)
    cluster.submit((1, ""), (2, ""))
    threading.Timer(0.1, cluster.join).start()
    assert cluster.collect() == ["ax", "ax"]


def test_a_grammar_is_sent_with_its_first_sequence_only() -> None:
    cluster = Cluster(number=1)
    for number, grammar in enumerate(["fast", "slow", "fast", "slow"]):
        cluster.open(number, grammar=grammar)
        assert cluster.step((number, "")) == ["ax"]
    assert cluster.actors[0].backend.loaded == ["fast", "slow"]
    cluster.close()


def test_a_worker_keeps_the_grammars_that_were_used_last() -> None:
    cluster = Cluster(number=1, max_cache_bytes=0)  # one grammar: the newest
    for number, grammar in enumerate(["fast", "fast", "slow", "fast"]):
        cluster.open(number, grammar=grammar)
        assert cluster.step((number, "")) == ["ax"]
    assert cluster.actors[0].backend.loaded == ["fast", "slow", "fast"]
    assert cluster.step((0, "a"), (1, "x"), (2, "")) == ["b", "y", "ax"], (
        "open sequences keep theirs"
    )
    cluster.close()


def test_a_grammar_that_was_not_loaded_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(number=1)
    with monkeypatch.context() as patch:
        patch.setattr(cluster.actors[0].backend, "load", Mock(side_effect=MemoryError))
        cluster.open(1, 2)
        assert kinds(cluster.step((1, ""), (2, ""))) == [BackendError] * 2
    cluster.open(3)
    assert cluster.step((3, "")) == ["ax"]
    assert cluster.actors[0].backend.loaded == ["fast"]
    cluster.close()


# slots


def test_a_slot_is_used_again_only_after_the_worker_has_freed_it(
    cluster: Cluster,
) -> None:
    cluster.open(9, 10)
    cluster.step((9, ""), (10, ""))  # the grammar is loaded
    cluster.dispatcher.free([9, 10])
    cluster.open(1, grammar="slow")
    cluster.open(2)
    assert cluster.step((1, "a"), (2, ""), deadline=0.05) == ["late", "ax"]
    connection = cluster.actors[0].connection
    (slot,) = connection.sequences
    cluster.dispatcher.free([1])
    for number in range(3, 9):
        cluster.open(number)
        cluster.step((number, ""))
        assert slot not in connection.sequences
    cluster.slow.release.set()
    until(lambda: bool(connection.table.ready[slot] < 0))


def test_the_lowest_free_slot_is_used_first(cluster: Cluster) -> None:
    """A GPU reads the masks of low slots where they lie."""
    connection = cluster.actors[0].connection
    cluster.end(1)
    cluster.open(0, 1, 2)
    cluster.step((0, ""), (1, ""), (2, ""))
    for number in range(3, 20):
        slot = number % 3
        cluster.dispatcher.free([connection.sequences[slot].sequence.sequence_id])
        (other, _) = (
            state.sequence.sequence_id for state in connection.sequences.values()
        )
        cluster.step((other, ""))  # with its message the free is sent
        until(lambda slot=slot: bool(connection.table.ready[slot] < 0))
        cluster.open(number)
        cluster.step((number, ""))
        assert set(connection.sequences) == {0, 1, 2}


def test_pinned_masks_are_released_with_their_actor(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last kernel, and before the memory is unmapped. This step's kernel gets
    copies."""
    with fake_device(monkeypatch) as device:
        table = cluster.actors[0].connection.table
        pin_masks(table.mask, 4, GPU)
        cluster.open(1)
        cluster.submit((1, "a"))
        found = cluster.dispatcher.collect()
        mask = table.mask.ctypes.data
        assert pinned_end(mask) == mask + 4 * table.mask.strides[0]
        cluster.end(0)
        assert cluster.dispatcher.decided([1]) == [1]
        cluster.dispatcher.submit(())
        assert [call[0] for call in device.calls] == ["register", "wait", "unregister"]
        logits = torch.zeros(1, 32 * WORDS)
        part = found.ready[0]
        BitmaskKernel().apply(
            device.tensor(logits), [(part.masks, part.slots)], part.rows
        )
        assert device.launched == [[False]]
        assert logits.isfinite().nonzero()[:, 1].tolist() == tokens("b")


def test_more_sequences_than_slots_wait_for_a_slot() -> None:
    cluster = Cluster(number=1, slots=3)
    cluster.open(1, 2, 3, 4, 5)
    assert (
        cluster.step(*((number, "") for number in (1, 2, 3, 4, 5)), deadline=0.1)
        == ["ax"] * 3 + ["late"] * 2
    )
    assert cluster.dispatcher.decided([4, 5]) == []
    cluster.dispatcher.free([1, 3])
    cluster.step((2, "a"))
    until(lambda: cluster.dispatcher.decided([4, 5]) == [4, 5])
    assert cluster.step((4, ""), (5, "")) == ["ax", "ax"]
    cluster.close()


def test_frees_reach_the_worker_with_the_next_step_or_at_once(cluster: Cluster) -> None:
    cluster.open(1, 2, 3)
    cluster.step((1, ""), (2, ""), (3, ""))
    worker, other = cluster.actors[0].worker, cluster.actors[1].worker
    assert (worker.num_open, other.num_open) == (2, 1)
    cluster.dispatcher.free([1])
    cluster.step((3, "a"))
    assert worker.num_open == 1
    cluster.dispatcher.free([2, 3])
    until(lambda: worker.num_open == other.num_open == 0)


def test_masks_of_a_dead_actor_can_be_read_until_the_next_step(
    cluster: Cluster,
) -> None:
    cluster.open(1, 2)
    cluster.open(3, grammar="slow")
    cluster.submit((1, "a"), (2, "x"), (3, "a"))
    found = cluster.dispatcher.collect(0.3)
    cluster.end(1)
    assert cluster.dispatcher.decided([3]) == []
    assert outcomes(found, 3) == ["b", "y", "late"]


# late rows


def test_a_late_row_is_kept_and_its_neighbours_continue(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2, 3)
    assert cluster.step((1, ""), (2, ""), (3, "")) == ["ax"] * 3
    assert cluster.where(1) == cluster.where(3)
    assert cluster.step((1, "a"), (2, "a"), (3, "a"), deadline=0.1) == [
        "late",
        "b",
        "b",
    ]
    assert cluster.step((2, "ab"), (3, "ab")) == ["cd", "cd"]
    assert cluster.dispatcher.decided([1]) == []
    cluster.slow.release.set()
    until(lambda: cluster.dispatcher.decided([1]) == [1])
    assert cluster.step((1, "a"), deadline=0.0) == ["b"]
    assert cluster.slow.fills_at[1] == 1, (
        "a mask that is under way is not asked for again"
    )


def test_a_late_row_that_is_ready_during_a_step_is_not_forgotten(
    cluster: Cluster,
) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    assert cluster.step((1, "a"), (2, "a"), deadline=0.05) == ["late", "b"]
    cluster.submit((2, "ab"))
    cluster.slow.release.set()
    until(lambda: cluster.dispatcher.decided([1]) == [1])
    assert cluster.collect() == ["cd"]
    assert cluster.dispatcher.decided([1]) == [1], "until it is submitted again"


# deaths


def kinds(rows: list[str | GuidedError]) -> list[object]:
    return [row if isinstance(row, str) else type(row) for row in rows]


def test_a_sequence_without_a_mask_is_opened_elsewhere(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.open(3, grammar="slow")
    cluster.submit((1, "a"), (2, ""), (3, "ab"))  # 3 waits behind 1
    assert cluster.slow.reached.wait(WAIT)
    assert cluster.where(1) == cluster.where(3)
    cluster.end(cluster.where(1))
    error, *others = cluster.collect()
    assert isinstance(error, WorkerDied)
    assert not error.retryable
    assert others == ["ax", "cd"]


def test_a_hang_loses_its_sequence_and_moves_the_others(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.step((1, ""), (2, ""))
    cluster.submit((1, "a"))
    assert cluster.slow.reached.wait(WAIT)
    assert cluster.collect(0.0) == ["late"]
    cluster.open(3, grammar="slow")
    cluster.submit((1, "a"), (3, ""), (2, "a"))
    assert cluster.where(3) == 0
    cluster.end(cluster.where(1), hung=True)
    assert kinds(cluster.collect()) == [MaskTimeout, "ax", "b"], (
        "it was opened again within the step"
    )
    assert cluster.dispatcher.replays == 1
    assert cluster.where(3) == 1


def test_with_replays_a_sequence_ends_at_the_next_death() -> None:
    cluster = Cluster(number=3, max_replays=1)
    cluster.open(1, grammar="slow")
    cluster.open(2, 3, 4)
    assert all_ready(cluster.step((1, ""), (2, ""), (3, ""), (4, "")))
    rows = [(1, "a"), (2, "a"), (3, "a"), (4, "a")]
    cluster.submit(*rows)
    assert cluster.slow.reached.wait(WAIT)
    cluster.slow.reached.clear()
    cluster.end(cluster.where(1))
    assert kinds(cluster.collect(0.2)) == ["late", "b", "b", "b"]
    assert cluster.slow.reached.wait(WAIT), "it is being filled on another actor"
    cluster.submit(*rows)
    cluster.end(cluster.where(1))
    assert kinds(cluster.collect()) == [WorkerDied, "b", "b", "b"]
    cluster.close()


@pytest.mark.parametrize("cause", ["died", "fill", "frozen", "transfer"])
def test_a_constraint_that_ends_two_workers_is_in_quarantine(
    cause: EndCause, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.quarantine._APART_SECONDS", 0.0)
    cluster = Cluster(number=0)
    cluster.slow.slow_at = 0
    for number in (1, 2):
        cluster.slow.reached.clear()
        cluster.join()
        cluster.open(number, grammar="slow")
        cluster.submit((number, ""))
        assert cluster.slow.reached.wait(WAIT)
        actor = cluster.actors[cluster.where(number)].connection
        works = actor.work()[:1] if cause == "fill" else []
        cluster.dispatcher.announce(
            partial(cluster.dispatcher.end, actor, WorkerDied("ended"), cause, works)
        )
        cluster.collect(0.0)
        cluster.dispatcher.free([number])
    cluster.slow.release.set()
    cluster.join()
    cluster.open(3, grammar="slow")
    cluster.open(4)
    last, other = cluster.step((3, ""), (4, ""))
    is_refused = cause in ("died", "fill")
    assert isinstance(last, ConstraintQuarantined) if is_refused else last == "ax"
    assert other == "ax"
    assert (
        cluster.dispatcher.quarantine.keys()
        == [grammar_named("slow").constraint.key] * is_refused
    )
    cluster.close()


@pytest.mark.parametrize("is_remote", [False, True])
def test_deaths_of_idle_workers_lose_no_local_row(is_remote: bool) -> None:
    """What a remote worker was busy with is not known: each row that waits counts, so
    that none waits for ever."""
    dispatcher = Dispatcher(pool_wait=30.0, max_replays=1)
    sequence = GuidedSequence("request", 1, [])
    dispatcher.open(sequence, grammar_named("fast"))
    for _ in range(2):
        pair = ConnectedPair()
        pair.connection.is_remote = is_remote
        dispatcher.add(pair.connection)
        dispatcher.submit((sequence,))
        dispatcher.end(pair.connection, WorkerDied("killed from outside"))
    dispatcher.submit((sequence,))
    step = dispatcher.collect(0.0)
    assert (len(step.failed), len(step.late)) == ((1, 0) if is_remote else (0, 1))
    assert dispatcher.quarantine.keys() == []
    dispatcher.close()


def test_a_constraint_with_a_mask_is_not_suspected() -> None:
    cluster = Cluster(number=3)
    for number in (1, 2):
        cluster.slow.reached.clear()
        cluster.open(number, grammar="slow")
        assert cluster.step((number, "")) == ["ax"]
        cluster.submit((number, "a"))
        assert cluster.slow.reached.wait(WAIT)
        cluster.end(cluster.where(number))
        assert kinds(cluster.collect()) == [WorkerDied]
    assert cluster.dispatcher.quarantine.keys() == []
    cluster.close()


@pytest.mark.parametrize(("max_replays", "ends"), [(0, 2), (2, 3)])
def test_what_workers_are_frozen_with_is_not_replayed_for_ever(
    max_replays: int, ends: int
) -> None:
    cluster = Cluster(number=4, max_replays=max_replays)
    cluster.slow.slow_at = 0
    cluster.open(1, grammar="slow")
    for _ in range(ends):
        cluster.slow.reached.clear()
        cluster.submit((1, ""))
        assert cluster.collect(0.0) == ["late"]
        assert cluster.slow.reached.wait(WAIT)
        actor = cluster.actors[cluster.where(1)].connection
        cluster.dispatcher.announce(
            partial(cluster.dispatcher.end, actor, WorkerDied("frozen"), "frozen")
        )
    assert kinds(cluster.step((1, ""))) == [WorkerDied]
    cluster.close()


@pytest.mark.parametrize("hung", [False, True])
def test_a_late_row_is_decided_if_its_actor_is_gone(
    cluster: Cluster, hung: bool
) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    assert cluster.step((1, "a"), (2, ""), deadline=0.05) == ["late", "ax"]
    cluster.end(cluster.where(1), hung)
    assert cluster.dispatcher.decided([1]) == [1]
    (error,) = cluster.step((1, "a"), deadline=0.0)
    assert isinstance(error, MaskTimeout if hung else WorkerDied)


def test_a_waiting_row_is_decided_if_the_pool_cannot_start() -> None:
    dispatcher = Dispatcher(pool_wait=math.inf, max_replays=0, forced_tokens=False)
    sequence = GuidedSequence("r", 1, [])
    dispatcher.open(sequence, grammar_named("quick"))
    dispatcher.submit([sequence])
    assert dispatcher.collect(0.0).late == [0]
    assert dispatcher.decided([1]) == []
    dispatcher.unavailable = error = PoolUnavailable("no Ray")
    assert dispatcher.decided([1]) == [1]
    dispatcher.submit([sequence])
    assert dispatcher.collect(0.0).failed == {0: error}
    dispatcher.close()


# answers that are none


def test_answers_about_others_and_garbage_change_nothing(cluster: Cluster) -> None:
    cluster.open(1, grammar="slow")
    cluster.open(2)
    cluster.submit((1, "a"), (2, ""))
    actor = cluster.actors[cluster.where(1)]
    assert cluster.slow.reached.wait(WAIT)
    (slot,) = actor.connection.sequences
    version = int(actor.connection.table.target[slot])
    error = to_wire(WorkerDied("no"))
    wrong = [
        Failed(slot, version - 1, error),
        Failed(99, version, error),
        Failed(-1, version, error),
    ]
    for message in (*map(encode, wrong), WAKE, b"\xc1garbled"):
        # the server's thread is in a mask: the socket is free
        send_package(actor.pair.end, message)
    assert cluster.collect(0.2) == ["late", "ax"]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_happens_a_ready_row_is_the_mask_of_its_output(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Steps of any rows, deadlines, rollbacks, frees, actors that die, hang and join: a
    mask is right, or the row is not ready."""
    cluster = Cluster(slots=6, max_replays=data.draw(st.sampled_from([0, 2])))
    cluster.slow.release.set()
    letters = {tokens(letter)[0]: letter for letter in "abcdxyz"}
    wants = {"": "ax", "a": "b", "ab": "cd", "abc": ".", "x": "y", "xy": "z"}
    numbers: list[int] = []
    actions: list[Callable[[], None]] = []

    def opens() -> None:
        if len(numbers) > 8:
            return
        numbers.append(len(actions) * 1000 + len(numbers) + 1)
        text = data.draw(st.sampled_from(sorted(wants)))
        cluster.open(
            numbers[-1], grammar=data.draw(st.sampled_from(["fast", "slow"])), text=text
        )

    def steps() -> None:
        rows = (
            data.draw(st.lists(st.sampled_from(numbers), max_size=8, unique=True))
            if numbers
            else []
        )
        texts = [data.draw(st.sampled_from(sorted(wants))) for _ in rows]
        for number, text in zip(rows, texts, strict=True):
            known = cluster.sequences[number].output_token_ids
            if known != tokens(text)[: len(known)]:
                cluster.dispatcher.rollback(number, 0)
        found = cluster.step(
            *zip(rows, texts, strict=True),
            deadline=data.draw(st.sampled_from([0.0, 0.001, 1.0])),
        )
        for text, outcome in zip(texts, found, strict=True):
            assert isinstance(outcome, GuidedError) or outcome in ("late", wants[text])

    def continues() -> None:
        """Rows that go on by the token that is allowed first."""
        rows = tuple(cluster.sequences[number] for number in numbers)
        for _ in range(3):
            cluster.dispatcher.submit(rows, batch=len(actions))
            found = outcomes(cluster.dispatcher.collect(1.0), len(rows))
            wanted = [
                wants["".join(letters[token] for token in row.output_token_ids)]
                for row in rows
            ]
            assert all(
                isinstance(a, GuidedError) or a in ("late", b)
                for a, b in zip(found, wanted, strict=True)
            )
            # the next output may be none of `wants`
            if not all_ready(found) or set(found) & {"cd", "z", "."}:
                return
            for row, outcome in zip(rows, found, strict=True):
                row.output_token_ids = [*row.output_token_ids, tokens(str(outcome))[0]]

    def asks() -> None:
        assert set(cluster.dispatcher.decided(numbers)) <= set(numbers)

    def frees() -> None:
        if numbers:
            cluster.dispatcher.free(
                [numbers.pop(data.draw(st.integers(0, len(numbers) - 1)))]
            )

    def dies() -> None:
        cluster.end(
            data.draw(st.integers(0, len(cluster.actors) - 1)),
            hung=data.draw(st.booleans()),
        )
        cluster.join(slots=6)

    try:
        for _ in range(data.draw(st.integers(3, 15))):
            action = data.draw(
                st.sampled_from(
                    [opens, opens, steps, steps, continues, asks, frees, dies]
                )
            )
            actions.append(action)
            action()
    finally:  # hypothesis gives up on some of its examples
        cluster.dispatcher.close()
        close_all()
