"""Loading: compiled grammars onto the mask actors, and those that end an actor by being loaded onto none.

A grammar goes to one actor first, and to the others when that one lives. What was being loaded when an actor ended is
suspect, and what waited behind it and was never loaded anywhere: only actors that nobody uses yet load it, one suspect
at a time. Who ends two of them is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError

from guided.constraint import Constraint
from guided.errors import GuidedError, WorkerDied, bounded
from guided.messages import decoder, encode

__all__ = ["ActorHandle", "GrammarPackage", "Loading", "StoredGrammar", "ended_by", "from_chunks", "to_chunks"]

_MOST_ENDS = 2
"""Actors that a grammar may end by being loaded alone: the first may have been killed by somebody else."""
_MOST_REFUSED = 1000
_LIBRARY_SECONDS = 60.0
"""Importing a backend's library, and what it makes of the vocabulary, takes seconds; on a crowded machine, tens."""
_PIECE_BYTES = 64 << 10
_decode = decoder(Constraint).decode
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GrammarPackage:
    """A compiled grammar on its way to a worker; what was dumped travels beside it."""

    key: str
    backend: str
    pieces: tuple[bytes, ...]
    """Of the constraint: arguments of their own, see `actors.compile.loading`."""


@dataclass(eq=False, slots=True)
class ActorHandle:
    """A mask actor as the grammars see it."""

    actor: Any
    """Ray's handle of a `MaskActor`."""
    installed: set[str] = field(default_factory=set)
    serving: bool = False
    """Sequences are placed on it."""
    loading: list[GrammarPackage] = field(default_factory=list)
    """What it was asked to load and hasn't yet, in that order."""
    backends: set[str] = field(default_factory=set)
    """Those whose libraries it has loaded: they came with a grammar."""
    busy_since: float = 0.0
    """`time.monotonic()` of when it began with the first of `loading`."""

    def overdue(self, seconds: float) -> bool:
        """Whether it has been loading one grammar for longer than `seconds`, or than a library takes that comes with
        it. From any thread."""
        first = next(iter(tuple(self.loading)), None)
        if first is None:
            return False
        allowed = seconds if first.backend in self.backends else max(seconds, _LIBRARY_SECONDS)
        return time.monotonic() - self.busy_since > allowed


@dataclass(eq=False, slots=True)
class StoredGrammar:
    """A compiled grammar: what every worker, now or later, loads."""

    installable: GrammarPackage
    dumped: ray.ObjectRef | bytes
    homes: dict[ActorHandle, Future[None]] = field(default_factory=dict)
    proven: bool = False
    """Some actor has loaded it, and lived."""


def ended_by(load: Future[None] | None) -> bool:
    """That worker was gone before it had loaded; it needn't be the grammar's fault."""
    return load is not None and load.done() and isinstance(load.exception(), RayActorError)


