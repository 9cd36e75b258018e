"""Grammars of a pool: compiled once, cached by bytes. Mask actors load them at first use."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial

from actors.compile.compiler import Compiler
from actors.compile.process import CompileResult
from guided.backends import BACKENDS
from guided.constraint import Constraint
from guided.errors import CompileQueueFull, GuidedError, PoolUnavailable, from_wire
from guided.pools.grammar_cache import GrammarCache, cache_key
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import BackendStatus, Grammar
from guided.vocabulary import Vocabulary


class Grammars:
    """Compiles and caches grammars. Its methods may be called from any thread.

    Args:
        when_unused: called with the keys of grammars that the cache has dropped.
    """

    def __init__(
        self, vocabulary: Vocabulary, options: RayPoolOptions, when_unused: Callable[[Collection[str]], None]
    ) -> None:
        self._max_compiling = options.max_compiling
        self._when_unused = when_unused
        self._lock = threading.Lock()
        self._cache = GrammarCache(options.max_cache_bytes)
        self.compiling = 0
        """Number of constraints that are being compiled, or wait for it."""
        self._crashes: Counter[str] = Counter()
        self._timeouts: Counter[str] = Counter()
        self._closed = False
        self._compiler = Compiler(vocabulary, options.compile_limits)

    def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
        """See `MaskPool.compile`. Returns at once."""
        key = cache_key(constraint, backends)
        with self._lock:
            if self._closed:
                return _failed(PoolUnavailable("the pool is shut down"))
            future, new = self._cache.acquire(key)
            if not new:
                return future
            if self.compiling >= self._max_compiling:
                full = CompileQueueFull(f"{self.compiling} constraints are being compiled or waiting: try again")
                self._cache.fail(key, full)
                return _failed(full)
            future.set_running_or_notify_cancel()  # shared by several requests: cannot be cancelled
            self.compiling += 1
        compiled = self._compiler.submit(constraint, list(backends))
        compiled.add_done_callback(partial(self._finish, key, constraint, future))
        return future

    def _finish(
        self, key: str, constraint: Constraint, future: Future[Grammar], compiled: Future[CompileResult]
    ) -> None:
        """Report a grammar, or an error. Runs on the thread that has compiled it."""
        result = compiled.result()
        if result.error is not None:
            error = from_wire(result.error)
            with self._lock:
                self._count(result)
                self._drop(self._cache.fail(key, error))
            future.set_exception(error)
            return
        grammar = Grammar(
            key,
            result.backend,
            constraint,
            result.seconds,
            checked=tuple(result.checked),
            mask_seconds=result.mask_seconds,
            dumped=result.dumped,
        )
        with self._lock:
            self._count(result)
            self._drop(self._cache.admit(grammar, result.nbytes))
        future.set_result(grammar)

    def _count(self, result: CompileResult) -> None:
        self.compiling -= 1
        self._crashes.update(result.crashed)
        self._timeouts.update(result.timed_out)

    def release(self, grammar: Grammar) -> None:
        """See `MaskPool.release`. Returns at once."""
        with self._lock:
            self._drop(self._cache.release(grammar))

    def backends(self) -> list[BackendStatus]:
        """Return how often each backend has crashed or exceeded a time limit."""
        return [BackendStatus(name, self._crashes[name], self._timeouts[name]) for name in BACKENDS]

    def compile_pids(self) -> list[int]:
        """Return the pids of the compile processes."""
        return self._compiler.pids

    def close(self) -> None:
        """Stop; pending compilations fail with `PoolUnavailable`."""
        with self._lock:
            self._closed = True
        self._compiler.close()

    def _drop(self, keys: Collection[str]) -> None:
        """Report evicted grammars. Within the lock, so that none is reported after it was compiled again."""
        if keys:
            self._when_unused(keys)


def _failed(error: GuidedError) -> Future[Grammar]:
    future: Future[Grammar] = Future()
    future.set_exception(error)
    return future
