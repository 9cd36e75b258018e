"""Known texts that rows write token by token, so that the masks are those of real
outputs.

Imports only the standard library, because it also runs in the environments of other
engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Document:
    """A text in tokens that satisfies a JSON Schema."""

    name: str
    schema: str
    """JSON text. Equal texts are the same constraint."""
    tokens: tuple[int, ...]


@dataclass(eq=False)
class RunningSequence:
    """The current output of a row."""

    id: int
    row: int
    document: Document
    output: list[int] = field(default_factory=list)
    """Tokens so far. The list grows in place."""
    sampled_at: float | None = None
    """Time of the last sampled token, in seconds of the run."""

    def next_token(self, stop: int) -> int:
        position = len(self.output)
        return (
            self.document.tokens[position]
            if position < len(self.document.tokens)
            else stop
        )
