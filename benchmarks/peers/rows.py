"""Rows that follow known texts token by token, so that the masks are those of real outputs.

Imports only the standard library, because it also runs in the environments of other engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Document:
    """A text in tokens that satisfies a JSON Schema."""

    name: str
    schema: str
    """JSON text. Equal texts are the same constraint."""
    tokens: tuple[int, ...]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Document:
        return cls(fields["name"], fields["schema"], tuple(fields["tokens"]))


@dataclass(eq=False)
class RunningSequence:
    """The current output of a row."""

    id: int
    row: int
    document: Document
    output: list[int] = field(default_factory=list)
    """Tokens so far. Grows in place."""

    def next_token(self, stop: int) -> int:
        position = len(self.output)
        return self.document.tokens[position] if position < len(self.document.tokens) else stop


class Rows:
    """A batch in which every row writes one document after the other without end.

    Row r takes the documents r, r + batch, r + 2 batch, ... and starts again after the last one. So a row depends only
    on its own steps, and all ways of masking get the same rows.

    Args:
        pinned: documents for the first row instead.
    """

    def __init__(self, documents: Sequence[Document], batch: int, stop: int, pinned: Sequence[Document] = ()) -> None:
        self._stop = stop
        self._streams = [_stream(documents, row, batch) for row in range(batch)]
        self.pinned = frozenset({0} if pinned else ())
        """Rows with pinned documents."""
        if pinned:
            self._streams[0] = _stream(pinned, 0, 1)
        self._next_id = 0
        self.sequences = [self._start(row) for row in range(batch)]

    def _start(self, row: int) -> RunningSequence:
        self._next_id += 1
        return RunningSequence(self._next_id, row, next(self._streams[row]))

    def next_tokens(self) -> list[int]:
        """Return the next token of each row. It may be the stop token."""
        return [sequence.next_token(self._stop) for sequence in self.sequences]

    def advance(self, sequence: RunningSequence) -> RunningSequence | None:
        """Append the sequence's next token. At its end, start the row's next document and return its sequence."""
        position = len(sequence.output)
        if position < len(sequence.document.tokens):
            sequence.output.append(sequence.document.tokens[position])
            return None
        return self.restart(sequence)

    def restart(self, sequence: RunningSequence) -> RunningSequence:
        """Abandon the document and start the row's next one."""
        fresh = self._start(sequence.row)
        self.sequences[sequence.row] = fresh
        return fresh


def _stream(documents: Sequence[Document], row: int, batch: int) -> Iterator[Document]:
    index = row
    while True:
        yield documents[index % len(documents)]
        index += batch
