"""Driver: the engine's side of the process that is connected to Ray.

Ray (2.60) may end its driver without a message when the raylet is lost: when the raylet, one of its agents or the head
of the cluster ends. So the driver is a process of its own, and the engine's process never loads Ray.

The engine sends (number, name, arguments): a request of `process.Requests`. The driver sends (number, result, error).
Both are pickled, over a socket pair that only these two processes have.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from actors.driver.scheduling import Scheduling
from actors.processes import remove_later
from actors.steps.protocol import SegmentName
from guided.errors import PoolUnavailable

_START_SECONDS = 120.0
_SAY_SECONDS = 15.0
"""After this time the log says what is waited for."""
_STDERR = 2
_log = logging.getLogger(__name__)
_ENDED = "the process that was connected to Ray ended"


class ActorDied(Exception):
    """The actor died before it had answered, or with the driver. Raised by the future of a call."""


class ActorFailed(Exception):
    """The actor, or Ray, raised an exception. Raised by the future of a call."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """Where the driver has connected to Ray."""

    node_id: str
    """Ray's id of this machine's node."""
    head: str
    """Address of Ray's head."""


class Driver:
    """A process that is connected to Ray. When it ends, its actors end. It is never restarted.

    Args:
        options: arguments of `ray.init`.
        environment: variables for it and for a Ray that it starts, added to those of this process; None removes one.
        directory: of a local Ray. It is removed when the driver ends. None: the driver joins a cluster.
        is_small: start a local Ray with as few processes as possible.
    """

    def __init__(
        self,
        options: dict[str, Any],
        environment: Mapping[str, str | None],
        directory: str | None = None,
        is_small: bool = False,
    ) -> None:
        ours, theirs = socket.socketpair()
        path = [os.environ.get("PYTHONPATH"), *sys.path]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **environment}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actors.driver.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,  # an interrupt from the terminal is for the engine's process
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._directory = directory
        # Ray adds the directory of this program to the path of its workers.
        self._connect = options, is_small, directory, sys.argv[0]
        self._reader = threading.Thread(target=self._receive, name="ray-driver", daemon=True)
        self._lock = threading.Lock()
        """For sending."""
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {}
        self._dropped: deque[int] = deque()
        """Actors that lost their last reference here. The driver is told before the next request."""
        self.ended = threading.Event()
        """Set when the process has ended: calls fail."""

    def connect(self) -> RayNode:
        """Wait until the driver has connected to Ray.

        Raises:
            PoolUnavailable: it cannot; says why.
        """
        try:
            self._connection.send(self._connect)
            if not self._connection.poll(_SAY_SECONDS):
                text = "waiting for Ray's GCS server and this node's raylet for %g s already, and for %g s at most"
                _log.warning(text, _SAY_SECONDS, _START_SECONDS)
                if not self._connection.poll(_START_SECONDS - _SAY_SECONDS):
                    text = f"Ray's GCS server and this node's raylet did not answer within {_START_SECONDS:g} s"
                    raise PoolUnavailable(text)
            _, node, error = self._connection.recv()
        except (EOFError, OSError):
            raise PoolUnavailable("the process that connects to Ray ended") from None
        if error is not None:
            raise PoolUnavailable(str(error))
        self._reader.start()
        assert isinstance(node, RayNode)
        return node

    def create(self, actor_class: str, *arguments: Any, scheduling: Scheduling | None = None) -> Future[RemoteActor]:
        """Start an actor.

        Args:
            actor_class: `module:class`. Its `RAY_OPTIONS` are the arguments of `ray.remote`.
            scheduling: where it runs. None: on this process's node, without reserved CPUs.
        """
        number = next(self._numbers)
        created: Future[RemoteActor] = Future()

        def finish(accepted: Future[Any]) -> None:
            error = accepted.exception()
            if error is None:
                actor = RemoteActor(self, number)
                # A deque, because the garbage collector may run on any thread, which may be sending.
                weakref.finalize(actor, self._dropped.append, number).atexit = False
                created.set_result(actor)
            else:
                created.set_exception(error)

        accepted = self.ask("create", number, actor_class, scheduling or Scheduling(), arguments)
        accepted.add_done_callback(finish)
        return created

    def close(self, timeout: float) -> bool:
        """Disconnect from Ray, which ends the actors, and Ray itself if the driver has started it.

        Returns:
            Whether it ended by itself within `timeout` seconds. If not, it was killed.
        """
        self.ask("close")
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._end()
        return True

    def kill(self) -> None:
        """End the process now, and fail all calls. From any thread, also while another one waits in `connect`."""
        self._process.kill()
        self._process.wait()
        self._end()
        if self._directory is not None and os.path.exists(self._directory):
            remove_later(self._directory)

    def _end(self) -> None:
        """Wait until the calls have failed."""
        if self._reader.ident is not None:
            self._reader.join()

    def ask(self, name: str, *arguments: Any) -> Future[Any]:
        """Send a request. Returns the future of its result."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        with self._lock:
            if not self.ended.is_set():
                self._futures[number] = future
                with contextlib.suppress(OSError):  # the driver has ended: `_receive` fails the futures
                    while self._dropped:
                        self._connection.send((0, "end", (self._dropped.popleft(),)))
                    self._connection.send((number, name, arguments))
                return future
        future.set_exception(ActorDied(_ENDED))
        return future

    def _receive(self) -> None:
        try:
            while True:
                number, result, error = self._connection.recv()
                future = self._futures.pop(number, None)
                if future is not None and error is None:
                    future.set_result(result)
                elif future is not None:
                    future.set_exception(error)
        except (EOFError, OSError):
            pass
        with self._lock:
            self.ended.set()
        for future in list(self._futures.values()):
            future.set_exception(ActorDied(_ENDED))
        self._connection.close()


class RemoteActor:
    """An actor of a driver. Its calls fail with `ActorDied` when it dies, or the driver ends. It is ended with the last
    reference here."""

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver = driver
        self._number = number

    @property
    def is_lost(self) -> bool:
        """The driver has ended: the actor has ended with it, or is about to."""
        return self._driver.ended.is_set()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method. Calls are made in order."""
        return self._driver.ask("call", self._number, method, arguments)

    def forward(self, path: str, segment: SegmentName) -> Future[None]:
        """Connect the actor, which is on another node, to a step channel and a slot table of this process."""
        return self._driver.ask("forward", self._number, path, segment)

    def end(self) -> None:
        """Have Ray end the actor. Does not wait."""
        self._driver.ask("end", self._number)
