"""Read an output in the formats of `guided/tools/formats.py` while it grows: thoughts,
text and function calls."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import regex

from guided.tags.arguments import ArgumentReader
from guided.tools.formats import NAME, NUMBER, Function, ReasoningFormat, ToolFormat


@dataclass(frozen=True, slots=True)
class Piece:
    """A new part of an output.

    `kind` is `reasoning`, `text`, `call` (a call begins: `text` is the function's name)
    or `arguments`.
    """

    kind: str
    text: str
    index: int = 0
    """Index of the call."""
    end: int = 0
    """Number of characters of the output up to the end of the piece, if the piece is
    text or reasoning."""


_Value = TypeVar("_Value")
_Steps = Generator[Piece | None, None, _Value]
_SIGNIFICANT = regex.compile(r'\\.?|["{}\[\]]', regex.DOTALL)
"""Escapes, quotation marks and brackets in JSON."""
_compiled = cache(regex.compile)
_NAMED = r"(?P<name>[\w.:-]+)(?=[^\w.:-]|:\d+\s*<)"
"""Regex of a whole function name. In Kimi's format, a colon and a number follow the
name."""


class OutputParser:
    """Splits one growing output into pieces.

    Args:
        thinking: whether the prompt ends within a thinking phase.
        functions: the functions that may be called.
        anywhere: whether calls may stand anywhere in free text, or only at the
            beginning of the answer.
        shows_thoughts: whether `feed` returns thoughts as pieces. `thoughts` always has
            them.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        *,
        thinking: bool = False,
        tools: ToolFormat | None = None,
        functions: Sequence[Function] = (),
        anywhere: bool = True,
        shows_thoughts: bool = True,
    ) -> None:
        self.thoughts = ""
        self._shows_thoughts = shows_thoughts
        self._output = ""
        self._position = 0
        self._finished = False
        self._blank = ""
        """White space that counts as text if text follows."""
        self._has_text = False
        self._anywhere = anywhere
        self._functions = {function.name: function for function in functions}
        self._steps = self._read(reasoning, thinking, tools)
        self.num_calls = 0
        """Number of calls that have begun."""
        self.complete = True
        """Whether the output does not end within a call."""

    def feed(self, text: str, finished: bool) -> list[Piece]:
        """Return the pieces that are new in `text`, the whole output so far.

        Args:
            finished: whether the output has ended by itself. False if it was cut, for
                example by `max_tokens`: the possible beginning of a mark at the end of
                a cut output belongs to no piece.
        """
        self._output = text
        self._finished = finished
        pieces = list(iter(self._steps.__next__, None))
        self.thoughts += "".join(
            piece.text for piece in pieces if piece.kind == "reasoning"
        )
        return [
            piece
            for piece in pieces
            if self._shows_thoughts or piece.kind != "reasoning"
        ]

    # Each of the following generators yields its pieces, and None when it needs more
    # text.

    def _read(
        self,
        reasoning: ReasoningFormat | None,
        thinking: bool,
        tools: ToolFormat | None,
    ) -> _Steps[None]:
        if reasoning is not None and (
            thinking or (yield from self._take(r"\s*" + regex.escape(reasoning.begin)))
        ):
            yield from self._piece("reasoning", reasoning.end)
            yield from self._take(r"\n*" + regex.escape(reasoning.between))
        if tools is not None:
            yield from self._calls(tools)
        if reasoning is not None:
            yield from self._take(regex.escape(reasoning.answer))
            yield from self._piece("text", reasoning.finish)
        else:
            yield from self._piece("text", "")

    def _calls(self, tools: ToolFormat) -> _Steps[None]:
        """Read calls, and text between them, up to the end or to the place where a call
        is required and missing."""
        first, next_one = _beginnings(tools)
        in_section = False
        while True:
            if in_section:
                begin = yield from self._take(rf"\s*(?:{next_one})", trigger="")
            elif self._anywhere:
                begin = yield from self._text(first, tools.trigger)
            else:
                begin = yield from self._take(rf"\s*(?:{first})", tools.trigger)
            if begin is not None and begin["name"] in self._functions:
                in_section = yield from self._call(
                    tools, self._functions[begin["name"]]
                )
                continue
            if begin is not None:
                self._position = begin.start()
            if in_section:
                in_section = False
            elif tools.preamble is not None and (
                yield from self._take(regex.escape(tools.preamble[0]))
            ):
                yield from self._piece("text", tools.preamble[1])
            else:
                return

    def _text(self, pattern: str, trigger: str) -> _Steps[Any]:
        """Read text up to a call, and return the match of the call's beginning. Leave
        out white space beside calls."""
        searched = self._position
        while True:
            match = _compiled(pattern).search(self._output, searched, partial=True)
            begun = (
                match is not None
                and not match.partial
                and (self._finished or match.end() < len(self._output))
            )
            if (
                begun
                and match["name"] is not None
                and match["name"] not in self._functions
            ):
                searched = match.end()
                continue
            cut = self._finished and not begun and not _is_cut(match, trigger)
            end = len(self._output)
            if match is not None and not cut:
                end = match.start()
            whole = self._blank + self._output[self._position : end]
            if self.num_calls and not self._has_text:
                whole = whole.lstrip()
            shown = whole
            if begun or self.num_calls or not self._finished:
                shown = whole.rstrip()
            self._blank = whole[len(shown) :]
            self._has_text = self._has_text or bool(shown)
            if shown:
                yield Piece("text", shown, end=end - len(self._blank))
            if begun:
                end = match.end()
            self._position = end
            searched = end
            if begun and match["name"] is not None:
                return match
            if not begun:
                yield None

    def _call(self, tools: ToolFormat, function: Function) -> _Steps[bool]:
        """Read the arguments of a call, and the text between this call and the next.

        Returns whether the next call belongs to the same section.
        """
        self.complete = False
        end = _lenient(tools.call[1])
        yield Piece("call", function.name, self.num_calls)
        self.num_calls += 1
        if function.text is not None:
            self.complete = True
            begin = tools.call[0]
            yield from self._take(regex.escape(begin[len(begin.rstrip()) :]))
            yield from self._piece("arguments", "")
        elif tools.style == "json":
            yield from self._take(r"\s*")
            yield from self._json()
        else:
            reader = ArgumentReader(tools.style, function.parameters.value)
            arguments = yield from self._elements(
                reader, r"\s*" + end, tools.call[1].split()[-1]
            )
            yield Piece(
                "arguments",
                json.dumps(arguments, ensure_ascii=False),
                self.num_calls - 1,
            )
        self.complete = True
        yield from self._take(rf"\s*{end}", trigger="")
        closed = tools.closing and (
            yield from self._take(rf"\s*{_lenient(tools.closing)}", trigger="")
        )
        if tools.around[1]:
            yield from self._take(tools.around[1], trigger="")
        if closed:
            return False
        between = tools.separator or tools.gap
        if between.strip() and (tools.separator or not self._anywhere):
            yield from self._take(rf"\s*{_lenient(between)}")
        return bool(tools.closing)

    def _elements(self, reader: ArgumentReader, end: str, mark: str) -> _Steps[Any]:
        """Read arguments in a style other than JSON, and return them when the call has
        ended.

        Args:
            end: regex of the call's end, which contains `mark`.
        """
        while True:
            if self._output.find(mark, self._position) >= 0:
                arguments, after = reader.read(self._output, self._position)
                if _compiled(end).match(self._output, after):
                    self._position = after
                    return arguments
            yield None

    def _json(self) -> _Steps[None]:
        """Read the arguments of a call, a JSON object."""
        depth = 0
        in_string = False
        ended = False
        while True:
            start = self._position
            self._position = len(self._output)
            for mark in _SIGNIFICANT.finditer(self._output, start):
                # the next character may be a quotation mark
                if mark[0] == "\\" and not self._finished:
                    self._position = mark.start()
                elif mark[0] == '"':
                    in_string = not in_string
                elif not in_string:
                    if mark[0] in "{[":
                        depth += 1
                    else:
                        depth -= 1
                    if depth == 0:
                        self._position = mark.end()
                        ended = True
                        break
            text = self._output[start : self._position]
            if text:
                yield Piece("arguments", text, self.num_calls - 1)
            if ended:
                return
            yield None

    def _piece(self, kind: str, mark: str) -> _Steps[None]:
        """Read a piece up to `mark`, or up to the end of the output if `mark` is
        empty."""
        while True:
            text, ended = self._until(mark)
            end = self._position
            if ended:
                end -= len(mark)
            if text:
                yield Piece(kind, text, max(self.num_calls - 1, 0), end)
            if ended:
                return
            yield None

    def _take(self, pattern: str, trigger: str | None = None) -> _Steps[Any]:
        """Skip text that matches `pattern` at the current position, and return the
        match; None without a match.

        Args:
            trigger: at the end of the output, an incomplete match of at least the
                length of `trigger` is skipped too.
        """
        while True:
            match = _compiled(pattern).match(self._output, self._position, partial=True)
            if match is None:
                return None
            partial = match.partial or match.end() == len(self._output)
            if not partial or (self._finished and not match.partial):
                self._position = match.end()
                return match
            if self._finished:
                if trigger is not None and (not trigger or _is_cut(match, trigger)):
                    self._position = len(self._output)
                return None
            yield None

    def _until(self, mark: str) -> tuple[str, bool]:
        """Return the text up to `mark`, which is skipped, or the text that is certainly
        before `mark`."""
        start = self._position
        end = self._output.find(mark, start)
        if mark and end >= 0:
            self._position = end + len(mark)
            return self._output[start:end], True
        end = len(self._output)
        if not self._finished:
            longest = min(len(mark) - 1, end - start)
            end -= next(
                (
                    size
                    for size in range(longest, 0, -1)
                    if self._output.endswith(mark[:size])
                ),
                0,
            )
        self._position = end
        return self._output[start:end], False


