"""Calls of custom tools: OpenAI's tools whose input is a text, not JSON.

The model is told of a function whose only argument is the input. If the input is any text, or matches a regex, the
model writes the JSON of this argument. Text in a Lark grammar is written as it is: its lexemes have no JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from guided.tools.parser import OutputParser, Piece

_HEX = "[0-9a-fA-F]"
_CHARACTER = (
    rf'[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB]){_HEX}{{4}}|\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}'
)
_BEGUN = re.compile(rf'\s*\{{\s*"input"\s*:\s*"(?P<text>(?:{_CHARACTER})*+)')
"""The beginning of the JSON of an input, up to the last complete character."""


class CustomCalls:
    """Reads an output as another parser does. Pieces of calls of custom tools have other kinds: `custom` (a call
    begins: `text` is the tool's name) and `input`.

    Args:
        make_parser: makes the other parser.
        tools: name of a custom tool -> whether its input is written as it is.
    """

    def __init__(self, make_parser: Callable[[], Parser], tools: Mapping[str, bool]) -> None:
        self._parser = make_parser()
        self._tools = tools
        self._is_raw: bool | None = None
        """Of the tool of the last call. None: it is a function."""
        self._arguments = self._input = ""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._parser.num_calls

    @property
    def complete(self) -> bool:
        """The output does not end within a call."""
        return self._parser.complete

    def feed(self, text: str, finished: bool) -> list[Piece]:
        """Return the pieces that are new in `text`, the whole output so far."""
        return [piece for each in self._parser.feed(text, finished) if (piece := self._read(each)) is not None]

    def _read(self, piece: Piece) -> Piece | None:
        if piece.kind == "call":
            self._is_raw, self._arguments, self._input = self._tools.get(piece.text), "", ""
            return piece if self._is_raw is None else replace(piece, kind="custom")
        if piece.kind != "arguments" or self._is_raw is None:
            return piece
        if self._is_raw:
            return replace(piece, kind="input")
        self._arguments += piece.text
        before, self._input = self._input, _input_of(self._arguments)
        new = self._input[len(before) :]
        return replace(piece, kind="input", text=new) if new else None


def _input_of(arguments: str) -> str:
    """Return the input in the JSON of a call's arguments, or what is known of it while they grow."""
    try:
        return str(json.loads(arguments)["input"])
    except ValueError:
        begun = _BEGUN.match(arguments)
        return "" if begun is None else str(json.loads(f'"{begun["text"]}"', strict=False))


Parser = OutputParser | CustomCalls
