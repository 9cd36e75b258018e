"""Driver: the engine's side of the process that is connected to Ray.

Ray (2.60) may end its driver without a message when the raylet is lost: when the raylet, one of its agents or the head
of the cluster ends. So the driver is a process of its own, and the engine's process never loads Ray.

The engine sends (number, name, arguments): a method of `driver_process.Requests`. The driver sends (number, result,
error). Both are pickled, over a socket pair that only these two processes have.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from actors.processes import CALL_SECONDS, START_SECONDS, STOP_SECONDS
from actors.protocol import SegmentName
from guided.errors import PoolUnavailable

_STDERR = 2
# The processes of a Ray that lost its driver still write into the directory for a moment.
_CLEAN_UP = """
exec 3<&0
(read -r _ <&3
 for pause in 0 1 3 5; do sleep "$pause"; [ -e "$1" ] || exit; rm -rf -- "$1"; done) &
"""
_actor_numbers = itertools.count()
_log = logging.getLogger(__name__)
_ENDED = "the process that was connected to Ray ended"


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
        ours, theirs = socket.socketpair()
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
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._directory = directory
        # Ray adds the directory of this program to the path of its workers.
        self._connect = options, directory is not None, sys.argv[0]
        self._reader = threading.Thread(target=self._receive, name="ray-driver", daemon=True)
        self._lock = threading.Lock()
        """For sending."""
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {}
        self.head: str | None = None
        """The address of Ray's head. None: it is not connected yet, or has ended. Calls fail."""

    def connect(self) -> None:
        """Wait until the driver has connected to Ray.

        Raises:
            PoolUnavailable: it cannot; says why.
        """
        try:
            self._connection.send(self._connect)
            if not self._connection.poll(CALL_SECONDS):
                text = "waiting for Ray's GCS server and this node's raylet for %g s already, and for %g s at most"
                _log.warning(text, CALL_SECONDS, START_SECONDS)
                if not self._connection.poll(START_SECONDS - CALL_SECONDS):
                    text = f"Ray's GCS server and this node's raylet did not answer within {START_SECONDS:g} s"
                    raise PoolUnavailable(text)
            _, self.head, error = self._connection.recv()
        except (EOFError, OSError):
            raise PoolUnavailable(_ENDED) from None
        if error is not None:
            raise error
        self._reader.start()

    def close(self) -> None:
        """End the process, which ends the actors, and Ray itself if the driver has started it. Calls fail.

        From any thread, also while another one waits in `connect`. Idempotent.
        """
        if self.head is not None:
            self.ask("close")
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _log.error("Ray did not end by itself: its processes are killed")
        self._process.kill()
        self._process.wait()
        if self._reader.ident is not None:
            self._reader.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def ask(self, name: str, *arguments: Any) -> Future[Any]:
        """Send a request. Returns the future of its result."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        with self._lock:
            if self.head is not None:
                self._futures[number] = future
                with contextlib.suppress(OSError):  # the driver has ended: `_receive` fails the futures
                    self._connection.send((number, name, arguments))
                return future
        future.set_exception(PoolUnavailable(_ENDED))
        return future

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, result, error = self._connection.recv()
                future = self._futures.pop(number)
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
        with self._lock:
            self.head = None
        for future in self._futures.values():
            future.set_exception(PoolUnavailable(_ENDED))
        self._connection.close()


class RemoteActor:
    """A `MaskActor` of a driver. Its calls fail with `PoolUnavailable` when it dies, or the driver ends.

    Args:
        arguments: of `driver_process.Requests.create`, after the number.
    """

    def __init__(self, driver: Driver, *arguments: Any) -> None:
        self._driver = driver
        self._number = next(_actor_numbers)
        self.location: Future[Any] = driver.ask("create", self._number, *arguments)
        """`MaskActor.location`, once it is up. It can be called from then on."""

    @property
    def is_lost(self) -> bool:
        """The driver has ended: the actor has ended with it, or is about to."""
        return self._driver.head is None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method. Calls are made in order."""
        return self._driver.ask("call", self._number, method, arguments)

    def forward(self, path: str, segment: SegmentName) -> Future[None]:
        """Connect the actor, which is on another node, to a step channel and a slot table of this process."""
        return self._driver.ask("forward", self._number, path, segment)

    def end(self) -> None:
        """Have Ray end the actor, at once or as soon as it is created. Does not wait."""
        self._driver.ask("end", self._number)


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
