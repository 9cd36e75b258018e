"""Driver: the engine's side of the process that is connected to Ray.

Ray (2.60) ends its driver without a message as soon as the raylet is lost: when the raylet, one of its agents or the
head of the cluster ends. So the driver is a process of its own, and the engine's process never loads Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from actors.driver.messages import Alive, Call, Close, Connect, Connected, Create, Drop, Put, Reference, Reply, Request
from actors.driver.scheduling import Scheduling
from guided.errors import PoolUnavailable

_START_SECONDS = 120.0
_MAX_SILENT_PROBES = 30
"""Maximum number of probes, one per second, without a message. The driver sends one every second."""
_STDERR = 2
_Found = TypeVar("_Found")
_ENDED = "the process that was connected to Ray ended"


class ActorDied(Exception):
    """The actor died before it had answered, or with the driver. Raised by the future of a call."""


class ActorFailed(Exception):
    """The actor, or Ray, raised an exception. Raised by the future of a call."""


class ObjectLost(ActorFailed):
    """An argument is lost, with the node that it was stored on. Raised by the future of a call."""


class Driver:
    """A process that is connected to Ray. When it ends, its actors end. It is never restarted.

    Args:
        options: arguments of `ray.init`.
        environment: variables for it and for a Ray that it starts, added to those of this process; None removes one.
    """

    def __init__(self, options: dict[str, Any], environment: Mapping[str, str | None]) -> None:
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
        self._options = options
        self._reader = threading.Thread(target=self._receive, name="ray-driver", daemon=True)
        self._lock = threading.Lock()
        """For sending, and for `has_ended`."""
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {}
        self._stored: weakref.WeakKeyDictionary[Any, RemoteObject] = weakref.WeakKeyDictionary()
        self._dropped: deque[int] = deque()
        """Objects and actors that lost their last reference here. The driver is told before the next request."""
        self.has_ended = False
        """The process has ended: calls fail."""
        self._silent_probes = 0
        """Calls of `is_silent` since the driver's latest message."""

    def connect(self) -> Connected:
        """Wait until the driver has connected to Ray.

        Raises:
            PoolUnavailable: it cannot; says why.
        """
        try:
            self._connection.send(Connect(self._options, sys.argv[0]))
            if not self._connection.poll(_START_SECONDS):
                raise PoolUnavailable(f"Ray did not start within {_START_SECONDS:g} s")
            answer: Connected | Reply = self._connection.recv()
        except (EOFError, OSError):
            raise PoolUnavailable("the process that connects to Ray ended") from None
        if isinstance(answer, Reply):
            raise PoolUnavailable(str(answer.error))
        self._reader.start()
        return answer

    def is_silent(self) -> bool:
        """Return whether the driver has been silent for too long: it is stopped, or stuck. Call it once per second.

        It counts calls instead of seconds, because this process may have been stopped itself.
        """
        self._silent_probes += 1
        return self._silent_probes > _MAX_SILENT_PROBES

    def create(self, actor_class: str, *arguments: Any, scheduling: Scheduling | None = None) -> Future[RemoteActor]:
        """Start an actor.

        Args:
            actor_class: `module:class`.
            scheduling: where it runs. None: on this process's node, without reserved CPUs.
        """
        number = next(self._numbers)
        created: Future[RemoteActor] = Future()

        def finish(accepted: Future[Any]) -> None:
            error = accepted.exception()
            if error is None:
                created.set_result(self._with_finalizer(RemoteActor(self, number), number))
            else:
                created.set_exception(error)

        self._ask(Create(number, actor_class, scheduling or Scheduling(), _on_the_wire(arguments))).add_done_callback(
            finish
        )
        return created

    def call(self, actor: int, method: str, arguments: tuple[Any, ...], kept: int | None = None) -> Future[Any]:
        """Call a method of an actor; see `RemoteActor`."""
        return self._ask(Call(next(self._numbers), actor, method, _on_the_wire(arguments), kept))

    def stored(self, value: Any) -> RemoteObject:
        """Return an object in Ray that is equal to `value`. It stays there as long as `value` is alive here."""
        with self._lock:
            found = self._stored.get(value)
            if found is not None:
                return found
            stored = self._stored[value] = self.new_object()
            self._send(Put(stored.number, value))
            return stored

    def tell(self, request: Drop | Close) -> None:
        """Send a request that has no reply."""
        with self._lock:
            self._send(request)

    def close(self, timeout: float) -> bool:
        """Disconnect from Ray, which ends the actors, and Ray itself if the driver has started it.

        Returns:
            Whether it ended by itself within `timeout` seconds. If not, it was killed.
        """
        self.tell(Close())
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._end()
        return True

    def kill(self) -> None:
        """End the process now, and fail all calls."""
        self._process.kill()
        self._process.wait()
        self._end()

    def interrupt(self) -> None:
        """End the process now, for example while another thread waits in `connect`. From any thread."""
        self._process.kill()

    def _end(self) -> None:
        """Wait until the calls have failed."""
        if self._reader.ident is not None:
            self._reader.join()
        else:
            self._connection.close()

    def new_object(self) -> RemoteObject:
        """Return a new object, to be stored by the driver under its number."""
        number = next(self._numbers)
        return self._with_finalizer(RemoteObject(number), number)

    def _with_finalizer(self, found: _Found, number: int) -> _Found:
        """Have the driver drop `found` once nothing references it here."""
        # A deque, because the garbage collector may run on any thread, which may be sending.
        weakref.finalize(found, self._dropped.append, number).atexit = False
        return found

    def _ask(self, request: Create | Call) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if not self.has_ended:
                self._futures[request.number] = future
                self._send(request)
                return future
        future.set_exception(ActorDied(_ENDED))
        return future

    def _send(self, request: Request) -> None:
        with contextlib.suppress(OSError):  # the driver has ended: `_receive` fails the futures
            while self._dropped:
                self._connection.send(Drop(self._dropped.popleft()))
            self._connection.send(request)

    def _receive(self) -> None:
        try:
            while True:
                message: Reply | Alive = self._connection.recv()
                self._silent_probes = 0
                if isinstance(message, Reply):
                    self._finish(message)
        except (EOFError, OSError):
            pass
        with self._lock:
            self.has_ended = True
        for future in list(self._futures.values()):
            future.set_exception(ActorDied(_ENDED))
        self._connection.close()

    def _finish(self, reply: Reply) -> None:
        future = self._futures.pop(reply.number)
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(reply.error)


class RemoteObject:
    """An object in Ray: an argument for actors of the same driver. It is dropped there with the last reference here."""

    def __init__(self, number: int) -> None:
        self.number = number


class RemoteActor:
    """An actor of a driver. Its calls fail with `ActorDied` when it dies, or the driver ends. It is ended with the last
    reference here."""

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver = driver
        self._number = number

    @property
    def is_lost(self) -> bool:
        """The driver has ended: the actor has ended with it, or is about to."""
        return self._driver.has_ended

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method. Calls are made in order."""
        return self._driver.call(self._number, method, arguments)

    def call_and_keep(self, method: str, *arguments: Any) -> tuple[Future[Any], RemoteObject]:
        """Call a method that returns two values. The second one stays in Ray."""
        kept = self._driver.new_object()
        return self._driver.call(self._number, method, arguments, kept.number), kept

    def end(self) -> None:
        """Have Ray end the actor. Does not wait."""
        self._driver.tell(Drop(self._number))


def _on_the_wire(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(Reference(each.number) if isinstance(each, RemoteObject) else each for each in arguments)
