"""Patterns of JSON Schema as JavaScript reads them without the flag `u` (ECMA-262,
annex B)."""

from __future__ import annotations

import json
import re

_HEX = "[0-9A-Fa-f]"
_ESCAPE = (
    rf"\\(?:u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|u{_HEX}{{4}}|x{_HEX}{{2}}|[ux]\{{{_HEX}+\}}"
    rf"|[0-3][0-7]{{0,2}}|[4-7][0-7]?|c[A-Za-z]|[pP](?:\{{[\w:=. ^-]+\}}|[CLMNPSZ])|k<[\w$]+>"
    rf"|N\{{[\w -]+\}}|U{_HEX}{{8}}|.?)"
)
_TOKEN = re.compile(
    _ESCAPE + r"|\[(?:[^\]\\]|\\.)*+\]|\{\d+(?:,\d*)?\}|[{}\]]", re.DOTALL | re.ASCII
)
_IN_MEMBER = _ESCAPE.replace("c[A-Za-z]", r"c\w")
_MEMBER = re.compile(
    rf"(?!^-(?!-)|-\Z)({_IN_MEMBER}|.)(?:-({_IN_MEMBER}|.))?", re.DOTALL | re.ASCII
)
"""Matches a member of a class, or a range, but not a hyphen at an end of the class."""
_SET = re.compile(r"\\[dDwWsSpP]")
_KEPT = re.compile(r"\\(?:[dDwWsSbBtnrvfcAZz1-9^$\\.*+?()\[\]{}|/&~-]|..+)?")
"""Matches escapes that stay. Some of them are refused later: `\\1`, and `\\A`, an
anchor elsewhere."""
_LITERALS = {"{": r"\{", "}": r"\}", "]": r"\]", "[^]": r"[\s\S]", r"\c": r"\\c"}
_IN_CLASS = {
    r"\c": r"\\c",
    r"\b": r"\x08",
    r"\B": "B",
    "[": r"\[",
    "&": r"\&",
    "~": r"\~",
    "-": r"\-",
}
_FOREIGN = re.compile(r"\[[:.=]\^?\w+[:.=]\]|&&\[")
"""Matches POSIX classes and intersections. They are refused later, by name."""


def translate(pattern: str) -> str:
    """Return a pattern in the syntax that Python, Rust and ECMA-262 share. What is
    malformed stays as it is.

    Literal braces and brackets are escaped, and hyphens beside `\\w` in a class.
    Needless escapes go: `\\_`, `\\e`.
    """
    if _FOREIGN.search(pattern):
        return pattern
    return _TOKEN.sub(_written, pattern)


def _written(token: re.Match[str]) -> str:
    text = token[0]
    if text in _LITERALS:
        return _LITERALS[text]
    if text.startswith("["):
        begin = 1 + text.startswith("[^")
        return text[:begin] + _MEMBER.sub(_member, text[begin:-1]) + "]"
    return _escape(text)


def _member(member: re.Match[str]) -> str:
    first, last = member.groups()
    written = _in_class(first)
    if last is None:
        return written
    if _SET.match(first) or _SET.match(last):
        dash = r"\-"
    else:
        dash = "-"
    return written + dash + _in_class(last)


def _in_class(text: str) -> str:
    return _IN_CLASS.get(text) or _escape(text, "01234567")


def _escape(text: str, octal: str = "0") -> str:
    """Return an escape. Other text stays. `octal`: the first digits of octal escapes;
    others begin references."""
    if text.startswith("\\") and text[1:2] in tuple(octal):
        return f"\\x{int(text[1:], 8):02x}"
    if text.startswith(r"\c") and len(text) > 2:
        return f"\\x{ord(text[2]) & 31:02x}"
    if len(text) == len(r"\ud83d\ude00"):
        return str(json.loads(f'"{text}"'))
    is_needless = text.startswith("\\") and not _KEPT.fullmatch(text)
    if is_needless:
        return text[1:]
    return text
