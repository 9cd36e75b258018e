"""What a constraint may be at the most, and what its compilation may take.

A constraint's size is checked before any grammar library sees it, in time linear in its length.

Sizes that are refused here are those at which some library of the four was seen to hang, to crash or to take
gigabytes (advisories CVE-2025-48942, -48943, -48944, -57809, -58446, CVE-2026-25048); ordinary constraints are orders
of magnitude smaller. Syntax is not judged here: text that is no regex or grammar is measured as far as it goes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from guided.errors import ConstraintTooLarge

__all__ = ["DEFAULT_LIMITS", "CompileLimits", "Limits"]

# All scanners are possessive, and what may be left unclosed may end at the end of the text: no backtracking.
_REGEX_TOKEN = re.compile(
    r"\\(?:[xuUpPN]\{[^{}]*+\}|.)"  # an escape
    r"|\[\^?\]?(?:[^\]\\]++|\\.)*+\]?"  # a character class: brackets, braces and parentheses are characters in it
    r"|(?P<bracket>[()])"
    r"|(?P<bar>\|)"
    r"|\{(?P<least>[0-9]*+)(?:,(?P<most>[0-9]*+))?\}",
    re.DOTALL,
)
_REPETITION = r"|\{\s*+(?P<least>[0-9]*+)\s*+(?:,\s*+(?P<most>[0-9]*+)\s*+)?\}"
_EBNF_TOKEN = re.compile(
    r"#[^\n]*+"
    r'|"(?:[^"\\\n]++|\\.)*+"?'
    r"|\[(?:[^\]\\\n]++|\\.)*+\]?"
    r"|(?P<bracket>[()])|(?P<bar>\|)" + _REPETITION
)
_LARK_TOKEN = re.compile(
    r"//[^\n]*+"
    r'|"(?:[^"\\\n]++|\\.)*+"?'
    r"|/(?P<regex>(?:[^/\\\n]++|\\.)++)/?"
    r"|(?P<bracket>[()\[\]])|(?P<bar>\|)"
    r"|~\s*+(?P<from>[0-9]++)(?:\s*+\.\.\s*+(?P<to>[0-9]++))?" + _REPETITION
)
_EBNF_RULE = re.compile(r"::=")
_LARK_RULE = re.compile(r"^[ \t]*+[?!]?[\w-]++(?:\.[0-9]++)?(?:\[[^\]\n]*+\])?[ \t]*+:", re.MULTILINE)


@dataclass(frozen=True)
class Limits:
    """Admission limits; every refusal names the limit."""

    max_constraint_bytes: int = 512 * 1024
    max_nesting: int = 64
    """Levels of JSON nesting in a schema, of brackets in a regex or a grammar."""
    max_choices: int = 10_000
    max_enum: int = 10_000
    max_repetition: int = 10_000
    """Largest bound in `{m,n}` of a regex or grammar (nested ones multiplied), and of minLength, minItems and the like.

    Upper bounds of a schema (maxLength, maxItems) are not limited: real ones say 65,535 or a million for "large".
    """
    max_grammar_rules: int = 5_000
    max_alternatives: int = 2_000
    """Members of all `anyOf` and `oneOf` of a schema together, of all alternations of a regex or a grammar.

    Fewer than choices: an alternative may be anything, and each has states of its own.
    """

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise ValueError(f"{limit.name} is {getattr(self, limit.name)}; it must be at least 1")

    def check_regex(self, pattern: str, param: str, pointer: str | None = None) -> None:
        """Refuse repetition bounds, alternatives and group nesting over the limits.

        Raises:
            ConstraintTooLarge: with `param`, and `pointer` where the pattern is part of a schema.
        """
        self._measure(_REGEX_TOKEN.finditer(pattern), param, pointer)

    def check_grammar(self, text: str, param: str) -> None:
        """Refuse rules, repetition bounds, alternatives and bracket nesting over the limits.

        EBNF has `::=`, Lark hasn't.

        Raises:
            ConstraintTooLarge: with `param`.
        """
        ebnf = "::=" in text
        rules = sum(1 for _ in (_EBNF_RULE if ebnf else _LARK_RULE).finditer(text))
        if rules > self.max_grammar_rules:
            raise ConstraintTooLarge(
                f"the grammar has {rules} rules; the limit is {self.max_grammar_rules}", param=param
            )
        self._measure((_EBNF_TOKEN if ebnf else _LARK_TOKEN).finditer(text), param, None)

    def too_many_alternatives(self, param: str, pointer: str | None) -> ConstraintTooLarge:
        """What to say of more than `max_alternatives`."""
        return ConstraintTooLarge(
            f"there are more than {self.max_alternatives} alternatives; 'choice' and 'enum' may have more"
            f" ({self.max_choices} and {self.max_enum})",
            param=param,
            pointer=pointer,
        )

    def _measure(self, tokens: Iterable[re.Match[str]], param: str, pointer: str | None) -> None:
        repeated = [1]
        """For each open bracket, the largest product of repetitions inside it so far."""
        closed = 1
        """The same of the group that was closed right before."""
        end = -1
        """Where that group ended."""
        bars = 0
        for token in tokens:
            kind = token.lastgroup
            if kind is None:
                continue
            if kind == "bar":
                bars += 1
                if bars >= self.max_alternatives:
                    raise self.too_many_alternatives(param, pointer)
            elif kind == "regex":
                self.check_regex(token["regex"], param, pointer)
            elif kind == "bracket":
                if token["bracket"] in "([":
                    repeated.append(1)
                    if len(repeated) - 1 > self.max_nesting:
                        raise ConstraintTooLarge(
                            f"brackets are nested deeper than {self.max_nesting} levels", param=param, pointer=pointer
                        )
                else:
                    closed, end = (repeated.pop() if len(repeated) > 1 else 1), token.end()
                    repeated[-1] = max(repeated[-1], closed)
            else:
                inner = closed if token.start() == end else 1
                product = _bound(token) * inner
                repeated[-1] = max(repeated[-1], product)
                if product > self.max_repetition:
                    what = (
                        f"the repetition {_short(token[0])} goes"
                        if inner == 1
                        else "nested repetitions go, multiplied,"
                    )
                    raise ConstraintTooLarge(
                        f"{what} beyond the limit of {self.max_repetition}", param=param, pointer=pointer
                    )


def _bound(token: re.Match[str]) -> int:
    """The largest number in a repetition, 1 at the least."""
    numbers = [number for number in token.groups() if number and number.isdecimal()]
    return max([1, *(int(number) if len(number) < 10 else 10**9 for number in numbers)])


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What one compilation may take, and how many run at once."""

    processes: int = field(default_factory=lambda: max(2, min(8, (os.cpu_count() or 1) // 2)))
    """Half of them (rounded up) are for what is quick: see `actors.compile.compiler`."""
    seconds: float = 10.0
    """For one constraint, whichever backends are tried, waiting for a process not counted."""
    memory_bytes: int = 2 << 30
    """Resident memory of a compile process, beyond what every one of them has."""
    grammar_bytes: int = 512 << 20
    """What one compiled grammar may weigh in each process that holds it."""
    wait_seconds: float = 30.0
    """How long a constraint waits for a process at the most."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not getattr(self, limit.name) > 0:
                raise ValueError(f"{limit.name} is {getattr(self, limit.name)}; it must be more than 0")
