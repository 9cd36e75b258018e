"""Incremental detokenization by joining the bytes of tokens, so that the text is the
text that was constrained."""

from __future__ import annotations

import codecs
import copy
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from engine.sampling_params import SamplingParams
from guided.tools.output_parser import Piece
from guided.vocabulary import Vocabulary

_GOES_ON = re.compile(rb"\w\B")
"""A character that another character of the same word follows."""
_GAP = "\ud800"
"""A placeholder for text in which no stop string is searched. No stop string contains
it."""
_utf8 = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """The bytes that each token id adds to the text. The tokenizer defines the text of
    special tokens."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any) -> None:
        ordinary = list(vocabulary.token_bytes)
        ordinary += [b""] * (vocabulary.padded_vocab_size - len(ordinary))
        self.without_special = ordinary
        self.with_special = list(ordinary)
        self.special = vocabulary.special_token_ids | set(vocabulary.stop_token_ids)
        for token in self.special:
            if token < len(tokenizer):
                text = tokenizer.convert_ids_to_tokens(token)
            else:
                text = None
            self.without_special[token] = b""
            self.with_special[token] = (text or "").encode("utf-8")

    def pieces(self, skip_special_tokens: bool) -> list[bytes]:
        """Return the bytes that each token adds to an output."""
        if skip_special_tokens:
            return self.without_special
        return self.with_special

    def of(self, token_id: int) -> str:
        """Return the text of a single token, special or not. Incomplete characters are
        replaced."""
        return self.with_special[token_id].decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, special or not."""
        return self.with_special[token_id]

    def containing(self, word: bytes) -> list[int]:
        """Return the tokens that contain `word` as a whole word. The search is a pass
        over the vocabulary."""
        joined, begins = self._joined
        tokens: list[int] = []
        at = joined.find(word)
        while at >= 0:
            if not _GOES_ON.match(joined, at + len(word) - 1) and not _GOES_ON.match(
                joined, at - 1
            ):
                tokens.append(bisect_right(begins, at) - 1)
            at = joined.find(word, at + 1)
        return tokens

    def beginning_with(self, ending: bytes) -> list[int]:
        """Return the tokens that begin with `ending` and do not continue the last word
        of `ending`."""
        begin = bisect_left(self._ordered, (ending,))
        # no text contains two such bytes
        end = bisect_left(self._ordered, (ending + b"\xff\xff",))
        tokens = self._ordered[begin:end]
        return [
            token for text, token in tokens if not _GOES_ON.match(text, len(ending) - 1)
        ]

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """The concatenated texts of all tokens, each after a NUL, and the place of each
        text."""
        texts = [b"\0" + text for text in self.with_special]
        return b"".join(texts), list(accumulate(map(len, texts), initial=0))

    @cached_property
    def _ordered(self) -> list[tuple[bytes, int]]:
        """The texts of all tokens in order. Tokens with the same beginning are
        adjacent."""
        return sorted((text, token) for token, text in enumerate(self.with_special))


