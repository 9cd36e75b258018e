"""Line breaks between the tokens of JSON text, where llguidance would allow them between any two.

In llguidance, whitespace is a lexeme that may stand before every other one. So the adapter lets this lexeme be a line
break with its indentation, and forbids here what JSON text does not usually have: a line break before a comma or a
colon, after a colon, in an empty container, after a blank, or twice. In JSON text a raw line break is never part of a
string, so the characters next to it tell which one it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import pack
from guided.constraint import MAX_INDENT
from guided.vocabulary import Vocabulary

_NEVER = re.compile(rb"[ :]\n|\n *[,:\n]|[\[{]\n *[\]}]")
"""Matches a token with a line break that is unusual, whatever precedes it."""
_AFTER = (
    (re.compile(rb":\Z|[,:] \Z"), re.compile(rb"\n")),
    (re.compile(rb"[\[{]\Z"), re.compile(rb"\n *[\]}]")),
    (re.compile(rb"[\[{]\n *\Z"), re.compile(rb" *[,:\n\]}]")),
    (re.compile(rb"\n *\Z"), re.compile(rb" *[,:\n]")),
)
"""(end of the output, beginning of the tokens that are unusual after it)."""
_ENDS_LINE = re.compile(rb'(?: *|[^"\n]*(?="))("[\]}]*|[\]}]+)\n *')
"""Matches a token that ends a value or several, and then the line. The group is what ends them."""


class LineBreaks:
    """Which tokens are unusual after an output. All grammars of one vocabulary share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        contents = {token: vocabulary.token_bytes[token] for token in vocabulary.text_token_ids}
        ids = {content: token for token, content in contents.items()}
        broken = {token: content for token, content in contents.items() if b"\n" in content}
        never = {token for token, content in broken.items() if _NEVER.search(content)}
        alone = {token for token, content in broken.items() if content[:1] == b"\n"} - never
        closing = {b"": alone}
        for token, content in broken.items():
            if token in alone or content.rstrip(b" \n")[-1:] in (b",", b"[", b"{"):
                continue
            ending = _ENDS_LINE.fullmatch(content)
            if ending and ending[1] + b"," in ids:
                closing.setdefault(ending[1], set()).add(token)
            else:
                never.add(token)
        starts = [token for token, content in contents.items() if content[0] in b" ,:\n]}"]
        self._after = [{token for token in starts if begin.match(contents[token])} for _, begin in _AFTER]
        self._after.append(set())
        self._never = never
        self._closing = closing
        self.tokens = frozenset(never.union(*self._after, *closing.values()))
        """All tokens that may be unusual."""
        self._ever = frozenset(never.union(*closing.values()))
        self.reach = MAX_INDENT + 3
        """Number of tokens at the end of an output that matter."""
        self._ends = [self._end_of(content) for content in vocabulary.token_bytes]
        """By token: index in `_AFTER` for an output that ends with it, the number of entries for others, or -1 for a
        token of blanks only."""
        # A value may be followed by a line break where a bracket can close its container. Tokens that contain the end
        # of the value and the bracket show that in the mask: `"}`.
        probes = [ids.get(text, -1) for text in (b"\n", b"z")]
        probes += [ids.get(end + mark, -1) for end in closing for mark in (b",", b":", b"}", b"]")]
        known = np.array(probes)
        self._words = np.where(known < 0, 0, known // 32)
        self._bits = np.where(known < 0, 0, np.left_shift(1, known % 32)).astype(np.uint32).view(np.int32)
        self._kept = lru_cache(maxsize=4096)(self._find_kept)
        self._packed = lru_cache(maxsize=256)(self._pack)

    def may_forbid(self, token: int, output: Sequence[int]) -> bool:
        """Whether `token` may be unusual after `output`. If so, `kept` decides."""
        return token in self._ever or token in self._after[self._end(output)]

    def kept(self, output: Sequence[int], row: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a mask without the tokens that are unusual after `output`. `row`: what the library allows."""
        return self._kept(self._end(output), (row[self._words] & self._bits).tobytes())

    def _end(self, output: Sequence[int]) -> int:
        end = self._ends[output[-1]] if output else len(_AFTER)
        if end < 0:
            end = self._end_of(b"x" + self._vocabulary.decode(output[-self.reach :]))
        return end

    def _end_of(self, text: bytes) -> int:
        if not text.strip(b" \n"):
            return -1
        if text[-1] not in b":[{ \n":
            return len(_AFTER)
        return next((index for index, (end, _) in enumerate(_AFTER) if end.search(text)), len(_AFTER))

    def _find_kept(self, end: int, probes: bytes) -> NDArray[np.int32]:
        line_break, letter, *others = np.frombuffer(probes, np.int32).astype(bool).tolist()
        if line_break and letter:  # free text of a structural tag
            return self._packed(None, ())
        places = range(0, len(others), 4)
        open_ends = [
            index for index, at in enumerate(places) if any(others[at : at + 2]) and not any(others[at + 2 : at + 4])
        ]
        return self._packed(end, tuple(open_ends))

    def _pack(self, end: int | None, closing: tuple[int, ...]) -> NDArray[np.int32]:
        """Return the mask without those of `_AFTER[end]` and the groups `closing`; for None, with all tokens."""
        unusual: set[int] = set()
        if end is not None:
            groups = list(self._closing.values())
            unusual = self._never.union(self._after[end], *(groups[index] for index in closing))
        return ~pack(sorted(unusual), self._vocabulary.padded_vocab_size)
