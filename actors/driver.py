"""Driver: the engine's side of the process that is connected to Ray.

Ray (2.60) may end its driver without a message when the raylet is lost: when the raylet, one of its agents or the head
of the cluster ends. So the driver is a process of its own, and the engine's process never loads Ray.

Each actor has a connection of its own to the driver's process, a `Session`. The engine sends the name of a method of
`driver_process.Session` and its arguments, and the driver sends the result, or the error. Both are pickled, over a
socket pair that only these two processes have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from actors.processes import CALL_SECONDS, START_SECONDS, STOP_SECONDS, TICK_SECONDS
from guided.errors import PoolUnavailable

_STDERR = 2
# The processes of a Ray that lost its driver still write into the directory for a moment.
_CLEAN_UP = """
exec 3<&0
(read -r _ <&3
 for pause in 0 1 3 5; do sleep "$pause"; [ -e "$1" ] || exit; rm -rf -- "$1"; done) &
"""
_ENDED = "the process that was connected to Ray ended"
_log = logging.getLogger(__name__)


class Driver:
    """A process that is connected to Ray. When it ends, its actors end. It is never restarted.

    Args:
        options: arguments of `ray.init`.
        environment: variables for it and for a Ray that it starts, added to those of this process; None removes one.
        directory: of a local Ray, which is started. It is removed when the driver ends. None: join a cluster.
    """

    def __init__(
        self, options: dict[str, Any], environment: Mapping[str, str | None], directory: str | None = None
    ) -> None:
        self._control, theirs = socket.socketpair()
        path = [os.environ.get("PYTHONPATH"), *sys.path]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **environment}
        alive, held = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actors.driver_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), held],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,  # an interrupt from the terminal is for the engine's process
            )
        os.close(held)
        if directory is not None:
            _remove_at_the_end(directory, alive)
        os.close(alive)
        self._directory = directory
        # Ray adds the directory of this program to the path of its workers.
        self._connect = options, directory is not None, sys.argv[0]
        self._head: str | None = None

    @property
    def head(self) -> str | None:
        """The address of Ray's head. None: it is not connected yet, or has ended."""
        return self._head if self._process.poll() is None else None

    def connect(self) -> None:
        """Wait until the driver has connected to Ray.

        Raises:
            PoolUnavailable: it cannot; says why.
        """
        connection = self._connection()
        try:
            connection.send(self._connect)
            if not connection.poll(CALL_SECONDS):
                text = "waiting for Ray's GCS server and this node's raylet for %g s already, and for %g s at most"
                _log.warning(text, CALL_SECONDS, START_SECONDS)
                if not connection.poll(START_SECONDS - CALL_SECONDS):
                    text = f"Ray's GCS server and this node's raylet did not answer within {START_SECONDS:g} s"
                    raise PoolUnavailable(text)
            self._head, error = connection.recv()
        except (EOFError, OSError):
            raise PoolUnavailable(_ENDED) from None
        if error is not None:
            raise error

    def session(self, stopping: threading.Event) -> Session:
        """Return a new connection to the driver. Does not wait.

        Args:
            stopping: once it is set, no answer is waited for.

        Raises:
            PoolUnavailable: the driver has ended.
        """
        return Session(self._connection(), stopping)

    def _connection(self) -> Connection[Any, Any]:
        ours, theirs = Pipe()
        with theirs:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise PoolUnavailable(_ENDED) from None
        return ours

    def close(self) -> None:
        """End the process, which ends the actors, and Ray itself if the driver has started it.

        From any thread, also while another one waits in `connect`. Idempotent.
        """
        if self.head is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _log.error("Ray did not end by itself: its processes are killed")
        self._process.kill()
        self._process.wait()
        self._control.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class Session:
    """A connection to the driver, and the actor that was created through it, if any. Used by one thread.

    Args:
        stopping: see `Driver.session`.
    """

    def __init__(self, connection: Connection[Any, Any], stopping: threading.Event) -> None:
        self._connection = connection
        self._stopping = stopping

    def ask(self, action: str, name: str, *arguments: Any) -> Any:
        """Call a method of `driver_process.Session`. Returns its result.

        Args:
            action: what Ray is to do, for the message of an error.

        Raises:
            PoolUnavailable: there is no answer in time, the driver or the actor has ended, or the method raised.
        """
        deadline = time.monotonic() + START_SECONDS
        try:
            self._connection.send((name, arguments))
            while not self._connection.poll(TICK_SECONDS):
                if self._stopping.is_set():
                    raise PoolUnavailable("the pool was shut down")
                if time.monotonic() > deadline:
                    raise PoolUnavailable(f"Ray did not {action} within {START_SECONDS:g} s")
            result, error = self._connection.recv()
        except (EOFError, OSError):
            raise PoolUnavailable(_ENDED) from None
        if error is not None:
            raise error
        return result

    def fileno(self) -> int:
        """Return the descriptor to poll: `POLLHUP` once the driver has ended."""
        return self._connection.fileno()

    def close(self) -> None:
        """Have Ray end the actor, at once or as soon as it is created. Does not wait."""
        self._connection.close()


def _remove_at_the_end(directory: str, alive: int) -> None:
    """Start a process that removes a directory when the pipe `alive` closes: when the driver ends, however it does."""
    subprocess.run(
        ["/bin/sh", "-c", _CLEAN_UP, "guided-cleanup", directory],
        stdin=alive,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        check=False,
    )
