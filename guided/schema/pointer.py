"""JSON pointers (RFC 6901)."""

from __future__ import annotations

from collections.abc import Iterable

from guided.errors import MAX_ECHO, bounded


class Place:
    """A place in a document. Its pointer is written only when an error needs it, because keys may be long.

    Args:
        parent: a place above it; None: the root.
        below: the rest of its pointer, without the first slash.
    """

    __slots__ = ("_below", "_parent", "negated")

    def __init__(self, parent: Place | None = None, below: str = "") -> None:
        self._parent = parent
        self._below = below
        self.negated: bool = (parent is not None and parent.negated) or "/not/" in f"/{below}/"
        """It is under `not`, or under a property of that name."""

    def pointer(self, *tokens: str | int) -> str:
        """Return the pointer of this place, or of one below it."""
        parts = []
        place: Place | None = self
        while place is not None:
            if place._below:
                parts.append(f"/{place._below}")
            place = place._parent
        return "".join(reversed(parts)) + pointer(tokens)


def escape(token: str) -> str:
    """Escape one reference token."""
    return token.replace("~", "~0").replace("/", "~1") if "~" in token or "/" in token else token


def pointer(path: Iterable[str | int]) -> str:
    """Return the pointer of a path of keys and indices; empty for the document itself."""
    return "".join(f"/{escape(str(token))}" for token in path)


def shortened(whole: str) -> str:
    """Return a pointer as valid Unicode, or that of its nearest ancestor of at most `MAX_ECHO` characters."""
    printable = bounded(whole, len(whole) * 10)
    return printable if len(printable) <= MAX_ECHO else printable[: printable.rfind("/", 0, MAX_ECHO + 1)]
