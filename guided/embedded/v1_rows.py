"""Who is in which row of vLLM's V1 batch, kept up to date by its `BatchUpdate`s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["V1Rows"]

T = TypeVar("T")


class V1Rows(Generic[T]):
    """Row -> the request in it; rows of other requests are empty."""

    def __init__(self) -> None:
        self._rows: dict[int, T] = {}

    def update(
        self,
        removed: Iterable[int],
        added: Iterable[tuple[int, T | None]],
        moved: Iterable[tuple[int, int, bool]],
    ) -> list[T]:
        """Take over a step's changes, in the order that vLLM prescribes: removed, added, moved, each in turn.

        Args:
            added: a row, and the request that is in it now whoever was before; None where that is another's.
            moved: from, to, and whether they swap places. Who was at the end of a one-way move is gone.

        Returns:
            Those that are in no row any more.
        """
        rows = self._rows
        gone = [rows.pop(row, None) for row in removed]
        for row, request in added:
            gone.append(rows.pop(row, None))
            if request is not None:
                rows[row] = request
        for source, target, swap in moved:
            moving, displaced = rows.pop(source, None), rows.pop(target, None)
            if moving is not None:
                rows[target] = moving
            if swap and displaced is not None:
                rows[source] = displaced
            else:
                gone.append(displaced)
        return [request for request in gone if request is not None]

    def __iter__(self) -> Iterator[tuple[int, T]]:
        """Rows and who is in them, in order."""
        return iter(sorted(self._rows.items(), key=lambda item: item[0]))

    def __len__(self) -> int:
        return len(self._rows)
