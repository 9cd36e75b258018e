"""What a constraint may be at the most. Checked before any grammar library sees it.

Sizes that are refused here are those at which some library of the four was seen to hang, to crash or to take
gigabytes (advisories CVE-2025-48942, -48943, -48944, -57809, -58446); ordinary schemas are orders of magnitude smaller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from guided.errors import ConstraintTooLarge

__all__ = ["DEFAULT_LIMITS", "Limits"]

_REPETITION = re.compile(r"\{(\d{1,20})(?:,(\d{0,20}))?\}")


@dataclass(frozen=True)
class Limits:
    """Admission limits; every refusal names the limit."""

    max_constraint_bytes: int = 512 * 1024
    max_nesting: int = 64
    """Levels of JSON nesting in a schema, of brackets in a regex or a grammar."""
    max_choices: int = 10_000
    max_enum: int = 10_000
    max_repetition: int = 10_000
    """Largest bound in `{m,n}` of a regex or grammar, and of minLength, maxItems and the like."""
    max_grammar_rules: int = 5_000

    def check_regex(self, pattern: str, param: str) -> None:
        """Refuse repetition bounds and bracket nesting over the limits."""
        self._check_repetition(pattern, param)
        self._check_nesting(pattern, param)

    def check_grammar(self, text: str, param: str) -> None:
        """Refuse rule counts, repetition bounds and bracket nesting over the limits."""
        rules = sum(1 for line in text.splitlines() if line.lstrip()[:1].isalpha())
        if rules > self.max_grammar_rules:
            raise ConstraintTooLarge(
                f"the grammar has {rules} rules; the limit is {self.max_grammar_rules}", param=param
            )
        self._check_repetition(text, param)
        self._check_nesting(text, param)

    def _check_repetition(self, text: str, param: str) -> None:
        for found in _REPETITION.finditer(text):
            bound = max(int(number or 0) for number in found.groups(default="0"))
            if bound > self.max_repetition:
                raise ConstraintTooLarge(
                    f"the repetition {found[0]!r} goes beyond the limit of {self.max_repetition}", param=param
                )

    def _check_nesting(self, text: str, param: str) -> None:
        depth = deepest = 0
        escaped = False
        for character in text:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == "(":
                depth += 1
                deepest = max(deepest, depth)
            elif character == ")":
                depth = max(0, depth - 1)
        if deepest > self.max_nesting:
            raise ConstraintTooLarge(
                f"brackets are nested {deepest} deep; the limit is {self.max_nesting}", param=param
            )


DEFAULT_LIMITS = Limits()
