"""LazyPool: a pool that is opened on first use."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from guided.constraint import Constraint
from guided.errors import PoolUnavailable, bounded
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar, MaskPool
from guided.vocabulary import Vocabulary

_RETRY_SECONDS = 30.0
"""Seconds after a failed attempt to open a pool until the next one. Until then, requests fail immediately."""
_log = logging.getLogger(__name__)


class LazyPool:
    """A `MaskPool` that opens another one for the first constraint. That constraint waits for it.

    Until then, all that is asked of it goes to an inline pool without sequences. If the other pool can't be opened,
    constraints fail with `PoolUnavailable`; the first one that comes 30 s later tries again.

    Args:
        open_pool: called on a thread of its own. May take seconds, and may raise any exception.
    """

    def __init__(self, vocabulary: Vocabulary, open_pool: Callable[[], MaskPool]) -> None:
        self._pool: MaskPool = InlinePool(vocabulary)
        self._open_pool = open_pool
        self._opening: Future[MaskPool] | None = None
        self._failed_at = math.inf
        self.closed = False
        """It was shut down."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def opened(self) -> Future[MaskPool]:
        """Start to open the pool, unless it is open or opening. The future ends with the pool or `PoolUnavailable`."""
        if self._opening is None or time.monotonic() - self._failed_at > _RETRY_SECONDS:
            self._opening = Future()
            self._failed_at = math.inf
            threading.Thread(target=self._run, args=(self._opening,), name="open-pool", daemon=True).start()
        return self._opening

    def _run(self, opening: Future[MaskPool]) -> None:
        started = time.monotonic()
        try:
            self._pool = self._open_pool()
        except BaseException as error:  # a request waits for the future
            _log.error("the mask pool can't be opened", exc_info=error)
            self._failed_at = time.monotonic()
            if not isinstance(error, PoolUnavailable):
                error = PoolUnavailable(f"the mask pool can't be opened: {bounded(error)}")
            opening.set_exception(error)
            return
        _log.info("the mask pool opened after %.1f s", time.monotonic() - started)
        opening.set_result(self._pool)
        if self.closed:
            self._pool.shutdown()

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        """See `MaskPool.compile`."""
        compiled: Future[Grammar] = Future()
        compiled.set_running_or_notify_cancel()

        def pass_on(done: Future[Grammar]) -> None:
            error = done.exception()
            if error is None:
                compiled.set_result(done.result())
            else:
                compiled.set_exception(error)

        def ask(opened: Future[MaskPool]) -> None:
            try:
                opened.result().compile(constraint, backends).add_done_callback(pass_on)
            except BaseException as error:
                compiled.set_exception(error)

        self.opened().add_done_callback(ask)
        return compiled

    def shutdown(self) -> None:
        """Shut the pool down; if it is still opening, as soon as it is open. Idempotent."""
        self.closed = True
        self._opening = Future()
        self._failed_at = math.inf
        self._opening.set_exception(PoolUnavailable("the pool is shut down"))
        self._pool.shutdown()
