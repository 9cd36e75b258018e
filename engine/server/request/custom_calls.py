"""Calls of custom tools: OpenAI's tools whose input is a text, not JSON.

The model is told of a function with the input as its only argument. If the input is any text, or matches a regex, the
model writes the JSON of this argument. Text in a Lark grammar is written as it is: its lexemes know no JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from guided.tools.parser import OutputParser, Piece


class CustomCallParser(OutputParser):
    """Reads calls of custom tools too. Their pieces have other kinds: `custom` (a call begins: `text` is the tool's
    name) and `input`.

    Args:
        custom: name of a custom tool -> whether its input is written as it is.
        arguments: those of `OutputParser`.
    """

    def __init__(self, custom: Mapping[str, bool], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._custom = custom
        self._is_raw: bool | None = None
        """Of the tool of the last call. None: it is a function."""
        self._arguments = self._input = ""

    def feed(self, text: str, finished: bool) -> list[Piece]:
        """Return the pieces that are new in `text`, the whole output so far."""
        return [piece for each in super().feed(text, finished) if (piece := self._as_custom(each)) is not None]

    def _as_custom(self, piece: Piece) -> Piece | None:
        if piece.kind == "call":
            self._is_raw, self._arguments, self._input = self._custom.get(piece.text), "", ""
            return piece if self._is_raw is None else replace(piece, kind="custom")
        if piece.kind != "arguments" or self._is_raw is None:
            return piece
        if self._is_raw:
            return replace(piece, kind="input")
        self._arguments += piece.text
        before = len(self._input)
        with suppress(ValueError):  # a lone surrogate
            self._input = from_json(self._arguments, allow_partial="trailing-strings").get("input", "")
        new = self._input[before:]
        return replace(piece, kind="input", text=new) if new else None
