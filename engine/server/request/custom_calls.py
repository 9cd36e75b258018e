"""Calls of custom tools: OpenAI's tools that take a text instead of JSON arguments.

The chat template describes a custom tool as a function with the input as its only
argument. If the input is any text, or matches a regex, the model writes this argument
as JSON. If a Lark grammar describes the input, the model writes the plain text, because
the terminals of the grammar do not match JSON escapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from guided.tools.output_parser import OutputParser, Piece


class CustomCallParser(OutputParser):
    """Reads calls of custom tools besides those of functions. Their pieces have the
    kinds `custom` (a call begins; `text` is the name of the tool) and `input`.

    Args:
        custom: name of a custom tool -> whether its input is plain text instead of
            JSON.
        arguments: arguments of `OutputParser`.
    """

    def __init__(self, custom: Mapping[str, bool], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._custom = custom
        self._is_raw: bool | None = None
        """Whether the last call has plain text as its input. None: it is the call of a
        function."""
        self._arguments = self._input = ""

    def feed(self, text: str, finished: bool) -> list[Piece]:
        """Return the pieces that are new in `text`, the whole output so far."""
        pieces = []
        for piece in super().feed(text, finished):
            if piece.kind == "call":
                self._is_raw = self._custom.get(piece.text)
                self._arguments = ""
                self._input = ""
            if self._is_raw is not None:
                piece = self._as_custom(piece)
            if piece.text or piece.kind != "input":
                pieces.append(piece)
        return pieces

    def _as_custom(self, piece: Piece) -> Piece:
        """Return the piece of a custom call for a piece of a function's call. An input
        may have no new text."""
        if piece.kind == "call":
            return replace(piece, kind="custom")
        if piece.kind != "arguments":
            return piece
        if self._is_raw:
            return replace(piece, kind="input")
        self._arguments += piece.text
        before = len(self._input)
        with suppress(ValueError):  # a lone surrogate
            self._input = from_json(
                self._arguments, allow_partial="trailing-strings"
            ).get("input", "")
        return replace(piece, kind="input", text=self._input[before:])
