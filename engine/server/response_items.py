"""OutputItems: the items of a response, and the events that tell of them, from the pieces of the output."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from guided.tools.parser import Piece


class _Kind(NamedTuple):
    """How an item of one kind is written."""

    item: dict[str, Any]
    """Its constant fields."""
    prefix: str
    """Prefix of its id."""
    part: dict[str, Any] | None
    """The constant fields of its only content part. None: the text is a field of the item."""
    events: str
    """First part of the names of the events about its text."""
    field: str
    """Field of its text, in the item or its part, and in the event that ends it."""
    fields: dict[str, Any] = {}  # noqa: RUF012
    """Constant fields of the events about its text."""


_CALL = _Kind({"type": "function_call"}, "fc", None, "response.function_call_arguments", "arguments")
_KINDS = {
    "text": _Kind(
        {"type": "message", "role": "assistant"},
        "msg",
        {"type": "output_text", "annotations": []},
        "response.output_text",
        "text",
        {"logprobs": []},
    ),
    "reasoning": _Kind(
        {"type": "reasoning", "summary": []}, "rs", {"type": "reasoning_text"}, "response.reasoning_text", "text"
    ),
    "call": _CALL,
}
"""By the kind of the piece that begins the item."""


class OutputItems:
    """Builds the items of one response."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._new_call_id = new_call_id
        self._open: _Kind | None = None
        self._text = ""

    def add(self, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        """Add new pieces, and yield the events."""
        for piece in pieces:
            if piece.kind == "call":
                yield from self.close()
                yield from self._begin(_CALL, {"call_id": self._new_call_id(), "name": piece.text})
                continue
            kind = _KINDS.get(piece.kind, _CALL)
            if kind is not self._open:
                yield from self.close()
                yield from self._begin(kind)
            self._text += piece.text
            yield self._event(f"{kind.events}.delta", delta=piece.text, **kind.fields)

    def _begin(self, kind: _Kind, fields: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        self._open, self._text = kind, ""
        item = {"id": f"{kind.prefix}_{uuid.uuid4().hex}", **kind.item, **(fields or {}), "status": "in_progress"}
        self.items.append({**item, **({"content": []} if kind.part is not None else {kind.field: ""})})
        yield self._event("response.output_item.added", item=self.items[-1])
        if kind.part is not None:
            yield self._event("response.content_part.added", part={**kind.part, kind.field: ""})

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Complete the last item, if it is not complete, and yield the events."""
        kind = self._open
        if kind is None:
            return
        text = {kind.field: self._text}
        self.items[-1] |= {"status": status, **(text if kind.part is None else {"content": [{**kind.part, **text}]})}
        yield self._event(f"{kind.events}.done", **text, **kind.fields)
        if kind.part is not None:
            yield self._event("response.content_part.done", part={**kind.part, **text})
        yield self._event("response.output_item.done", item=self.items[-1])
        self._open = None

    def _event(self, event: str, **fields: Any) -> dict[str, Any]:
        """Build an event about the last item."""
        data = {"type": event, "output_index": len(self.items) - 1, **fields}
        if "item" in fields:
            return data
        return {**data, "item_id": self.items[-1]["id"], **({} if self._open is _CALL else {"content_index": 0})}
