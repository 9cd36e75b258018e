"""A process with loaded grammar libraries, for calls that may have to be killed. It
needs no Ray."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from guided.backends import Backends
from guided.errors import BackendError, CompileTimeout
from guided.vocabulary import Vocabulary


class BackendProcess:
    """Calls functions in another process, with the backends `names` loaded. A process
    that was killed is replaced."""

    def __init__(self, vocabulary: Vocabulary, names: Sequence[str] = ()) -> None:
        self._arguments = vocabulary.to_bytes(), names
        self._started: tuple[Any, Connection] | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `function(backends, *arguments)` returns. It calls
        `set_time_limit`.

        Raises:
            CompileTimeout: it took longer than its time limit.
            BackendError: the process crashed.
        """
        process, pipe = self._started = self._started or self._start()
        try:
            pipe.send((function, arguments))
            return pipe.recv()
        except (EOFError, OSError):
            process.join()
            self._started = None
            if process.exitcode == -signal.SIGALRM:
                raise CompileTimeout("it takes longer than the time limit") from None
            raise BackendError(
                f"the process crashed (exit code {process.exitcode})"
            ) from None

    def stop(self) -> None:
        """Kill the process. The next call starts another one."""
        if self._started is not None:
            process, pipe = self._started
            process.kill()
            process.join()
            pipe.close()
            self._started = None

    def _start(self) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, *self._arguments), daemon=True
        )
        process.start()
        theirs.close()
        return process, pipe


def set_time_limit(seconds: float) -> None:
    """Have this process killed after `seconds` from now, native code included. 0: no
    limit."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _serve(pipe: Connection, packed: bytes, names: Sequence[str]) -> None:
    backends = Backends(Vocabulary.from_bytes(packed))
    for name in names:
        backends[name]
    while True:
        function, arguments = pipe.recv()
        result = function(backends, *arguments)
        set_time_limit(0)
        pipe.send(result)
