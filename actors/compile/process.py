"""Processes that compile: a warm template, forked for each process that is needed. `python -m actors.compile.process`.

Importing the grammar libraries and reading a large vocabulary take up to ten seconds; a fork of a process that has done
it takes hundredths of one. So a compile process that had to be killed is replaced at once, and what one constraint
leaves in memory is gone with it. The template has one thread, computes nothing but a warm-up, and never sees a
constraint of a user's.

The template's socket (`ForkServer` in `actors/compile/child.py` is the other end): the vocabulary as a frame, answered
by an empty one when warm; then commands. A compile process's own socket: jobs in, outcomes out, as frames. What a grammar
library prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

import msgspec

from actors.lean_imports import leave_out_torch
from guided.backends import BACKENDS, Backends
from guided.compilation import compile_with
from guided.constraint import Constraint
from guided.errors import ConstraintTooLarge, Wire, to_wire
from guided.messages import decoder, encode
from guided.vocabulary import Vocabulary

__all__ = [
    "COMMAND",
    "FORK",
    "NOT_YET",
    "REAP",
    "CompileRequest",
    "CompileResult",
    "read_frame",
    "readable",
    "write_frame",
]

COMMAND = struct.Struct("<cq")
"""To the template: what, and of which process. Back: the same shape, with an answer."""
FORK, REAP = b"F", b"R"
"""FORK: a new compile process on the socket that comes with the command; answers its pid, or minus an errno.
REAP: how the process ended, as `os.waitstatus_to_exitcode` says it, or `NOT_YET`. Until then its pid is nobody else's.
"""
NOT_YET = 1 << 32

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""A compilation takes whole seconds of a core: the engine and the masks go first."""
_log = logging.getLogger(__name__)


class CompileRequest(msgspec.Struct, array_like=True, frozen=True):
    """Compile `constraint` by `backend`; refuse the result where it weighs more than `max_bytes`."""

    constraint: Constraint
    backend: str
    max_bytes: int


class CompileResult(msgspec.Struct, array_like=True):
    """What became of it: an error, or the grammar as another process can load it."""

    error: Wire | None = None
    backend: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    """What the grammar weighs in a process that holds it, bytes."""
    dumped: bytes = b""
    crashed: list[str] = []
    """Backends whose process ended by itself while it compiled this."""
    timed_out: list[str] = []


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; at once if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _warm(backends: Backends) -> None:
    """Load every library, and have each compile something: what it makes once and keeps is then made."""
    for name, adapter in BACKENDS.items():
        started = time.perf_counter()
        try:
            backends[name]
            for constraint in _WARM_UP:
                if constraint.kind in adapter.kinds:
                    compile_with(backends, constraint, name).grammar.dump()
        except BaseException:  # it is reported to whoever asks for this backend
            _log.exception("backend %s can't be loaded", name)
        else:
            _log.info("backend %s loaded in %.2f s", name, time.perf_counter() - started)


_WARM_UP = (
    Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
    Constraint.regex(r"\d\w\s"),  # classes of all Unicode: half a second, once a process
    Constraint.grammar('root ::= "a"'),
)


def _compile(backends: Backends, attempt: CompileRequest) -> CompileResult:
    started = time.perf_counter()
    try:
        compiled = compile_with(backends, attempt.constraint, attempt.backend)
        dumped = compiled.grammar.dump()
        nbytes = compiled.grammar.nbytes
        if max(nbytes, len(dumped)) > attempt.max_bytes:
            raise ConstraintTooLarge(
                f"the compiled constraint weighs {max(nbytes, len(dumped)) >> 20} MiB with {attempt.backend}; "
                f"the limit is {attempt.max_bytes >> 20} MiB"
            )
    except Exception as error:
        return CompileResult(to_wire(error), attempt.backend, time.perf_counter() - started)
    return CompileResult(None, attempt.backend, time.perf_counter() - started, nbytes, dumped)


def _serve(backends: Backends, jobs: int, template: int) -> NoReturn:
    """What a compile process does, from its fork to its end."""
    _die_with(template)
    os.nice(_NICENESS)
    decode = decoder(CompileRequest).decode
    try:
        while True:
            write_frame(jobs, encode(_compile(backends, decode(read_frame(jobs)))))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody wants more of it
        os._exit(0)


def _fork(backends: Backends, control: socket.socket, jobs: int) -> int:
    """A compile process on the socket `jobs`: its pid, or minus an errno."""
    me = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        return -(error.errno or 1)
    if pid == 0:
        try:
            control.close()
            _serve(backends, jobs, me)
        except BaseException:
            _log.exception("a compile process failed")
        finally:
            os._exit(1)
    return pid


def _reap(pid: int) -> int:
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return NOT_YET if done == 0 else os.waitstatus_to_exitcode(status)


def _main(control: socket.socket, parent: int) -> None:
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dumping half a gigabyte takes seconds, at every crash
    os.dup2(2, 1)
    leave_out_torch()
    backends = Backends(Vocabulary.from_bytes(read_frame(control.fileno())))
    _warm(backends)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every object there is
    write_frame(control.fileno(), b"")
    while True:
        command, descriptors = _receive(control)
        if not command:
            return
        what, pid = COMMAND.unpack(command)
        if what == FORK:
            (jobs,) = descriptors
            answer = _fork(backends, control, jobs)
            os.close(jobs)
        else:
            answer = _reap(pid)
        control.sendall(COMMAND.pack(what, answer))


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """One command and the descriptors that came with it; empty at the end."""
    data, descriptors, _flags, _address = socket.recv_fds(control, COMMAND.size, 1)
    while data and len(data) < COMMAND.size:
        more = control.recv(COMMAND.size - len(data))
        if not more:
            return b"", descriptors
        data += more
    return data, descriptors


def _start(arguments: list[str]) -> Any:
    fd, parent = map(int, arguments)
    try:
        _main(socket.socket(fileno=fd), parent)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the compile actor is gone
        return 0
    return 0


def write_frame(fd: int, data: bytes) -> None:
    """Write one frame. Raises `BrokenPipeError` where nobody reads any more."""
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view[:_CHUNK]) :]


def read_frame(fd: int, deadline: float | None = None) -> bytes:
    """Read one frame.

    Args:
        deadline: `time.monotonic()` until which to wait; None waits for ever.

    Raises:
        TimeoutError: it didn't come in time.
        EOFError: the other end is closed.
    """
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
    return _read(fd, length, deadline)


def readable(fd: int, timeout: float) -> bool:
    """Whether there is something to read (or the end) within `timeout` seconds."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0.0, timeout * 1000)))


def _read(fd: int, count: int, deadline: float | None) -> bytes:
    chunks: list[bytes] = []
    while count:
        if deadline is not None and not readable(fd, deadline - time.monotonic()):
            raise TimeoutError
        chunk = os.read(fd, min(count, _CHUNK))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


if __name__ == "__main__":
    sys.exit(_start(sys.argv[1:]))
