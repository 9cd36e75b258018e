"""Read an output in the formats of `guided/tools/formats.py` while it grows: thoughts, text and function calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from guided.tools.formats import ReasoningFormat, ToolFormat


@dataclass(frozen=True, slots=True)
class Piece:
    """A new part of an output.

    `kind` is `reasoning`, `text`, `call` (a call begins: `text` is the function's name) or `arguments`.
    """

    kind: str
    text: str
    index: int = 0
    """Number of the call."""


_Value = TypeVar("_Value")
_Steps = Generator[Piece | None, None, _Value]
_SIGNIFICANT = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
"""Escapes, quotation marks and brackets in JSON."""


class OutputParser:
    """Splits one growing output into pieces.

    Args:
        thinking: the prompt ends within a thinking phase.
        names: the functions that may be called.
        anywhere: calls may stand anywhere in free text. False: only at the beginning of the answer.
        raw: functions with an input that is no JSON (`Function.text`).
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        *,
        thinking: bool = False,
        tools: ToolFormat | None = None,
        names: Sequence[str] = (),
        anywhere: bool = True,
        raw: Collection[str] = (),
    ) -> None:
        self._output = ""
        self._position = 0
        self._finished = False
        self._anywhere = anywhere
        self._raw = raw
        self._begins = {} if tools is None else {tools.begin(name): name for name in names}
        self._steps = self._read(reasoning, thinking, tools)
        self.num_calls = 0
        """Calls that have begun."""
        self.complete = True
        """The output does not end within a call."""

    def feed(self, text: str, finished: bool) -> list[Piece]:
        """Return the pieces that are new in `text`, the whole output so far."""
        self._output, self._finished = text, finished
        return list(iter(self._steps.__next__, None))

    # Each of these generators yields its pieces, and None where it needs more text.

    def _read(self, reasoning: ReasoningFormat | None, thinking: bool, tools: ToolFormat | None) -> _Steps[None]:
        if reasoning is not None:
            if thinking or (yield from self._take(reasoning.begin)):
                found = False
                while not found:
                    text, found = self._until(reasoning.end)
                    yield from [Piece("reasoning", text)] if text else []
                    yield from [] if found else [None]
                while (yield from self._take("\n")):
                    pass
                yield from self._take(reasoning.between)
            yield from self._take(reasoning.answer)
        if tools is not None:
            yield from self._text_and_calls(tools)
        yield from self._rest("text")

    def _text_and_calls(self, tools: ToolFormat) -> _Steps[None]:
        """Read up to the end, or up to something else than a call where one must be. What follows it is text."""
        while (yield from self._text(tools.trigger) if self._anywhere else self._take(tools.trigger)):
            self._position -= len(tools.trigger)
            yield from self._take(tools.opening)
            more = True
            while more:
                if not (yield from self._call(tools)):
                    return
                if tools.separator is None:
                    more = not self._anywhere and (yield from self._take(tools.gap))
                elif (yield from self._take(tools.closing, end=True)):
                    more = False
                elif not (yield from self._take(tools.separator)):
                    return

    def _text(self, trigger: str) -> _Steps[bool]:
        """Read text up to `trigger`. White space beside calls is left out. Returns whether `trigger` was found."""
        blank, after_call = "", self.num_calls > 0
        while True:
            text, found = self._until(trigger)
            whole = (blank + text).lstrip() if after_call else blank + text
            kept = whole.rstrip()
            blank = whole[len(kept) :]
            if kept:
                after_call = False
                yield Piece("text", kept)
            if found:
                return True
            if self._finished and blank and not self.num_calls:
                yield Piece("text", blank)
                blank = ""
            yield None

    def _call(self, tools: ToolFormat) -> _Steps[bool]:
        """Read one call. Returns False if there is none."""
        while True:
            rest = self._output[self._position :]
            begin = next((begin for begin in self._begins if rest.startswith(begin)), None)
            if begin is not None:
                break
            if not any(begin.startswith(rest) for begin in self._begins):
                return False
            yield None
        self._position += len(begin)
        name = self._begins[begin]
        self.num_calls += 1
        yield Piece("call", name, self.num_calls - 1)
        if name in self._raw:
            yield from self._rest("arguments", self.num_calls - 1)
        self.complete = False
        yield from self._arguments()
        yield from self._take(tools.call[1], end=True)
        self.complete = True
        return True

    def _rest(self, kind: str, index: int = 0) -> _Steps[None]:
        """Read all that follows."""
        while True:
            text, self._position = self._output[self._position :], len(self._output)
            yield from [Piece(kind, text, index)] if text else []
            yield None

    def _arguments(self) -> _Steps[None]:
        """Read a JSON object."""
        depth, in_string, ended = 0, False, False
        while True:
            start, self._position = self._position, len(self._output)
            for mark in _SIGNIFICANT.finditer(self._output, start):
                if mark[0] == "\\" and not self._finished:  # the next character may be a quotation mark
                    self._position = mark.start()
                elif mark[0] == '"':
                    in_string = not in_string
                elif not in_string:
                    depth += 1 if mark[0] in "{[" else -1
                    if depth == 0:
                        self._position, ended = mark.end(), True
                        break
            text = self._output[start : self._position]
            yield from [Piece("arguments", text, self.num_calls - 1)] if text else []
            if ended:
                return
            yield None

    def _take(self, mark: str, end: bool = False) -> _Steps[bool]:
        """Skip `mark` if it is next. Returns whether it was there.

        Args:
            end: skip a beginning of it at the end of the output too.
        """
        while True:
            rest = self._output[self._position : self._position + len(mark)]
            if rest == mark:
                self._position += len(mark)
                return True
            if self._finished or not mark.startswith(rest):
                self._position += len(rest) if end and mark.startswith(rest) else 0
                return False
            yield None

    def _until(self, mark: str) -> tuple[str, bool]:
        """Return the text up to `mark` (and skip it), or the text that is certainly before it."""
        found = self._output.find(mark, self._position)
        end = found if found >= 0 else len(self._output)
        if found < 0 and not self._finished:
            longest = min(len(mark) - 1, end - self._position)
            held = next((n for n in range(longest, 0, -1) if self._output.endswith(mark[:n])), 0)
            end -= held
        text, self._position = self._output[self._position : end], end + (len(mark) if found >= 0 else 0)
        return text, found >= 0
