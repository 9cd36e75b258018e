"""Limits on the size of a constraint and on the resources of its compilation.

The size of a constraint is checked before any grammar library gets it, in time linear
in its length. At sizes above these limits, some grammar libraries hang, crash or take
gigabytes (advisories CVE-2025-48942, -48943, -48944, -57809, -58446, CVE-2026-25048);
ordinary constraints are orders of magnitude smaller. Syntax is not checked here:
malformed text is measured as well as possible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from guided.errors import ConstraintTooLarge, bounded

# The scanners do not backtrack: repetitions are possessive, and the end of the text
# closes all open constructs.
_IN_REGEX = (
    r"\\(?:[xuUpPN]\{[^{}]*+\}|.)"  # an escape
    r"|\[\^?\]?(?:[^\]\\]++|\\.)*+\]?"  # a character class, in which brackets, braces and parentheses are characters
    r"|(?P<bracket>[()])|(?P<bar>\|)"
    r"|\{\s*+(?P<least>[0-9]*+)\s*+(?:,\s*+(?P<most>[0-9]*+)\s*+)?\}"
)
_IN_GRAMMAR = (
    r'#[^\n]*+|//[^\n]*+|"(?:[^"\\\n]++|\\.)*+"?'  # comments and literals
    r"|~\s*+(?P<from>[0-9]++)(?:\s*+\.\.\s*+(?P<to>[0-9]++))?|"
) + _IN_REGEX
_REGEX_TOKEN, _GRAMMAR_TOKEN = (
    re.compile(pattern, re.DOTALL) for pattern in (_IN_REGEX, _IN_GRAMMAR)
)
_RULE = re.compile(r"^[ \t]*+[?!]?[\w.-]++[^\n:\"/]*+:", re.MULTILINE)
"""The beginning of a rule in Lark or GBNF, at the start of a line."""


@dataclass(frozen=True)
class Range:
    """The range of finite numbers from `least` to `most`."""

    least: float
    most: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and value < math.inf

    def __str__(self) -> str:
        if self.most < math.inf:
            return f"between {self.least} and {self.most}"
        return f"at least {self.least}"


def check_ranges(options: Any) -> None:
    """Check the fields of a dataclass with the attribute `RANGES` (field name ->
    range). A field may always be None.

    Raises:
        ValueError: a value is out of range.
    """
    for name, allowed in options.RANGES.items():
        value = getattr(options, name)
        if value is not None and value not in allowed:
            raise ValueError(f"{name} is {value}; it must be {allowed}")


@dataclass(frozen=True)
class Limits:
    """Limits on constraints. Every refusal names the limit."""

    max_constraint_bytes: int = 512 * 1024
    max_values: int = 25_000
    """Number of values in a JSON schema: objects, arrays, strings, numbers, booleans
    and nulls."""
    max_nesting: int = 64
    """Number of levels of brackets in a regex or a grammar, and of formats in a
    structural tag."""
    max_schema_nesting: int = 120
    """Number of levels of JSON in a schema: the libraries read 128, and their form of a
    schema may have a few more."""
    max_choices: int = 10_000
    max_enum: int = 10_000
    max_repetition: int = 10_000
    """Largest bound in `{m,n}` of a regex or grammar (nested bounds are multiplied),
    and of minLength, minItems etc.

    Upper bounds in a schema (maxLength, maxItems) are not limited: real schemas use
    65,535 or a million for "large".
    """
    max_grammar_rules: int = 5_000
    max_regex_alternatives: int = 10_000
    """Total number of alternatives in a regex. As many as choices, because these
    alternatives are texts."""
    max_alternatives: int = 2_000
    """Total number of alternatives in all `anyOf` and `oneOf` of a schema, or all
    alternations of a grammar.

    Fewer than choices, because an alternative may be any subschema, with its own
    states.
    """

    def check_regex(self, pattern: str, param: str) -> None:
        """Raise `ConstraintTooLarge` for repetition bounds, alternatives or group
        nesting over the limits."""
        self._measure(
            _REGEX_TOKEN.finditer(pattern), param, self.max_regex_alternatives
        )

    def check_grammar(self, text: str, param: str) -> None:
        """Raise `ConstraintTooLarge` for rules, repetitions, alternatives or brackets
        over the limits."""
        rules = sum(1 for _ in _RULE.finditer(text))
        if rules > self.max_grammar_rules:
            message = (
                f"the grammar has {rules} rules; the limit is {self.max_grammar_rules}"
            )
            raise ConstraintTooLarge(message, param=param)
        self._measure(_GRAMMAR_TOKEN.finditer(text), param, self.max_alternatives)

    def too_many_alternatives(
        self, param: str, pointer: str | None
    ) -> ConstraintTooLarge:
        """Return the error for more than `max_alternatives`."""
        message = f"there are more than {self.max_alternatives} alternatives; 'choice' and 'enum' may have more"
        message += f" ({self.max_choices} and {self.max_enum})"
        return ConstraintTooLarge(message, param=param, pointer=pointer)

    def _measure(self, tokens: Iterable[re.Match[str]], param: str, most: int) -> None:
        repeated = [1]
        """The largest product of repetitions inside each open bracket so far."""
        closed = 1
        """The largest product inside the group that was closed last."""
        end = -1
        """The end of the group that was closed last."""
        bars = 0
        for token in tokens:
            kind = token.lastgroup
            if kind == "bar":
                bars += 1
                if bars >= most:
                    raise ConstraintTooLarge(
                        f"there are more than {most} alternatives", param=param
                    )
            elif kind == "bracket":
                if token["bracket"] == "(":
                    repeated.append(1)
                    if len(repeated) - 1 > self.max_nesting:
                        message = (
                            f"brackets are nested deeper than {self.max_nesting} levels"
                        )
                        raise ConstraintTooLarge(message, param=param)
                else:
                    closed = 1
                    if len(repeated) > 1:
                        closed = repeated.pop()
                    end = token.end()
                    repeated[-1] = max(repeated[-1], closed)
            elif kind is not None:  # neither an escape nor a class
                inner = 1
                if token.start() == end:
                    inner = closed
                product = _bound(token) * inner
                repeated[-1] = max(repeated[-1], product)
                if product > self.max_repetition:
                    what = f"the repetition {bounded(token[0], 40)!r} goes"
                    if inner > 1:
                        what = "nested repetitions go"
                    message = f"{what} beyond the limit of {self.max_repetition}"
                    raise ConstraintTooLarge(message, param=param)


def _bound(token: re.Match[str]) -> int:
    """Return the largest number in a repetition, at least 1."""
    largest = 1
    for number in token.groups():
        if number and number.isdecimal():
            if len(number) >= 10:
                return 10**9
            largest = max(largest, int(number))
    return largest


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits on the resources of a compilation, and on the number of compilations."""

    processes: int | None = None
    """Number of concurrent compilations. None: one per CPU of this machine, at least 4,
    at most 16."""
    seconds: float = 10.0
    """Time limit for one constraint with all backends that are tried, without the time
    in the queue."""
    memory_bytes: int = 224 << 20
    """Resident memory of a compile process beyond that of an idle process. A sample of
    MaskBench's schemas took up to 190 MiB (xgrammar, 131,072 tokens)."""
    grammar_bytes: int = 128 << 20
    """Size of one compiled grammar in each process that holds it."""
    wait_seconds: float = 30.0
    """Maximum time for which a constraint waits for a process before it is refused with
    `CompileQueueFull`."""
    waiting: int = 256
    """Maximum number of constraints that wait for a process. Further ones are refused
    at once."""

    RANGES: ClassVar[Mapping[str, Range]] = {
        **dict.fromkeys(
            ("processes", "memory_bytes", "grammar_bytes", "waiting"), Range(1)
        ),
        **dict.fromkeys(("seconds", "wait_seconds"), Range(0.001)),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
