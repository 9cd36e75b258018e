"""The definitions of a normal form, each built when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from guided.schema.keywords import Schema


class Inexact(Exception):
    """Two subschemas can't be combined without a change of meaning."""


class Recursive(Inexact):
    """A definition is needed within itself."""


class Definitions:
    """Named subschemas, and how each is built.

    Args:
        built: gets the definitions in normal form.
    """

    def __init__(self, built: dict[str, Schema]) -> None:
        self._built = built
        self._builders: dict[str, Callable[[], Schema]] = {}
        self._outlines: dict[str, Callable[[], Schema]] = {}
        self._building: set[str] = set()
        self._unfolding: set[str] = set()

    def declare(self, name: str, build: Callable[[], Schema], outline: Callable[[], Schema] = lambda: True) -> None:
        """Add a definition, unless there is one of this name.

        Args:
            outline: returns a schema that allows at least what the definition does, without building it.
        """
        if name not in self._builders:
            self._builders[name], self._outlines[name] = build, outline

    def get(self, name: str) -> Schema:
        """Return a definition in normal form. Raises `Recursive` while it is being built."""
        if name not in self._built:
            if name in self._building:
                raise Recursive
            self._building.add(name)
            try:
                self._built[name] = self._builders[name]()
            finally:
                self._building.discard(name)
        return self._built[name]

    def outline(self, name: str) -> Schema:
        """Return a definition, or its outline while it is being built."""
        try:
            return self.get(name)
        except Inexact:
            return self._outlines[name]()

    def build_all(self) -> None:
        """Build all declared definitions, including those that are declared meanwhile."""
        while pending := self._builders.keys() - self._built.keys():
            self.get(min(pending))

    @contextmanager
    def unfolded(self, name: str) -> Iterator[Schema]:
        """Put a definition in the place of a reference to it. Raises `Recursive` within itself: it would not end."""
        if name in self._unfolding:
            raise Recursive
        self._unfolding.add(name)
        try:
            yield self.get(name)
        finally:
            self._unfolding.discard(name)

    @contextmanager
    def unfolded_anew(self) -> Iterator[None]:
        """Unfold for a separate definition: references that are being unfolded around it don't count."""
        outer, self._unfolding = self._unfolding, set()
        try:
            yield
        finally:
            self._unfolding = outer
