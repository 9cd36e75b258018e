"""The batch of vLLM's V1 model runner: the guided request in each row, updated by vLLM's `BatchUpdate`s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class V1Batch(Generic[T]):
    """Row -> the guided request in the row. Rows of other requests are not in it."""

    def __init__(self) -> None:
        self._rows: dict[int, T] = {}

    def update(
        self, removed: Iterable[int], added: Iterable[tuple[int, T | None]], moved: Iterable[tuple[int, int, bool]]
    ) -> list[T]:
        """Apply one step's changes in the order that vLLM prescribes: removed, added, moved.

        Args:
            added: row and the request that now fills it; None for a request without a constraint.
            moved: source row, target row, and whether the two swap.

        Returns:
            Requests that have left the batch, or were in a row that another request now fills.
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
        """Rows and their requests, ordered by row."""
        return iter(sorted(self._rows.items(), key=lambda item: item[0]))