@cache
def _beginnings(tools: ToolFormat) -> tuple[str, str]:
    """Return the regex of the beginning of the first call, and of other calls. The
    group `name` is the function.

    The regex of the first call has the exact trigger, because text without it is not a
    call for the mask.
    """
    call = tools.pattern.replace(NAME, _NAMED) or _lenient(tools.call[0])
    start = regex.escape(tools.trigger)
    if tools.opening:
        first = rf"{start}\s*{_lenient(tools.opening.removeprefix(tools.trigger))}\s*(?:{call})"
    elif tools.pattern:
        first = call
    else:
        first = rf"{start}\s*{_lenient(tools.call[0].removeprefix(tools.trigger))}"
    first = tools.around[0] + first
    if tools.finish:
        first += f"|{regex.escape(tools.finish)}"
    return first, call


def _lenient(text: str) -> str:
    """Return a regex of `text` with any white space between words and beside the
    punctuation of JSON."""
    marked = text.replace(NAME, "\ue000").replace(NUMBER, "\ue001")
    words = regex.findall(r"[{}:,]|[^{}:,\s]+", marked)
    return (
        r"\s*".join(map(regex.escape, words))
        .replace("\ue000", _NAMED)
        .replace("\ue001", r"\d+\s*")
    )


def _is_cut(match: Any, trigger: str) -> bool:
    """Return whether the output ends within the beginning of a call, after the
    trigger."""
    return match is not None and len(match.string[match.start() :].strip()) >= len(
        trigger.split(maxsplit=1)[0]
    )
