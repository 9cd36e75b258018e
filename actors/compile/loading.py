"""Loading of compiled grammars by the mask actors, and the rejection of grammars that crash them.

A grammar is loaded by one actor first, and by the others once that one has survived it. When an actor dies, the grammar
that it was loading becomes a suspect. So do the grammars that waited behind it, if no actor has ever loaded them. Only
new actors, which hold no sequences yet, load suspects, one at a time. A grammar that crashes two actors is rejected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.driver.client import ActorDied, ObjectLost, RemoteActor, RemoteObject
from guided.errors import GuidedError, WorkerDied, bounded

_MAX_CRASHES = 2
"""Actors that a grammar may crash while they load nothing else. The first may have been killed externally."""
_MAX_REJECTED = 1000
_LOAD_SECONDS = 15.0
"""Time limit for loading one grammar. (Compiling it took less.)"""
_LIBRARY_SECONDS = 60.0
"""Time limit if the backend's library has to be imported first: seconds, or tens of seconds on a busy machine."""
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ActorHandle:
    """A mask actor, with the grammars that it has loaded or is loading."""

    actor: RemoteActor
    """A `MaskActor`."""
    installed: set[str] = field(default_factory=set)
    """Keys of the grammars that it has loaded."""
    serving: bool = False
    """Sequences may be placed on it."""
    loading: list[StoredGrammar] = field(default_factory=list)
    """What it is loading, in this order."""
    backends: set[str] = field(default_factory=set)
    """Backends with an imported library. The first grammar that needs a library imports it."""
    busy_since: float = 0.0
    """`time.monotonic()` when it began with the first of `loading`."""

    def is_overdue(self) -> bool:
        """Return whether loading one grammar has exceeded its time limit. From any thread."""
        for first in tuple(self.loading):
            limit = _LOAD_SECONDS if first.backend in self.backends else _LIBRARY_SECONDS
            return time.monotonic() - self.busy_since > limit
        return False


@dataclass(eq=False, slots=True)
class StoredGrammar:
    """A compiled grammar, which every actor loads, now or when it is started."""

    key: str
    backend: str
    constraint: bytes
    """The constraint, encoded with msgpack."""
    dumped: RemoteObject
    """The serialized grammar."""
    loads: dict[ActorHandle, Future[None]] = field(default_factory=dict)
    proven: bool = False
    """An actor has loaded it and survived."""


def died_loading(load: Future[None]) -> bool:
    """Return whether the actor died before it had loaded the grammar, which need not be the cause."""
    return load.done() and isinstance(load.exception(), ActorDied)


