"""The queue of constraints that wait for a compile process: clients take turns."""

from __future__ import annotations

from concurrent.futures import Future

from actors.compile_queue import CompileQueue, Task
from guided.constraint import Constraint


def task(client: str, number: int) -> Task:
    return Task(
        Constraint.regex(f"{client}{number}"),
        (),
        f"{client}{number}",
        Future(),
        client,
        float(number),
    )


def queue(*keys: str, length: int = 100) -> CompileQueue:
    made = CompileQueue(length)
    for key in keys:
        assert made.put(task(key[0], int(key[1:]))) is None
    return made


def taken(made: CompileQueue, number: int) -> list[str]:
    found = [made.take() for _ in range(number)]
    return [each.key if each else "" for each in found]


def test_one_client_has_all_processes() -> None:
    assert taken(queue("a1", "a2", "a3", "a4"), 4) == ["a1", "a2", "a3", "a4"]


def test_clients_take_turns() -> None:
    assert taken(queue("a1", "a2", "a3", "b1", "b2"), 4) == ["a1", "b1", "a2", "b2"]


def test_turns_with_one_process() -> None:
    made = queue("a1", "a2", "b1")
    for key in ("a1", "b1", "a2"):
        assert taken(made, 1) == [key]
        made.running.clear()


def test_none_has_more_than_half_while_another_waits() -> None:
    made = queue("a1", "a2", "a3")
    assert taken(made, 2) == ["a1", "a2"]
    for number in range(1, 4):
        made.put(task("b", number))
    assert taken(made, 2) == ["b1", "b2"]


def test_a_full_queue_refuses_the_newest_of_the_largest_client() -> None:
    made = queue(*(f"a{number}" for number in range(4)), length=4)
    alone = made.put(task("a", 4))
    assert alone is not None
    assert alone.key == "a4"
    for number, refused in enumerate(["a3", "a2"]):
        other = made.put(task("b", number))
        assert other is not None
        assert other.key == refused
    last = made.put(task("b", 2))
    assert last is not None
    assert last.key == "b2", "each has half"
