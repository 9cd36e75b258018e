"""JSON pointers (RFC 6901)."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ancestor", "escape", "pointer"]


def escape(token: str) -> str:
    """One reference token, as it stands between two slashes."""
    return token.replace("~", "~0").replace("/", "~1") if "~" in token or "/" in token else token


def pointer(path: Iterable[str | int]) -> str:
    """The pointer of a path of keys and indices; empty for the document itself."""
    return "".join(f"/{escape(str(token))}" for token in path)


def ancestor(whole: str, limit: int) -> str:
    """`whole`, or where that is longer than `limit` characters the nearest pointer above it that is not."""
    return whole if len(whole) <= limit else whole[: whole.rfind("/", 0, limit + 1)]
