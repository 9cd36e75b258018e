"""Pools by name: found through the entry point group `guided.pools`, opened when the first guided request comes."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.metadata import entry_points
from typing import Any

from guided.errors import GuidedError, PoolUnavailable, bounded
from guided.pool import MaskPool
from guided.vocabulary import Vocabulary

__all__ = ["DEFAULT", "Opening", "find_pool"]

GROUP = "guided.pools"
DEFAULT = "ray"
_PAUSE_SECONDS = 30.0
"""After a pool could not be opened: requests fail at once for so long, rather than make the engine wait each."""
_log = logging.getLogger("guided.integrations")


def find_pool(name: str, options: Mapping[str, Any]) -> Callable[[Vocabulary], MaskPool]:
    """What opens a pool of this name, once it is given its vocabulary.

    Args:
        options: keyword arguments of the pool's class.

    Raises:
        PoolUnavailable: there is no such pool, or what it needs isn't installed.
        ValueError: it doesn't take these options.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise PoolUnavailable(f"there is no pool {bounded(name, 60)!r}: there are {', '.join(sorted(found)) or 'none'}")
    try:
        pool = found[name].load()
    except ImportError as error:
        raise PoolUnavailable(
            f"the {name} pool can't be loaded: {bounded(error)} (in a checkout of guided: pip install '.[ray]')"
        ) from error
    try:
        inspect.signature(pool).bind(None, **options)
    except TypeError as error:
        raise ValueError(f"the {name} pool doesn't take these options: {error}") from None

    def open_pool(vocabulary: Vocabulary) -> MaskPool:
        opened: MaskPool = pool(vocabulary, **options)
        return opened

    return open_pool


class Opening:
    """A pool that is opened when it is first asked for, on a thread of its own. From one thread.

    Args:
        open_pool: takes seconds; raises what it likes.
    """

    def __init__(self, open_pool: Callable[[], MaskPool]) -> None:
        self._open_pool = open_pool
        self._future: Future[MaskPool] | None = None
        self._failed_at = 0.0
        self._closed = False

    def ask(self) -> Future[MaskPool]:
        """The pool, now or later; or why there is none: a `PoolUnavailable`, or what else `GuidedError` says it."""
        if self._closed:
            closed: Future[MaskPool] = Future()
            closed.set_exception(PoolUnavailable("the pool is shut down"))
            return closed
        failed = self._future is not None and self._future.done() and self._future.exception() is not None
        if self._future is None or (failed and time.monotonic() - self._failed_at > _PAUSE_SECONDS):
            self._future = Future()
            try:
                threading.Thread(target=self._open, args=(self._future,), name="open-pool", daemon=True).start()
            except RuntimeError as error:  # no thread is to be had
                self._fail(self._future, error)
        return self._future

    def _open(self, future: Future[MaskPool]) -> None:
        started = time.monotonic()
        try:
            pool = self._open_pool()
        except Exception as error:
            self._fail(future, error)
            return
        _log.info("the mask pool is open, after %.1f s", time.monotonic() - started)
        future.set_result(pool)
        if self._closed:
            pool.shutdown()

    def _fail(self, future: Future[MaskPool], error: Exception) -> None:
        _log.error("the mask pool can't be opened", exc_info=error)
        self._failed_at = time.monotonic()
        known = isinstance(error, GuidedError)
        future.set_exception(error if known else PoolUnavailable(f"the mask pool can't be opened: {bounded(error)}"))

    def close(self) -> None:
        """Shut the pool down, if it was opened; if it is just being opened, as soon as it is. Idempotent."""
        self._closed = True
        if self._future is not None and self._future.done() and self._future.exception() is None:
            self._future.result().shutdown()