class Detokenizer:
    """The text of one sequence. A character appears once all its bytes are known.
    Invalid UTF-8 becomes U+FFFD.

    The end of the text is held back while it may be the beginning of a stop string.
    With a constraint, an incomplete character at the end of the output is dropped,
    because the constraint may not allow U+FFFD.

    With `SamplingParams.parser`, stop strings are searched in the free text that the
    parser finds. With a structural tag, they are searched in the tokens before which
    the output could have ended.
    """

    def __init__(self, texts: TokenTexts, params: SamplingParams) -> None:
        spaces = (
            params.spaces_between_special_tokens
            and not params.skip_special_tokens
            and params.constraint is None
        )
        self._pieces = texts.pieces(params.skip_special_tokens)
        if spaces:
            self._special = texts.special
        else:
            self._special = frozenset[int]()
        self._stop = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._whole_characters = params.constraint is not None
        if self._include_stop:
            self._held_back = 0
        else:
            self._held_back = max([0, *(len(text) - 1 for text in self._stop)])
        self._make_parser = params.parser
        searches_tag = (
            self._stop and params.constraint is not None and params.parser is None
        )
        self.free_places: set[int] | None = set() if searches_tag else None
        """Places of the output tokens that are free text of a structural tag: the
        output could have ended before them. The engine adds the places. None: no stop
        strings are searched in a structural tag."""
        self._begin()

    def _begin(self) -> None:
        self._decoder = _utf8("replace")
        self._done = 0
        self._is_complete = False
        self.stop: str | None = None
        """The stop string that has ended the text."""
        self.text = ""
        """The text so far, including held-back text."""
        if self._make_parser is not None and self._stop:
            self._parser = self._make_parser()
        else:
            self._parser = None
        self._is_free = False
        self._free = ""
        """The free text that the parser has found, with `_GAP` instead of everything
        else. Without a parser: the text, with `_GAP` for each character that is not
        free."""

    def feed(self, token_ids: Sequence[int], count: int) -> None:
        """Add the first `count` of `token_ids` that were not added before."""
        if count > self._done and not self._is_complete:
            pieces = [self._pieces[token] for token in token_ids[self._done : count]]
            for place in range(self._done, count) if self._special else ():
                if place and self._special.issuperset(token_ids[place - 1 : place + 1]):
                    pieces[place - self._done] = b" " + pieces[place - self._done]
            for place, piece in enumerate(pieces, self._done):
                # an output cannot end within a character
                if not self._decoder.getstate()[0]:
                    self._is_free = (
                        self.free_places is None or place in self.free_places
                    )
                text = self._decoder.decode(piece)
                self.text += text
                if self._parser is None:
                    if self._is_free:
                        self._free += text
                    else:
                        self._free += _GAP * len(text)
            self._done = count

    def rollback(self, count: int) -> None:
        """Forget the tokens after the first `count`. `feed` decodes all text again,
        because a character may be cut."""
        if count < self._done:
            self._begin()
        if self.free_places:
            self.free_places.intersection_update(range(count))

    def flush(self) -> None:
        """End the text: replace or drop an incomplete character. Idempotent."""
        if self._is_complete:
            return
        self._is_complete = True
        if self._whole_characters:
            self._decoder.reset()
        self.text += self._decoder.decode(b"", final=True)

    def find_stop(self, token_ids: Sequence[int], min_tokens: int) -> str | None:
        """Add new tokens, and cut the text at the first stop string that ends in them,
        after the first `min_tokens`. Return the stop string, or None."""
        self.feed(token_ids, min(min_tokens, len(token_ids)))
        before = len(self._searched())
        self.feed(token_ids, len(token_ids))
        searched = self._searched()
        begins = ((text, max(0, before - len(text) + 1)) for text in self._stop)
        hits = [
            (at, text)
            for text, begin in begins
            if (at := searched.find(text, begin)) >= 0
        ]
        if not hits or len(token_ids) <= min_tokens:
            return None
        at, stop = min(hits, key=lambda hit: hit[0] + len(hit[1]))
        if self._parser is None:
            end = at + len(stop)
        else:
            end = self._end_of(searched[: at + len(stop)])
        self.text = self.text[: end if self._include_stop else end - len(stop)]
        self.stop = stop
        self._is_complete = True
        return stop

    def _searched(self) -> str:
        """Return the text in which stop strings are searched."""
        if self._parser is not None:
            self._free = _with_pieces(
                self._free, self._parser.feed(self.text, finished=False)
            )
        return self._free

    def _end_of(self, free: str) -> int:
        """Return the length of the shortest beginning of the output with a free text
        that begins with `free`."""

        def has_it(length: int) -> bool:
            assert self._make_parser is not None
            pieces = self._make_parser().feed(self.text[:length], finished=True)
            return _with_pieces("", pieces).startswith(free)

        return bisect_left(range(len(self.text)), True, key=has_it)

    def completes_stop(self, token_ids: Sequence[int], min_tokens: int) -> bool:
        """Return whether the text of `token_ids` contains a stop string. This object
        does not change."""
        other = copy.copy(self)
        other._begin()
        return other.find_stop(token_ids, min_tokens) is not None

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without an incomplete character at its
        end."""
        return _utf8("replace").decode(
            b"".join([self._pieces[token] for token in token_ids])
        )

    def visible(self, finished: bool) -> str:
        """Return the part of the text that cannot change any more."""
        if finished or not self._held_back:
            return self.text
        return self.text[: -self._held_back]


def _with_pieces(free: str, pieces: Iterable[Piece]) -> str:
    """Add the pieces of text to `free`, with `_GAP` for other pieces, so that no stop
    string spans them."""
    for piece in pieces:
        if piece.kind == "text":
            free += piece.text
        elif not free.endswith(_GAP):
            free += _GAP
    return free
