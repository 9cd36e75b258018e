"""The syntax of JSON (RFC 8259) as an automaton over characters, for libraries that deviate from it.

A state is a pair of strings: the open brackets, and the mode. States are hashable and shared. Whitespace before and
after the document is not accepted.
"""

from __future__ import annotations

from functools import lru_cache

State = tuple[str, str]
"""(open brackets, mode). Modes: `value`, `item` (value or `]`), `key`, `member` (key or `}`), `colon`, `after` (after a
value); `text` and `name` (in the string of a value or a key), followed by `\\`, `u`, `u0` ... within an escape; the
number modes `-`, `0`, `1` (digits), `.`, `.1`, `e`, `e+`, `e1`, after the last characters read; `=` and the remaining
letters of a literal."""

START: State = ("", "value")

_SPACE = " \t\n\r"
_DIGITS = "0123456789"
_NUMBERS = {
    "-": {"0": "0", **dict.fromkeys("123456789", "1")},
    "0": {".": ".", "e": "e", "E": "e"},
    "1": {**dict.fromkeys(_DIGITS, "1"), ".": ".", "e": "e", "E": "e"},
    ".": dict.fromkeys(_DIGITS, ".1"),
    ".1": {**dict.fromkeys(_DIGITS, ".1"), "e": "e", "E": "e"},
    "e": {**dict.fromkeys(_DIGITS, "e1"), "+": "e+", "-": "e+"},
    "e+": dict.fromkeys(_DIGITS, "e1"),
    "e1": dict.fromkeys(_DIGITS, "e1"),
}
_WHOLE = ("0", "1", ".1", "e1")
_LITERALS = {"t": "=rue", "f": "=alse", "n": "=ull"}


def complete(state: State) -> bool:
    """Whether a whole document was read (a number may still continue)."""
    brackets, mode = state
    return not brackets and (mode == "after" or mode in _WHOLE)


def in_string(state: State) -> bool:
    """Whether the state is in a string, outside escapes."""
    return state[1] in ("text", "name")


def in_number(state: State) -> bool:
    """Whether the state is in a number, or after its last digit."""
    return state[1] in _NUMBERS


@lru_cache(maxsize=1 << 16)
def step(state: State, character: str, spaces: bool = True) -> State | None:
    """Return the state after `character`; None if it is not allowed. `spaces`: allow whitespace between tokens.

    Escaped surrogates are refused: single ones are not valid text, and pairs would count as two characters.
    """
    brackets, mode = state
    if mode.startswith(("text", "name")):
        mode_after = _in_string(mode, character)
        return None if mode_after is None else (brackets, mode_after)
    if mode.startswith("="):
        rest = mode[2:]
        return (brackets, f"={rest}" if rest else "after") if mode[1] == character else None
    if mode in _NUMBERS:
        following = _NUMBERS[mode].get(character)
        if following is not None:
            return brackets, following
        return step((brackets, "after"), character, spaces) if mode in _WHOLE else None
    if character in _SPACE:
        return state if spaces and brackets else None
    return _structure(brackets, mode, character)


def _structure(brackets: str, mode: str, character: str) -> State | None:
    closes = brackets[:-1], "after"
    match mode:
        case "value" | "item":
            if character == "]" and mode == "item":
                return closes
            return _value(brackets, character)
        case "key" | "member":
            if character == "}" and mode == "member":
                return closes
            return (brackets, "name") if character == '"' else None
        case "colon":
            return (brackets, "value") if character == ":" else None
    match brackets[-1:], character:
        case "[", ",":
            return brackets, "value"
        case "{", ",":
            return brackets, "key"
        case ("[", "]") | ("{", "}"):
            return closes
    return None


def _value(brackets: str, character: str) -> State | None:
    match character:
        case "{":
            return brackets + "{", "member"
        case "[":
            return brackets + "[", "item"
        case '"':
            return brackets, "text"
        case "-" | "0":
            return brackets, character
    if character in _DIGITS:
        return brackets, "1"
    literal = _LITERALS.get(character)
    return None if literal is None else (brackets, literal)


def _in_string(mode: str, character: str) -> str | None:
    kind, escape = mode[:4], mode[4:]
    if not escape:
        if character == '"':
            return "after" if kind == "text" else "colon"
        if character == "\\":
            return kind + "\\"
        return kind if character >= " " else None
    if escape == "\\":
        if character == "u":
            return kind + "u"
        return kind if character in '"\\/bfnrt' else None
    if character not in "0123456789abcdefABCDEF" or (escape in ("ud", "uD") and character in "89abcdefABCDEF"):
        return None
    return kind if len(escape) == 4 else mode + character
