"""An actor for tests of the driver."""

from __future__ import annotations

import os
from typing import Any, ClassVar


class SampleActor:
    """Remembers what it is told."""

    RAY_OPTIONS: ClassVar[dict[str, Any]] = {}

    def __init__(self, *first: object) -> None:
        self._told = list(first)

    def tell(self, what: object) -> list[object]:
        self._told.append(what)
        return self._told

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("as it was told")

    def end(self) -> None:
        os._exit(1)