class Loading:
    """The compiled grammars and the actors that load them. Used from the thread of `Grammars`.

    Args:
        when_done: runs a callback on that thread when a future is done.
        changed: called whenever a load has ended, successfully or not.
        lost: called with the key of a grammar that Ray has lost, and that is forgotten here.
    """

    def __init__(
        self,
        when_done: Callable[[Future[Any], Callable[[Future[Any]], None]], None],
        changed: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._when_done = when_done
        self._changed = changed
        self._lost = lost
        self._suspects: dict[str, int] = {}
        """For each suspect: the actors it has crashed while they loaded nothing else."""
        self._rejected: dict[str, GuidedError] = {}
        self.stored: dict[str, StoredGrammar] = {}
        self.actors: tuple[ActorHandle, ...] = ()
        """Replaced, never modified: read by other threads."""

    def rejection(self, key: str) -> GuidedError | None:
        """Return why the grammar with this key is rejected; None if it is not. From any thread."""
        return self._rejected.get(key)

    def add(self, grammar: StoredGrammar) -> StoredGrammar:
        """Have a compiled grammar loaded. Returns the grammar that was stored under its key first."""
        stored = self.stored.setdefault(grammar.key, grammar)
        self._distribute(stored)
        return stored

    def retry(self, stored: StoredGrammar) -> None:
        """Have a grammar loaded also by the actors that failed to load it."""
        loads = stored.loads.items()
        stored.loads = {handle: load for handle, load in loads if not load.done() or load.exception() is None}
        self._distribute(stored)

    def remove(self, keys: Collection[str]) -> None:
        """Drop grammars that are not used any more, here and in the actors."""
        for key in keys:
            self.stored.pop(key, None)
            self._suspects.pop(key, None)
        for handle in self.actors:
            handle.installed.difference_update(keys)
            handle.actor.call("uninstall", list(keys))

    def forget(self) -> None:
        """Forget all grammars and actors: they are lost with the driver. What has crashed actors stays rejected."""
        self.stored.clear()
        self._suspects.clear()
        self.actors = ()

    def add_actor(self, handle: ActorHandle, needed: Collection[str]) -> list[Future[None]]:
        """Have a new actor load all grammars except suspects, the needed ones first. Returns the needed ones' loads."""
        self.actors += (handle,)
        loads: list[Future[None]] = []
        for key, stored in sorted(self.stored.items(), key=lambda item: item[0] not in needed):
            if self._is_trusted(stored) and (stored.proven or not stored.loads):
                load = self._load(stored, handle)
                if key in needed:
                    loads.append(load)
        return loads

    def load_next_suspect(self, handle: ActorHandle) -> Future[None] | None:
        """Have an actor that is not serving yet, and is loading nothing, load one suspect. None if there is none."""
        for key in self._suspects:
            stored = self.stored.get(key)
            if stored is not None and key not in self._rejected and handle not in stored.loads:
                return self._load(stored, handle)
        return None

    def remove_actor(self, handle: ActorHandle) -> None:
        """Remove an actor that has ended. The grammars that it was loading may become suspects, unless Ray was lost."""
        self.actors = tuple(each for each in self.actors if each is not handle)
        alone = len(handle.loading) == 1
        for position, key in enumerate(grammar.key for grammar in handle.loading if not handle.actor.is_lost):
            stored = self.stored.get(key)
            if position and stored is not None and stored.proven:
                continue  # it was waiting, and other actors have loaded it
            self._suspects[key] = self._suspects.get(key, 0) + alone
            if self._suspects[key] >= _MAX_CRASHES and key not in self._rejected:
                self._reject(key)
        for stored in self.stored.values():
            stored.loads.pop(handle, None)
            self._distribute(stored)

    def _reject(self, key: str) -> None:
        _log.error("grammar %s crashed %d workers that loaded it: it is rejected from now on", key, _MAX_CRASHES)
        while len(self._rejected) >= _MAX_REJECTED:
            del self._rejected[next(iter(self._rejected))]
        error = WorkerDied("loading this constraint's grammar crashed the worker twice: the constraint is rejected")
        error.retryable = False
        self._rejected[key] = error

    def _is_trusted(self, stored: StoredGrammar) -> bool:
        return stored.key not in self._suspects and stored.key not in self._rejected

    def _distribute(self, stored: StoredGrammar) -> None:
        """Have a grammar loaded by one actor; by all actors once one has survived it."""
        if not self._is_trusted(stored):
            return
        lacking = [handle for handle in self.actors if handle not in stored.loads]
        if stored.proven:
            for handle in lacking:
                self._load(stored, handle)
        elif lacking and not stored.loads:
            candidates = [handle for handle in lacking if handle.serving] or lacking
            self._load(stored, min(candidates, key=lambda handle: (len(handle.loading), len(handle.installed))))

    def _load(self, stored: StoredGrammar, handle: ActorHandle) -> Future[None]:
        if not handle.loading:
            handle.busy_since = time.monotonic()
        handle.loading.append(stored)
        load = handle.actor.call("install", stored.key, stored.backend, stored.dumped, stored.constraint)
        stored.loads[handle] = load
        self._when_done(load, partial(self._loaded, stored, handle))
        return load

    def _loaded(self, stored: StoredGrammar, handle: ActorHandle, load: Future[None]) -> None:
        key = stored.key
        if not died_loading(load):  # if it died, `remove_actor` needs to know what it was loading
            handle.loading.remove(stored)
            handle.backends.add(stored.backend)
            handle.busy_since = time.monotonic()
        if load.exception() is None:
            if self.stored.get(key) is stored:  # otherwise it was removed meanwhile, from the actor too
                handle.installed.add(key)
            stored.proven = True
            self._suspects.pop(key, None)
            self._distribute(stored)
        elif isinstance(load.exception(), ObjectLost):
            if self.stored.get(key) is stored:
                del self.stored[key]
                self._lost(key)
        elif handle in self.actors and not died_loading(load):
            _log.warning("%s was not loaded: %s", key, bounded(load.exception()))
        self._changed()
