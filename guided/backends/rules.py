"""Output rules: conditions on the next token that no library has in its grammars (see
`OutputRule`).

`NumberLimit` ends JSON numbers: a model that has begun to repeat a digit could continue
until the end of the context. `TokenLimit` ends the free text at the beginning of an
output, the thinking phase. Once the text has reached its limit and ends with a whole
character, only the tokens of the literal that ends the text are allowed.

`LineBreaks` is for llguidance, where whitespace is a lexeme that may stand before every
other one: a line break and its indentation. It forbids line breaks where JSON text does
not usually have them: before a comma or a colon, after a colon or a blank, in an empty
container, and twice.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache

import numpy as np

from guided.bitmask import Bitmask
from guided.errors import UnsupportedConstraint
from guided.tags.structural_tag import FreeText, Node, Series, Text, Times, walk
from guided.vocabulary import TokenIds, Vocabulary, valid_utf8

MAX_DIGITS = 24
"""Digits in a row after which a number ends. 64-bit integers have at most 20, doubles
17. A token may exceed it."""

MAX_EXPONENT = 2
"""Digits of an exponent after which a number ends. So each number is in the range of
doubles."""

_FEW = 8
"""Tokens of a number without an exponent that are not counted, to save time."""
_DIGITS = re.compile(rb"[+-]?(\d+)")
_NUMBER_END = re.compile(rb"(\d[eE][+-]?)?(\d*)\Z")
"""Matches the digits at the end of a text, and the beginning of an exponent before
them."""
_PART_OF_NUMBER = re.compile(rb"\d\Z|(?:\A|\d)[eE][+-]?\Z|\A[+-]\Z")
"""Matches tokens after which a digit may continue a number."""
_IN_TEXT = b'"' + bytes(set(string.ascii_letters.encode()).difference(b"eE"))
"""Characters that can't follow a digit of a JSON number."""
_REST_OF_CHARACTER = 3
"""Maximum number of tokens that complete a character. A text can exceed its limit by
this many tokens."""
_UNUSUAL = re.compile(
    rb'(?s)(?!\0).*?(?:[ :]\n|\n *[,:\n]|[\[{]\n *[\]}]|["\]}\w]\n *\Z)'
)
"""Matches texts with unusual line breaks, and those that end with a value and a line
break, as a comma may follow.

A text that begins with a zero does not match."""
_TAIL = re.compile(rb"[\[{]?\n(?= *\Z)|[\[{,: ]\Z")
"""Matches the end of an output, except for the end of a value."""
_PART = re.compile(rb" *[,:\]}]|[^\n]*\n")
"""Matches tokens that can make a line break unusual."""


class NumberLimit:
    """Ends the numbers of JSON, also within a structural tag."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        contents = vocabulary.token_bytes
        text_tokens = vocabulary.text_token_ids
        self._in_number = frozenset(
            token for token in text_tokens if _PART_OF_NUMBER.search(contents[token])
        )
        self._exponents = frozenset(
            token
            for token in self._in_number
            if contents[token][-1] not in b"0123456789"
        )
        digits = {token: _DIGITS.match(contents[token]) for token in text_tokens}
        counts = {token: len(match[1]) for token, match in digits.items() if match}
        self._shorter: list[Bitmask] = []
        """Number of digits -> mask of the tokens that begin with at most so many."""
        for most in range(MAX_EXPONENT + 1):
            longer = [token for token, count in counts.items() if count > most]
            self._shorter.append(~vocabulary.mask(longer))
        self._texts = vocabulary.mask(
            [token for token in text_tokens if contents[token][0] in _IN_TEXT]
        )

    def restrict(self, output: TokenIds, row: Bitmask, accepting: bool) -> None:
        """Forbid tokens with which a number would have more than `MAX_DIGITS` digits in
        a row, or `MAX_EXPONENT` in its exponent.

        Where letters or a quotation mark may follow, the digits are text. Where nothing
        but digits may, they are left.
        """
        start = len(output)
        while (
            start > 0
            and output[start - 1] in self._in_number
            and len(output) - start < MAX_DIGITS
        ):
            start -= 1
        if len(output) - start < _FEW and self._exponents.isdisjoint(output[start:]):
            return
        exponent, digits = _NUMBER_END.findall(
            self._vocabulary.decode(output[max(0, start - 1) :])
        )[0]
        most = MAX_DIGITS - len(digits)
        if exponent:
            most = MAX_EXPONENT - len(digits)
        if most <= MAX_EXPONENT and not (row & self._texts).any():
            others = row & self._shorter[max(0, most)]
            if accepting or others.any():
                row[:] = others


class LineBreaks:
    """Forbids unusual line breaks in JSON, also within a structural tag, unless nothing
    else is possible.

    JSON strings have no raw line breaks. So where a letter is allowed, the output is in
    a string if no line break is allowed, and in free text otherwise. A token that ends
    a value and then the line, such as `"\\n`, is never allowed, because it is not known
    yet whether a bracket can follow: a model writes `"` and `\\n`.

    This is no `OutputRule`, to save time: the worker restricts each mask to the text
    tokens anyway, and gets the usual ones among them here.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._contents = vocabulary.token_bytes
        self._first = {
            self._contents[token][0]: divmod(token, 32)
            for token in reversed(vocabulary.text_token_ids)
        }
        """Byte -> word and bit of the first token that begins with it. In vocabularies,
        this is the byte itself."""
        self._parts = [
            token
            for token in vocabulary.text_token_ids
            if _PART.match(self._contents[token])
        ]
        self._mask = lru_cache(maxsize=64)(self._find_mask)
        self._word, self._bit = self._first.get(b"\n"[0], (0, 0))
        ends = {
            token: self._contents[token][-1:] for token in vocabulary.text_token_ids
        }
        self._blank = frozenset(
            token for token, end in ends.items() if end in (b" ", b"\n")
        )
        """Tokens after which a line break may have begun."""
        for tail in (
            b"",
            b"\0",
            b'"',
            *(bytes([byte]) for byte in b"[{,: \n"),
            b"[\n",
            b"{\n",
        ):
            self._mask(tail, frozenset())  # now, and not at some sequence's token

    def permitted(
        self, output: TokenIds, row: Bitmask, special: frozenset[int]
    ) -> Bitmask:
        """Return the mask of the usual text tokens after `output`, and of `special`
        tokens.

        Args:
            row: int32 `[words]`: the tokens that the library allows.
        """
        can_break = row.item(self._word) >> self._bit & 1
        if not can_break and output and output[-1] not in self._blank:
            return self._mask(b"", special)  # most positions: in a string or a number
        if self._allows(row, b"x"):
            if can_break:
                return self._mask(b"\0", special)
            return self._mask(b"", special)
        text = self._vocabulary.decode(output[-1:])
        if text.isspace():
            text = self._vocabulary.decode(output[-40:])  # more than `MAX_INDENT`
        tail = _tail(text)
        if not tail and self._allows(row, b",:") and not self._allows(row, b"]}"):
            tail = b'"'
        return self._mask(tail, special)

    def _allows(self, row: Bitmask, marks: bytes) -> bool:
        """Whether a mask allows one of `marks`."""
        for mark in marks:
            word, bit = self._first.get(mark, (0, 0))
            if row.item(word) >> bit & 1:
                return True
        return False

    def _find_mask(self, tail: bytes, special: frozenset[int]) -> Bitmask:
        """Return the mask of the text tokens that are usual after `tail`, and of
        `special` tokens."""
        tokens = [
            token
            for token in self._parts
            if _UNUSUAL.match(tail + self._contents[token])
        ]
        vocabulary = self._vocabulary
        return vocabulary.text_mask & ~vocabulary.mask(tokens) | vocabulary.mask(
            special
        )


