"""JSON pointers (RFC 6901)."""

from __future__ import annotations

from collections.abc import Iterable

from guided.errors import MAX_ECHO, bounded


def escape(token: str) -> str:
    """Escape one reference token."""
    return token.replace("~", "~0").replace("/", "~1") if "~" in token or "/" in token else token


def unescape(token: str) -> str:
    """Undo `escape`."""
    return token.replace("~1", "/").replace("~0", "~")


def pointer(path: Iterable[str | int]) -> str:
    """Return the pointer of a path of keys and indices; empty for the document itself."""
    return "".join(f"/{escape(str(token))}" for token in path)


def shortened(whole: str) -> str:
    """Return a pointer as valid Unicode, or that of its nearest ancestor of at most `MAX_ECHO` characters."""
    printable = bounded(whole, len(whole) * 10)
    return printable if len(printable) <= MAX_ECHO else printable[: printable.rfind("/", 0, MAX_ECHO + 1)]
