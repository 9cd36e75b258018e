"""JSON pointers (RFC 6901)."""

from __future__ import annotations

from collections.abc import Iterable


def escape(token: str) -> str:
    """Escape one reference token."""
    return token.replace("~", "~0").replace("/", "~1") if "~" in token or "/" in token else token


def pointer(path: Iterable[str | int]) -> str:
    """Return the pointer of a path of keys and indices; empty for the document itself."""
    return "".join(f"/{escape(str(token))}" for token in path)


def ancestor(whole: str, limit: int) -> str:
    """Return `whole`, or its nearest ancestor of at most `limit` characters."""
    return whole if len(whole) <= limit else whole[: whole.rfind("/", 0, limit + 1)]
