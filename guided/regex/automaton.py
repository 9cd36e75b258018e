"""Regular expressions combined as finite automata: intersection, difference,
complement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import interegular
from interegular.fsm import anything_else

from guided.errors import UnsupportedConstraint
from guided.regex.tree import (
    EMPTY,
    Chars,
    Choice,
    Concatenation,
    Interval,
    Node,
    Ranges,
    Repeat,
    choice,
    complement,
    count,
    points,
    ranges_of,
    render,
    repeat,
    sequence,
)

_Edges = dict[Any, dict[Any, Node]]
"""State -> state after it -> the texts between the two."""
_LARGE_CLASS = 30_000
"""Number of code points above which a class is too large to enumerate its members."""


def of(node: Node) -> Any:
    """Return `interegular`'s finite automaton of the texts that match a regex.

    Raises:
        UnsupportedConstraint: a class has so many characters that the automaton would
            take seconds.
    """
    if _has_large_class(node):
        raise UnsupportedConstraint(
            "a class has too many characters to be combined with another pattern"
        )
    return interegular.parse_pattern(render(node)).to_fsm().reduce()


def _has_large_class(node: Node) -> bool:
    """Return whether `node` has a class that, like `\\w`, is neither small nor nearly
    complete."""
    match node:
        case Chars(ranges):
            return min(count(ranges), count(complement(ranges))) > _LARGE_CLASS
        case Concatenation(inner) | Choice(inner):
            return any(map(_has_large_class, inner))
        case Repeat(item):
            return _has_large_class(item)


def texts(machine: Any) -> Node:
    """Return the regex of the texts that an automaton accepts. Raises
    `UnsupportedConstraint` if it is too large."""
    machine = machine.reduce()
    if len(machine.states) > 150:
        raise UnsupportedConstraint("the pattern has too many states")
    others = complement(_characters(machine.alphabet))
    ranges: dict[Any, Ranges] = {}
    for key, symbols in machine.alphabet.by_transition.items():
        ranges[key] = _characters(symbols)
        if anything_else in symbols:
            ranges[key] += others
    edges: _Edges = {"end": {}}
    for state in machine.states:
        pairs: dict[Any, list[Interval]] = {}
        for key, target in machine.map.get(state, {}).items():
            pairs.setdefault(target, []).extend(ranges[key])
        edges[state] = {
            target: Chars(ranges_of(codes)) for target, codes in pairs.items() if codes
        }
    for state in machine.finals:
        edges[state]["end"] = EMPTY
    return _without_states(edges, machine.initial)


def _characters(symbols: Iterable[Any]) -> Ranges:
    """Return the code points of symbols of an automaton, without its symbol for any
    other character."""
    return points(ord(symbol) for symbol in symbols if symbol is not anything_else)


def _without_states(edges: _Edges, start: Any) -> Node:
    """Return the regex of the texts from `start` to "end". Eliminate the states in
    between, the furthest first."""
    edges["start"] = {start: EMPTY}
    order = ["start"]
    for state in order:
        order += [target for target in edges[state] if target not in order]
    sizes = {
        (state, target): 1 for state, targets in edges.items() for target in targets
    }
    for state in reversed(order):
        if state in ("start", "end"):
            continue
        onward = edges.pop(state)
        loops = repeat(onward.pop(state, EMPTY), 0, None)
        for source, targets in edges.items():
            if state not in targets:
                continue
            before = targets.pop(state)
            for target, after in onward.items():
                path = sequence([before, loops, after])
                if target in targets:
                    path = choice([targets[target], path])
                targets[target] = path
                passed = (
                    (source, state),
                    (state, state),
                    (state, target),
                    (source, target),
                )
                sizes[source, target] = sum(sizes.get(edge, 0) for edge in passed)
                if sizes[source, target] > 20_000:
                    raise UnsupportedConstraint(
                        "the pattern is too large once it is combined with others"
                    )
    if "end" not in edges["start"]:
        raise UnsupportedConstraint("no string is left")
    return edges["start"]["end"]
