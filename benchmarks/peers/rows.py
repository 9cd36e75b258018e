"""Rows that follow known texts token by token, so that masks are those of real outputs. No library is needed here: this
runs in the peers' own environments too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Document", "Rows", "RunningSequence"]


@dataclass(frozen=True)
class Document:
    """A text that satisfies a JSON Schema, as tokens."""

    name: str
    schema: str
    """JSON text. Equal texts are one constraint."""
    tokens: tuple[int, ...]
    backend: str = ""
    """Another than the run's, where it says one (ours alone can: a backend per request)."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Document:
        return cls(fields["name"], fields["schema"], tuple(fields["tokens"]), fields["backend"])


@dataclass(eq=False)
class RunningSequence:
    """One row's current output."""

    id: int
    row: int
    document: Document
    output: list[int] = field(default_factory=list)
    """Tokens so far; grows in place."""

    def next_token(self, stop: int) -> int:
        position = len(self.output)
        return self.document.tokens[position] if position < len(self.document.tokens) else stop


class Rows:
    """A batch in which every row writes one document after the other, for ever.

    Row r takes the documents r, r + batch, r + 2 batch, ... (round and round), so that what a row does depends on
    nothing but its own steps, and the same rows can be run in any number of ways.

    Args:
        pinned: documents that the first row takes instead.
    """

    def __init__(self, documents: Sequence[Document], batch: int, stop: int, pinned: Sequence[Document] = ()) -> None:
        self._stop = stop
        self._streams = [_stream(documents, row, batch) for row in range(batch)]
        if pinned:
            self._streams[0] = _stream(pinned, 0, 1)
        self._next_id = 0
        self.sequences = [self._start(row) for row in range(batch)]

    def _start(self, row: int) -> RunningSequence:
        self._next_id += 1
        return RunningSequence(self._next_id, row, next(self._streams[row]))

    def next_tokens(self) -> list[int]:
        """What each row would sample next, the stop token included."""
        return [sequence.next_token(self._stop) for sequence in self.sequences]

    def advance(self, sequence: RunningSequence) -> RunningSequence | None:
        """Append the sequence's next token; at its end, start the row's next document and return its sequence."""
        position = len(sequence.output)
        if position < len(sequence.document.tokens):
            sequence.output.append(sequence.document.tokens[position])
            return None
        return self.restart(sequence)

    def restart(self, sequence: RunningSequence) -> RunningSequence:
        """Give the document up and start the row's next one."""
        fresh = self._start(sequence.row)
        self.sequences[sequence.row] = fresh
        return fresh


def _stream(documents: Sequence[Document], row: int, batch: int) -> Iterator[Document]:
    index = row
    while True:
        yield documents[index % len(documents)]
        index += batch