@lru_cache(maxsize=16384)
def _tail(text: bytes) -> bytes:
    """Return what `LineBreaks` has to know of the end of an output."""
    return b"".join(_TAIL.findall(text))


def token_limit(node: Node, vocabulary: Vocabulary) -> TokenLimit | None:
    """Return the limit on the free text of a structural tag; None if it has none.

    Raises `UnsupportedConstraint` if it is not at the beginning of the output, or no
    literal ends the text.
    """
    limited = [
        text
        for text in walk(node)
        if isinstance(text, FreeText) and text.max_tokens is not None
    ]
    if not limited:
        return None
    items = _flat(node)
    begin = ""
    while items and isinstance(items[0], Text):
        begin += items[0].text
        items = items[1:]
    match items:
        case [FreeText(_, int(limit)), Text(end), *_] if end and len(limited) == 1:
            return TokenLimit(vocabulary, begin, limit, end)
    raise UnsupportedConstraint(
        "max_tokens can be enforced on the text at the beginning of an output only, and if literal text ends it",
        param="structural_tag",
    )


def _flat(node: Node) -> list[Node]:
    """Return the items of a series. A first item that is optional counts as present."""
    match node:
        case Series(items):
            return [inner for item in items for inner in _flat(item)]
        case Times(item, _, 1):
            return _flat(item)
    return [node]


class TokenLimit:
    """Restricts the masks of one structural tag: `limit` tokens of text between the
    literals `begin` and `end`.

    An output that begins otherwise has no limit.
    """

    def __init__(
        self, vocabulary: Vocabulary, begin: str, limit: int, end: str
    ) -> None:
        self._vocabulary = vocabulary
        self._begin, self._end = begin.encode(), end.encode()
        self._end_token = vocabulary.special_names.get(end)
        self._limit = limit

    def restrict(self, output: TokenIds, row: Bitmask, accepting: bool) -> None:
        """See `OutputRule.restrict`."""
        start = self._start(output)
        text = len(output) - start
        if not self._limit <= text <= self._limit + _REST_OF_CHARACTER + len(self._end):
            return  # there is no limit, or it is not reached, or the text is over
        for cut in range(
            start + self._limit,
            min(len(output), start + self._limit + _REST_OF_CHARACTER) + 1,
        ):
            free = self._vocabulary.spelled(output[start:cut])
            if valid_utf8(free) == len(free):
                break
        else:
            return
        spelled = self._vocabulary.spelled(output[cut:])
        if (
            self._end in free
            or not self._end.startswith(spelled)
            or spelled == self._end
        ):
            return
        token = self._end_token
        if token is None:
            token = self._vocabulary.encode(self._end[len(spelled) :])[0]
        np.bitwise_and(row, self._vocabulary.mask([token]), out=row)

    def _start(self, output: TokenIds) -> int:
        """Return the number of tokens of the literal before the text; more than all if
        the output begins otherwise."""
        for count in range(min(len(output), len(self._begin)) + 1):
            if self._vocabulary.spelled(output[:count]).startswith(self._begin):
                return count
        return len(output) + 1
