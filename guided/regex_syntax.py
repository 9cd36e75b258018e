"""Spellings of ECMA-262 and Rust that Python's parser does not know, rewritten for it.

    \\p{L} \\p{Letter} \\P{Script=Greek} \\pL    a class of code points
    \\u{41} \\x{41} \\ud83d\\ude00              one code point
    \\cJ                                      a control character
    (?<name>...) \\k<name>                    a group, a backreference (which is refused later)
    \\z                                       the end (in a regex, not in a schema's pattern)
    [^]                                      any character (in a schema's pattern)

Syntax that the dialects read differently is refused: POSIX classes (`[[:alpha:]]`), and sets with `&&[`.
"""

from __future__ import annotations

import re
from functools import lru_cache

import regex as unicode_regex

from guided.errors import ConstraintTooLarge, InvalidConstraint, UnsupportedConstraint, bounded

_SPELLING = re.compile(
    r"\\[ux]\{(?P<code>[0-9A-Fa-f]{1,6})\}"
    r"|\\u(?P<high>[dD][89ABab][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|\\(?P<sign>[pP])(?:\{(?P<property>\^?[\w:=. -]+)\}|(?P<letter>[A-Za-z]))"
    r"|\\c(?P<control>[A-Za-z])"
    r"|\\k<(?P<reference>[^>]*)>"
    r"|\(\?<(?P<name>[^\W\d][\w$]*)>"
    r"|(?P<posix>\[[:.=]\^?\w+[:.=]\])"
    r"|\[\^?\]"
    r"|\\.|&&\[|.",
    re.DOTALL,
)
_MAX_LENGTH = 300_000
"""Maximum length of a rewritten pattern: `\\p{L}` takes 13,000."""
_SURROGATES = "\ud800-\udfff"


def python_syntax(pattern: str, param: str, *, ecma: bool) -> str:
    """Return `pattern` in the syntax of `re`.

    Args:
        ecma: `pattern` is from a JSON Schema.

    Raises:
        InvalidConstraint: there is no such property, or no such code point.
        UnsupportedConstraint: the pattern contains syntax that other dialects read differently.
    """
    if not re.search(r"\\[pPuxckz]|\(\?<|\[[:.=]|\[\^\]|&&\[", pattern):
        return pattern
    return _Rewriter(pattern, param, ecma).run()


class _Rewriter:
    def __init__(self, pattern: str, param: str, ecma: bool) -> None:
        self._pattern = pattern
        self._param = param
        self._ecma = ecma
        self._in_class = False

    def run(self) -> str:
        rewritten = "".join(map(self._rewritten, _SPELLING.finditer(self._pattern)))
        if len(rewritten) > _MAX_LENGTH:
            raise ConstraintTooLarge(f"{self._where()} contains too many Unicode properties", param=self._param)
        return rewritten

    def _rewritten(self, found: re.Match[str]) -> str:
        text = found[0]
        if found["code"]:
            return self._character(int(found["code"], 16))
        if found["high"]:
            pair = int(found["high"], 16), int(found["low"], 16)
            return self._character(0x10000 + ((pair[0] & 0x3FF) << 10) + (pair[1] & 0x3FF))
        if found["sign"]:
            return self._property(found["property"] or found["letter"], found["sign"] == "P")
        if found["control"]:
            return f"\\x{ord(found['control']) & 31:02x}"
        if found["posix"] and self._in_class:
            raise self._refused(f"the POSIX class {text}: write a class such as [a-z] or \\p{{L}}")
        if text == "&&[" and self._in_class:
            raise self._refused("'&&' between classes, which only Rust reads as an intersection")
        if not self._in_class:
            return self._outside(found)
        self._in_class = text.startswith("\\") or not text.endswith("]")
        return text

    def _outside(self, found: re.Match[str]) -> str:
        text = found[0]
        if found["name"]:
            return "("
        if found["reference"] is not None:
            raise self._refused(f"a backreference ({bounded(text, 40)}), which a token mask can't enforce")
        if text == "\\z" and not self._ecma:
            return r"\Z"
        if text == "[^]" and self._ecma:
            return r"[\s\S]"
        self._in_class = text.startswith("[") and not found["posix"]  # `[:a:]` outside of a class is a whole class
        return text

    def _character(self, code: int) -> str:
        if code > 0x10FFFF:
            raise InvalidConstraint(f"{self._where()} contains the code point {code:#x}", param=self._param)
        return f"\\U{code:08x}"

    def _property(self, name: str, negated: bool) -> str:
        try:
            ranges = _ranges_of_property(name.strip(), negated)
        except unicode_regex.error:
            message = f"{self._where()} contains \\p{{{bounded(name, 60)}}}, which is no Unicode property"
            raise InvalidConstraint(message, param=self._param) from None
        return ranges if self._in_class else f"[{ranges}]"

    def _refused(self, what: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(f"{self._where()} contains {what}", param=self._param)

    def _where(self) -> str:
        return f"the regex {bounded(self._pattern, 120)!r}"


@lru_cache(maxsize=64)
def _ranges_of_property(name: str, negated: bool) -> str:
    """Return the code points with a property, as the inside of a class; surrogates if there are none."""
    matching = unicode_regex.compile(rf"\{'P' if negated else 'p'}{{{name}}}+")
    found = []
    for match in matching.finditer(_every_character()):
        low, high = ord(match[0][0]), ord(match[0][-1])
        found.append(f"\\U{low:08x}-\\U{high:08x}")
    return "".join(found) or _SURROGATES


@lru_cache(maxsize=1)
def _every_character() -> str:
    return "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
