"""The strings that a subschema in normal form allows, and those that it does not, as one `pattern`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import interegular
from interegular.fsm import anything_else

from guided import regex
from guided.errors import UnsupportedConstraint
from guided.regex import EMPTY, UNIVERSE, Chars, Node
from guided.schema import string_pattern
from guided.schema.keywords import Schema, listed, types_of

_MAX_STATES = 150
_MAX_NODES = 20_000
_ANY = regex.repeat(Chars(UNIVERSE), 0, None)


def pattern_of(schema: Schema) -> str:
    """Return a pattern for the strings that satisfy `schema`.

    Raises:
        UnsupportedConstraint: `schema` has keywords other than those for strings.
        InvalidConstraint: a pattern is malformed.
    """
    return _whole(_strings(schema))


def complement_of(schema: Schema) -> str:
    """Return a pattern for the strings that do not satisfy `schema`. Raises as `pattern_of` does."""
    try:
        return _whole(_complement(_strings(schema, exact=True)))
    except RecursionError:
        raise UnsupportedConstraint("the pattern is too deep to be negated") from None


def without(pattern: str, names: Iterable[str]) -> str:
    """Return a pattern for the strings that contain a match of `pattern` and are not in `names`. Raises as above."""
    listed = _machine(regex.choice(map(regex.literal, names)))
    return _whole(_node(_machine(string_pattern.read(pattern)).difference(listed)))


def disjoint_patterns(patterns: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return disjoint patterns that together match what `patterns` do, each with those of them that match it too.

    Raises as above.
    """
    machines = [_machine(string_pattern.read(pattern)) for pattern in patterns]
    if all((one & other).empty() for one, other in combinations(machines, 2)):
        return [(pattern, [pattern]) for pattern in patterns]
    found: list[tuple[Any, list[str]]] = []
    for pattern, machine in zip(patterns, machines, strict=True):
        rest, split = machine, []
        for other, together in found:
            split += [(other & machine, [*together, pattern]), (other - machine, together)]
            rest = rest - other
        found = [(part, together) for part, together in [*split, (rest, [pattern])] if not part.empty()]
    return [(_whole(_node(part)), together) for part, together in found]


def _whole(node: Node) -> str:
    return f"^(?:{regex.render(node)})$"


def _strings(schema: Schema, *, exact: bool = False) -> Node:
    """Return the strings that satisfy `schema`. `exact`: refuse `format`, because ours may match fewer."""
    if schema is True or schema == {}:
        return _ANY
    if isinstance(schema, dict) and "string" in types_of(schema):
        literals = [regex.literal(value) for value in listed(schema) or () if isinstance(value, str)]
        if literals:
            return regex.choice(literals)
        if schema.keys() == {"anyOf"}:
            return regex.choice(_strings(part, exact=exact) for part in schema["anyOf"])
        if schema.keys() <= {"type", "pattern", "minLength", "maxLength"} | (set() if exact else {"format"}):
            pattern = schema.get("pattern", string_pattern.FORMATS.get(schema.get("format", "")))
            if not {"pattern", "format"} <= schema.keys():
                node = _ANY if pattern is None else string_pattern.read(pattern)
                most: Any = schema.get("maxLength")
                return string_pattern.fit(node, int(schema.get("minLength", 0)), None if most is None else int(most))
        if schema.keys() <= {"type", "not"}:
            return _complement(_strings(schema["not"], exact=True))
    raise UnsupportedConstraint("these strings can't be described by one pattern")


def _complement(node: Node) -> Node:
    """Return all other strings."""
    return _node(_machine(node).everythingbut())


def _machine(node: Node) -> Any:
    return interegular.parse_pattern(regex.render(node)).to_fsm().reduce()


def _node(machine: Any) -> Node:
    """Return the texts that `machine` accepts."""
    machine = machine.reduce()
    if len(machine.states) > _MAX_STATES:
        raise UnsupportedConstraint("the pattern has too many states")
    listed = regex.ranges_of((ord(symbol), ord(symbol)) for symbol in machine.alphabet if symbol is not anything_else)
    ranges = {
        key: regex.ranges_of(
            pair
            for symbol in symbols
            for pair in (regex.complement(listed) if symbol is anything_else else [(ord(symbol), ord(symbol))])
        )
        for key, symbols in machine.alphabet.by_transition.items()
    }
    edges: dict[Any, dict[Any, Node]] = {"end": {}}
    for state in machine.states:
        pairs: dict[Any, list[tuple[int, int]]] = {}
        for key, target in machine.map.get(state, {}).items():
            pairs.setdefault(target, []).extend(ranges[key])
        edges[state] = {target: Chars(regex.ranges_of(found)) for target, found in pairs.items() if found}
    for state in machine.finals:
        edges[state]["end"] = EMPTY
    return _without_states(edges, machine.initial)


def _without_states(edges: dict[Any, dict[Any, Node]], start: Any) -> Node:
    """Return the texts from `start` to "end", by eliminating the states in between, the furthest first."""
    edges["start"] = {start: EMPTY}
    order = ["start"]
    for state in order:
        order += [target for target in edges[state] if target not in order]
    size = 0
    for state in reversed(order):
        if state in ("start", "end"):
            continue
        onward = edges.pop(state)
        loop = onward.pop(state, None)
        around = [] if loop is None else [regex.repeat(loop, 0, None)]
        for targets in edges.values():
            before = targets.pop(state, None)
            for target, after in onward.items() if before is not None else ():
                path = regex.sequence([before, *around, after] if before is not None else [])
                targets[target] = regex.choice([targets[target], path]) if target in targets else path
                size += 1
        if size > _MAX_NODES:
            raise UnsupportedConstraint("the pattern is too large to be negated")
    if "end" not in edges["start"]:
        raise UnsupportedConstraint("no string is left")
    return edges["start"]["end"]
