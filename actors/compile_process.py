"""Compile processes: the fork server that starts them, one process at work, and the
program that both run.

Importing the grammar libraries and reading a large vocabulary takes up to ten seconds.
So one process, the fork server, does it once (`python -m actors.compile_process`), and
every compile process is a fork of it, ready within hundredths of a second. The fork
server has one thread and never compiles a user's constraint.

The fork server takes sockets over its control socket, and starts a compile process on
each. That one sends its pid, and then a `CompileResult` for each `CompileRequest`, as
packages. Nothing in `ForkServer` and `CompileProcess` relies on the other process to
behave: every wait has a deadline, and ends with a kill.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import msgspec
import psutil
from msgspec.msgpack import Decoder, encode

from actors.packages import (
    CompileResult,
    Package,
    buffer,
    receive,
    receive_package,
    seal,
    send_package,
    socket_pair,
)
from actors.processes import (
    RETRY_SECONDS,
    START_SECONDS,
    TICK_SECONDS,
    enter_session,
    kill,
    resident_bytes,
    start_program,
    thread_state,
)
from guided.backends import BACKENDS, Backends
from guided.backends.without_torch import leave_out_torch
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    CompileTimeout,
    ConstraintTooLarge,
    PoolUnavailable,
    UnsupportedConstraint,
    to_wire,
)
from guided.masks.compilation import compile_with
from guided.masks.resources import give_back_free_memory
from guided.vocabulary import Vocabulary

_WARM_UP = (
    Constraint.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}}}
    ),
    Constraint.regex(r"\d\w\s"),  # Unicode classes take half a second, once per process
    Constraint.grammar('start: "a"'),
    Constraint.grammar('root ::= "a"'),
    Constraint.structural_tag(
        {"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}
    ),
)
_FORK_SECONDS = 5.0
"""Time limit for a try to fork. It takes hundredths of a second on a quiet machine."""
_LEFT_BYTES = 64 << 20
"""A process that has grown by more than this is replaced after its constraint."""
_decode_result = Decoder(CompileResult).decode
_log = logging.getLogger(__name__)


class CompileRequest(msgspec.Struct, array_like=True, frozen=True):
    """Compile `constraint` with `backend`; reject the grammar if it is larger than
    `max_bytes`."""

    constraint: Constraint
    backend: str
    max_bytes: int


# the engine's side


def closed() -> PoolUnavailable:
    """Return the error of what comes too late."""
    return PoolUnavailable("the pool is shut down")


class ForkServer:
    """A process that compile processes are forks of, once it is warm.

    It dies with the thread that started it, and its forks die with it.
    """

    def __init__(self, vocabulary: int) -> None:
        self._control, theirs = socket.socketpair()
        self.is_warm = False
        self._deadline = time.monotonic() + START_SECONDS
        # a fork has one thread only
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        descriptors = (theirs.fileno(), vocabulary)
        program = "actors.compile_process"
        with theirs:
            try:
                self._process = start_program(
                    program, descriptors, str(os.getpid()), environment=one_thread
                )
            except OSError:
                self._control.close()
                raise

    def look(self) -> bool:
        """Note whether it is warm. Returns False if it has ended, or takes too long to
        get warm."""
        if not self.is_warm and wait([self._control], 0):
            self.is_warm = bool(self._control.recv(1))
        return self._process.poll() is None and (
            self.is_warm or time.monotonic() < self._deadline
        )

    def fork(self) -> CompileProcess:
        """Start a compile process. Raises OSError if that is not possible now."""
        jobs, theirs = socket_pair()
        jobs.settimeout(5)
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            if not wait([jobs], _FORK_SECONDS):
                # if not, it is slow
                if thread_state(self._process.pid, self._process.pid) in (
                    "T",
                    "t",
                    "D",
                ):
                    self._process.kill()
                raise OSError(
                    "the fork server of the compile processes does not answer"
                )
            return CompileProcess(jobs)
        except (EOFError, OSError, psutil.NoSuchProcess) as error:
            jobs.close()
            raise OSError(str(error) or "the compile process ended") from None

    def close(self) -> None:
        """End it, and with it all its forks."""
        self._process.kill()
        self._process.wait()
        self._control.close()


class CompileProcess:
    """One compile process. Used by one thread at a time."""

    def __init__(self, jobs: socket.socket) -> None:
        self._jobs = jobs
        self._process = psutil.Process(int(receive(jobs)[:]))
        self._fresh = resident_bytes(self._process)
        if not self._fresh:
            raise OSError("the memory of a compile process cannot be read")
        self.is_usable = True
        """Whether it may get another request."""

    @property
    def alive(self) -> bool:
        """Whether the process waits for a request. Only meaningful between two
        requests."""
        return not wait([self._jobs], 0)

    @property
    def growth(self) -> int:
        """Growth of its resident memory since its fork, in bytes."""
        return resident_bytes(self._process) - self._fresh

    def compile(
        self, request: CompileRequest, seconds: float, memory_bytes: int
    ) -> tuple[CompileResult, Package]:
        """Have the process compile a constraint. Returns the result, also as it was
        sent.

        If this raises, the process has to be ended.

        Args:
            memory_bytes: limit of `growth`.

        Raises:
            CompileTimeout, ConstraintTooLarge: a limit was exceeded.
            BackendError: the process ended: it crashed, or was killed from outside.
        """
        deadline = time.monotonic() + seconds
        self.is_usable = False
        text = f"compiling this constraint with {request.backend} took more than"
        try:
            send_package(self._jobs, encode(request))
            # then its memory is read
            while not wait([self._jobs], min(0.01, deadline - time.monotonic())):
                if self.growth > memory_bytes:
                    limit = f"{memory_bytes >> 20} MiB of memory"
                    raise ConstraintTooLarge(
                        f"{text} {limit}; try a smaller one, or another backend"
                    )
                if time.monotonic() >= deadline:
                    raise CompileTimeout(
                        f"{text} {seconds:.2g} s; try a simpler one, or another backend"
                    )
            package = receive_package(self._jobs)
            result = _decode_result(buffer(package))
        except (EOFError, OSError):
            raise BackendError("compiling this constraint ended its process") from None
        self.is_usable = self.growth <= _LEFT_BYTES
        return result, package

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        self._jobs.close()
        kill(self._process)


class CompileProcesses:
    """Compile processes, the fork server that they come from, and a warm one that
    replaces it when it is lost.

    Args:
        closing: once it is set, no process is waited for.
    """

    def __init__(self, vocabulary: bytes, closing: threading.Event) -> None:
        self._vocabulary = seal(vocabulary)
        self._closing = closing
        self._servers: list[ForkServer] = []
        self._idle: list[CompileProcess] = []
        """The one that was used last is used next: under a light load there is one
        process."""
        self.ends = 0
        """Number of fork servers that were lost."""
        self._patience = time.monotonic() + START_SECONDS
        """`time.monotonic()` until which the first fork server may take to get warm."""
        self._next_start = 0.0
        """`time.monotonic()` before which none is started: one that ends at once is not
        replaced at once."""

    def keep(self, is_quiet: bool) -> None:
        """Replace the fork servers that are lost. Call it every `TICK_SECONDS`, from a
        thread that lives until `close`.

        Raises OSError if none can be started now.

        Args:
            is_quiet: nothing is compiled now. Only then a second one is started, which
                takes seconds of a core.
        """
        for server in list(self._servers):
            if not server.look():
                self._servers.remove(server)
                server.close()
                self.ends += 1
                _log.error(
                    "a fork server of the compile processes was lost: it is replaced"
                )
        warm = sum(server.is_warm for server in self._servers)
        if warm:
            self._patience = 0.0
        now = time.monotonic()
        if len(self._servers) == warm < 1 + is_quiet and now >= self._next_start:
            self._next_start = now + RETRY_SECONDS
            self._servers.append(ForkServer(self._vocabulary.fd))

    @property
    def are_starting(self) -> bool:
        """Whether the first fork server is still expected to get warm."""
        return time.monotonic() < self._patience

    def take(self, deadline: float) -> CompileProcess:
        """Return an idle process, or a new one once that is possible.

        Raises:
            PoolUnavailable: the compiler is being closed.
            TimeoutError: there is none at `deadline`, a `time.monotonic()`, and none is
                expected soon.
        """
        pause = 0.0
        while not self._closing.wait(pause):
            with contextlib.suppress(IndexError):
                while True:
                    process = self._idle.pop()
                    if process.alive:
                        return process
                    process.kill()
            pause = TICK_SECONDS
            for server in [server for server in self._servers if server.is_warm]:
                try:
                    return server.fork()
                except OSError as error:
                    pause = RETRY_SECONDS
                    _log.error(
                        "cannot start a compile process, will try again: %s", error
                    )
            if time.monotonic() >= deadline and not self.are_starting:
                raise TimeoutError
        raise closed()

    def release(self, process: CompileProcess) -> None:
        """Take back a process, or end it if it cannot be used again."""
        if process.is_usable and not self._closing.is_set():
            self._idle.append(process)
        else:
            process.kill()

    def close(self) -> None:
        """End all."""
        for process in self._idle:
            process.kill()
        for server in self._servers:
            server.close()


# the program


def _die_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends. Exit now if it has
    ended already."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def _warm(backends: Backends) -> None:
    """Load every library and compile with it, so that the forks share what a library
    computes once and keeps."""
    for name, adapter in BACKENDS.items():
        try:
            backends[name]
            for constraint in _WARM_UP:
                if constraint.kind in adapter.kinds:
                    # no backend has both formats of grammars
                    with contextlib.suppress(UnsupportedConstraint):
                        compile_with(backends, constraint, name).grammar.dump()
        except BaseException:  # requests for this backend get the error
            _log.exception("backend %s cannot be loaded", name)


def _compile(backends: Backends, request: CompileRequest) -> CompileResult:
    name = request.backend
    constraint = request.constraint
    try:
        compiled = compile_with(backends, constraint, name)
        dumped = compiled.grammar.dump()
        checked = tuple(compiled.grammar.checked)
        size = max(compiled.nbytes, len(dumped))
        if size > request.max_bytes:
            raise ConstraintTooLarge(
                f"the compiled constraint takes {size >> 20} MiB with {name}; "
                f"the limit is {request.max_bytes >> 20} MiB"
            )
    except Exception as error:
        return CompileResult(name, constraint, to_wire(error))
    return CompileResult(name, constraint, None, size, checked, memoryview(dumped))


def _run_compile_process(backends: Backends, jobs: int, fork_server: int) -> None:
    """Compile one request after the other until the other end of the socket `jobs` is
    closed."""
    _die_with(fork_server)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # a compilation takes seconds of a core: the engine and the masks have precedence
    os.nice(10)
    enter_session()
    stream = socket.socket(fileno=jobs)
    decode = Decoder(CompileRequest).decode
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        stream.send(str(os.getpid()).encode())
        while True:
            request = decode(receive(stream))
            send_package(stream, encode(_compile(backends, request)))
            gc.collect()
            give_back_free_memory()


def _run_fork_server(control: socket.socket, vocabulary: int, parent: int) -> None:
    """Warm up, then start a compile process on each socket that comes, until the other
    end of `control` is closed."""
    _die_with(parent)
    enter_session()  # loading the libraries takes seconds of a core too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # compile processes that end leave nothing behind
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # a core dump of half a gigabyte takes seconds
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    leave_out_torch()
    backends = Backends(
        Vocabulary.from_bytes(Path(f"/proc/self/fd/{vocabulary}").read_bytes())
    )
    os.close(vocabulary)
    _warm(backends)
    gc.collect()
    gc.freeze()  # in a fork, a collection would touch, and so copy, every object
    fork_server = os.getpid()
    control.send(b"w")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        (jobs,) = descriptors
        pid = -1
        try:
            pid = os.fork()
        except OSError as error:
            # the other end sees the end of `jobs`, and tries again
            _log.error("cannot start a compile process: %s", error)
        if pid == 0:
            try:
                control.close()
                _run_compile_process(backends, jobs, fork_server)
            except BaseException:
                _log.exception("a compile process failed")
            finally:
                os._exit(0)
        os.close(jobs)


if __name__ == "__main__":
    _control, _vocabulary, _parent = map(int, sys.argv[1:])
    # the engine is gone
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _run_fork_server(socket.socket(fileno=_control), _vocabulary, _parent)