class Loading:
    """Used from the grammars' thread.

    Args:
        when_done: has a task run on that thread when a future is done.
        changed: called when a load has ended, one way or the other.
        refused: is told which grammars are loaded no more, by their keys, and why; read by other threads.
    """

    def __init__(
        self,
        when_done: Callable[[Future[Any], Callable[[Future[Any]], None]], None],
        changed: Callable[[], None],
        refused: dict[str, GuidedError],
    ) -> None:
        self._when_done = when_done
        self._changed = changed
        self._refused = refused
        self._suspects: dict[str, int] = {}
        """How many actors each has ended that loaded nothing else."""
        self.stored: dict[str, StoredGrammar] = {}
        self.homes: tuple[ActorHandle, ...] = ()
        """Replaced, never changed: read by other threads."""

    def add(self, installable: GrammarPackage, dumped: ray.ObjectRef) -> StoredGrammar:
        """A grammar was compiled: have it loaded. Equal ones are stored once."""
        stored = self.stored.setdefault(installable.key, StoredGrammar(installable, dumped))
        self._spread(stored)
        return stored

    def try_again(self, stored: StoredGrammar) -> None:
        """Have it loaded by those that couldn't before, too."""
        for home, load in list(stored.homes.items()):
            if load.done() and load.exception() is not None:
                del stored.homes[home]
        self._spread(stored)

    def forget(self, keys: Collection[str]) -> None:
        """Nobody needs these any more."""
        for key in keys:
            self.stored.pop(key, None)
            self._suspects.pop(key, None)
        for home in self.homes:
            home.installed.difference_update(keys)
            home.actor.uninstall.remote(list(keys))

    def let_go(self) -> None:
        """Ray's shared memory is gone: who has no grammar yet can load only those that are compiled again there."""
        for stored in self.stored.values():
            stored.dumped = b""

    def settle(self, home: ActorHandle, needed: Collection[str]) -> list[Future[None]]:
        """A new actor: from now on it gets every grammar. Returns the loads of those needed that are not suspect."""
        self.homes += (home,)
        first = [stored for key, stored in self.stored.items() if key in needed]
        loads: list[Future[None]] = []
        for stored in (*first, *(each for key, each in self.stored.items() if key not in needed)):
            if self._is_trusted(stored) and (stored.proven or not stored.homes):
                load = self._load(stored, home)
                if stored.installable.key in needed:
                    loads.append(load)
        return loads

    def next_suspect(self, home: ActorHandle) -> Future[None] | None:
        """Have an actor that nobody uses yet, and that loads nothing, load one suspect; None where there is none."""
        for key in self._suspects:
            stored = self.stored.get(key)
            if stored is not None and key not in self._refused and home not in stored.homes:
                return self._load(stored, home)
        return None

    def leave(self, home: ActorHandle) -> None:
        """That actor is gone. What it was loading may be why."""
        self.homes = tuple(each for each in self.homes if each is not home)
        for place, key in enumerate(what.key for what in home.loading):
            stored = self.stored.get(key)
            if place and stored is not None and stored.proven:
                continue  # it waited, and has ended nobody yet
            ends = self._suspects.get(key, 0) + (len(home.loading) == 1)
            self._suspects[key] = ends
            if ends >= _MOST_ENDS and key not in self._refused:
                self._refuse(key)
        for stored in self.stored.values():
            stored.homes.pop(home, None)
            self._spread(stored)

    def _refuse(self, key: str) -> None:
        _log.error("grammar %s ended %d workers that loaded it: it is refused from now on", key, _MOST_ENDS)
        while len(self._refused) >= _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        error = WorkerDied("loading this constraint's grammar ended the worker, twice: it is refused")
        error.retryable = False
        self._refused[key] = error

    def _is_trusted(self, stored: StoredGrammar) -> bool:
        key = stored.installable.key
        return key not in self._suspects and key not in self._refused

    def _spread(self, stored: StoredGrammar) -> None:
        """To one actor; where that has it and lives, to all."""
        if not self._is_trusted(stored):
            return
        lacking = [home for home in self.homes if home not in stored.homes]
        if stored.proven:
            for home in lacking:
                self._load(stored, home)
        elif lacking and not stored.homes:
            usable = [home for home in lacking if home.serving] or lacking
            self._load(stored, min(usable, key=lambda home: (len(home.loading), len(home.installed))))

    def _load(self, stored: StoredGrammar, home: ActorHandle) -> Future[None]:
        if not home.loading:
            home.busy_since = time.monotonic()
        what = stored.installable
        home.loading.append(what)
        load = home.actor.install.remote(what.key, what.backend, stored.dumped, *what.pieces)
        loaded: Future[None] = load.future()
        stored.homes[home] = loaded
        self._when_done(loaded, partial(self._loaded, stored, home))
        return loaded

    def _loaded(self, stored: StoredGrammar, home: ActorHandle, done: Future[None]) -> None:
        key = stored.installable.key
        if not ended_by(done):  # else `leave` looks at what it was loading
            home.loading.remove(stored.installable)
            home.backends.add(stored.installable.backend)
            home.busy_since = time.monotonic()
        if done.exception() is None:
            if self.stored.get(key) is stored:  # else it was dropped meanwhile, there too
                home.installed.add(key)
            stored.proven = True
            self._suspects.pop(key, None)
            self._spread(stored)
        elif home in self.homes and not ended_by(done):
            _log.warning("%s was not loaded: %s", key, bounded(done.exception()))
        self._changed()


def to_chunks(constraint: Constraint) -> tuple[bytes, ...]:
    """Arguments for a call through Ray."""
    data = encode(constraint)
    return tuple(data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))


def from_chunks(pieces: Iterable[bytes]) -> Constraint:
    """The constraint that `to_chunks` took apart."""
    constraint: Constraint = _decode(b"".join(pieces))
    return constraint
