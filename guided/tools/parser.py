"""Read an output in the formats of `guided/tools/formats.py` while it grows: thoughts, text and function calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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


class OutputParser:
    """Splits one growing output into pieces.

    Args:
        reasoning: the format of the thinking phase. None: there is none.
        thinking: the prompt ends within a thinking phase.
        tools: the format of calls. None: there are none.
        names: the functions that may be called.
        anywhere: calls may stand anywhere in free text. False: only at the beginning of the answer.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        *,
        thinking: bool = False,
        tools: ToolFormat | None = None,
        names: Sequence[str] = (),
        anywhere: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._begins = {} if tools is None else {tools.begin(name): name for name in names}
        self._anywhere = anywhere
        self._position = 0
        self._output = ""
        self._finished = False
        self._state: Callable[[], list[Piece] | None] = self._thinking if thinking else self._start
        self._blank = ""
        """White space that is text only if more text follows."""
        self._after_call = False
        self._in_section = False
        self._depth = 0
        self._in_string = False
        self.num_calls = 0
        """Calls that have begun."""
        self.complete = True
        """The output does not end within a call."""

    def feed(self, text: str, finished: bool) -> list[Piece]:
        """Return the pieces that are new in `text`, the whole output so far."""
        self._output, self._finished = text, finished
        pieces: list[Piece] = []
        while (step := self._state()) is not None:
            pieces += step
        if finished and not self.num_calls and self._blank:
            pieces.append(Piece("text", self._blank))
        return pieces

    # Each state returns its pieces and moves on; None: it needs more text.

    def _start(self) -> list[Piece] | None:
        if self._reasoning is not None:
            found = self._take(self._reasoning.begin)
            if found is None:
                return None
            self._state = self._thinking if found else self._answer
        else:
            self._state = self._text
        return []

    def _thinking(self) -> list[Piece] | None:
        assert self._reasoning is not None
        text, found = self._until(self._reasoning.end)
        if found:
            self._state = self._gap
        return [Piece("reasoning", text)] if text else ([] if found else None)

    def _gap(self) -> list[Piece] | None:
        assert self._reasoning is not None
        while self._output.startswith("\n", self._position):
            self._position += 1
        if (self._position == len(self._output) and not self._finished) or self._take(self._reasoning.between) is None:
            return None
        self._state = self._answer
        return []

    def _answer(self) -> list[Piece] | None:
        assert self._reasoning is not None
        if self._take(self._reasoning.answer) is None:
            return None
        self._state = self._text
        return []

    def _text(self) -> list[Piece] | None:
        if self._tools is None:
            text, self._position = self._output[self._position :], len(self._output)
            return [Piece("text", text)] if text else None
        if not self._anywhere:
            trigger = self._tools.trigger
            begun = self._take(trigger)
            if begun is None:
                return None
            if begun:
                self._position -= len(trigger)
                self._state = self._section
            else:
                self._tools = None
            return []
        text, found = self._until(self._tools.trigger)
        whole = self._blank + text
        if self.num_calls and self._after_call:
            whole = whole.lstrip()
        kept = whole.rstrip()
        self._blank = whole[len(kept) :]
        self._after_call = self._after_call and not kept
        if found:
            self._position -= len(self._tools.trigger)
            self._state = self._section
            self._blank = ""
        return [Piece("text", kept)] if kept else ([] if found else None)

    def _section(self) -> list[Piece] | None:
        """The beginning of a section, or of a call."""
        assert self._tools is not None
        if not self._in_section and self._take(self._tools.opening) is None:
            return None
        self._in_section = True
        self._state = self._call
        return []

    def _call(self) -> list[Piece] | None:
        rest = self._output[self._position :]
        begin = next((begin for begin in self._begins if rest.startswith(begin)), None)
        if begin is None:
            if any(begin.startswith(rest) for begin in self._begins):
                return None
            self._tools = None  # it was not constrained, so it is text
            self._state = self._text
            return []
        self._position += len(begin)
        self._state, self._depth, self.complete = self._arguments, 0, False
        self.num_calls += 1
        return [Piece("call", self._begins[begin], self.num_calls - 1)]

    def _arguments(self) -> list[Piece] | None:
        start = self._position
        for index in self._significant():
            character = self._output[index]
            if character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    self._position = index + 1
                    self._state = self._after
                    break
        text = self._output[start : self._position]
        return [Piece("arguments", text, self.num_calls - 1)] if text else None

    def _significant(self) -> Iterator[int]:
        """Yield the positions of quotes and brackets outside strings, and move to the end of the text."""
        index = self._position
        while index < len(self._output):
            character = self._output[index]
            if character == "\\" and self._in_string:
                if index + 1 == len(self._output) and not self._finished:
                    break
                index += 2
                continue
            if character == '"' or (not self._in_string and character in "{}[]"):
                yield index
            index += 1
        self._position = min(index, len(self._output))

    def _after(self) -> list[Piece] | None:
        assert self._tools is not None
        end = self._tools.call[1]
        taken = self._take(end)
        if taken is None:
            return None
        if not taken and end.startswith(self._output[self._position :]):
            self._position = len(self._output)  # the output was cut within the mark
        self.complete = self._after_call = True
        self._state = self._text if self._tools.separator is None and self._anywhere else self._more
        self._in_section = self._tools.separator is not None
        return []

    def _more(self) -> list[Piece] | None:
        """After a call: another call, or the end of the section."""
        assert self._tools is not None
        if self._tools.separator is None:
            followed = self._take(self._tools.gap)
            if followed is not None:
                self._state = self._call if followed else self._text
            return None if followed is None else []
        closed = self._take(self._tools.closing)
        if closed:
            self._state, self._in_section = self._text, False
            return []
        if closed is None or not self._take(self._tools.separator or ""):
            return None
        self._state = self._call
        return []

    def _take(self, mark: str) -> bool | None:
        """Skip `mark` if it is next. Returns whether it was there; None: more text is needed to know."""
        rest = self._output[self._position : self._position + len(mark)]
        if rest == mark:
            self._position += len(mark)
            return True
        return None if mark.startswith(rest) and not self._finished else False

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
