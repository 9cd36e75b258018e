"""Compile constraints in processes that can be killed. `ForkServer` (child.py) runs `python -m actors.compile.process`.

Importing the grammar libraries and reading a large vocabulary takes up to ten seconds. So one process, the fork server,
does it once, and every compile process is a fork of it, ready within hundredths of a second. A compile process that had
to be killed is replaced at once, and the memory that a constraint left behind is gone with it. The fork server has one
thread and never compiles a user's constraint.

The control socket of the fork server carries one `COMMAND` per packet, and one answer to each. The socket of a compile
process carries frames: `CompileRequest`s in, `CompileResult`s out. What the grammar libraries print goes to stderr.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import NoReturn

import msgspec

from guided.backends import BACKENDS, Backends
from guided.backends.without_torch import leave_out_torch
from guided.compilation import compile_with
from guided.constraint import Constraint
from guided.errors import ConstraintTooLarge, Wire, to_wire
from guided.messages import decoder, encode
from guided.vocabulary import Vocabulary

__all__ = [
    "COMMAND",
    "FORK",
    "READY",
    "REAP",
    "RUNNING",
    "CompileRequest",
    "CompileResult",
    "read_frame",
    "readable",
    "write_frame",
]

COMMAND = struct.Struct("<cq")
"""A command to the fork server, and a pid. The answer has the same shape, with a number in place of the pid."""
READY, FORK, REAP = b"W", b"F", b"R"
"""READY: sent by the fork server once it is warm. FORK: start a compile process on the socket that comes with the
command; the answer is its pid, or a negative errno. REAP: the answer is the process's exit code as
`os.waitstatus_to_exitcode` gives it, or `RUNNING`."""
RUNNING = 1 << 32

_FRAME_LENGTH = struct.Struct("<Q")
_FRAME_CHUNK = 1 << 20
_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""A compilation takes seconds of a core: the engine and the masks have precedence."""
_WARM_UP = (
    Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
    Constraint.regex(r"\d\w\s"),  # Unicode classes: half a second, once in a process
    Constraint.grammar('root ::= "a"'),
)
_log = logging.getLogger(__name__)


class CompileRequest(msgspec.Struct, array_like=True, frozen=True):
    """Compile `constraint` with `backend`; reject the grammar if it is larger than `max_bytes`."""

    constraint: Constraint
    backend: str
    max_bytes: int


class CompileResult(msgspec.Struct, array_like=True):
    """An error, or the serialized grammar."""

    error: Wire | None = None
    backend: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    """Memory of the grammar in a process that has loaded it."""
    dumped: bytes = b""
    crashed: list[str] = []
    """Backends that crashed while they compiled this constraint."""
    timed_out: list[str] = []


def write_frame(fd: int, data: bytes) -> None:
    """Write one length-prefixed frame. Raises `BrokenPipeError` if the other end is closed."""
    view = memoryview(_FRAME_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view[:_FRAME_CHUNK]) :]


def read_frame(fd: int, deadline: float | None = None) -> bytes:
    """Read one frame.

    Args:
        deadline: `time.monotonic()` until which to wait. None: no limit.

    Raises:
        TimeoutError: the frame was not complete at the deadline.
        EOFError: the other end is closed.
    """
    (length,) = _FRAME_LENGTH.unpack(_read(fd, _FRAME_LENGTH.size, deadline))
    return _read(fd, length, deadline)


def readable(fd: int, timeout: float) -> bool:
    """Wait at most `timeout` seconds for data, or the end. Returns whether there is either."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0.0, timeout * 1000)))


def _read(fd: int, count: int, deadline: float | None) -> bytes:
    chunks: list[bytes] = []
    while count:
        if deadline is not None and not readable(fd, deadline - time.monotonic()):
            raise TimeoutError
        chunk = os.read(fd, min(count, _FRAME_CHUNK))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def _die_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends. Exit now if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _warm(backends: Backends) -> None:
    """Load every library and compile with it, so that the forks share what a library computes once and keeps."""
    for name, adapter in BACKENDS.items():
        started = time.perf_counter()
        try:
            backends[name]
            for constraint in _WARM_UP:
                if constraint.kind in adapter.kinds:
                    compile_with(backends, constraint, name).grammar.dump()
        except BaseException:  # requests for this backend get the error
            _log.exception("backend %s cannot be loaded", name)
        else:
            _log.info("backend %s loaded in %.2f s", name, time.perf_counter() - started)


def _compile(backends: Backends, request: CompileRequest) -> CompileResult:
    started = time.perf_counter()
    try:
        grammar = compile_with(backends, request.constraint, request.backend).grammar
        dumped, nbytes = grammar.dump(), grammar.nbytes
        size = max(nbytes, len(dumped))
        if size > request.max_bytes:
            raise ConstraintTooLarge(
                f"the compiled constraint takes {size >> 20} MiB with {request.backend}; "
                f"the limit is {request.max_bytes >> 20} MiB"
            )
    except Exception as error:
        return CompileResult(to_wire(error), request.backend, time.perf_counter() - started)
    return CompileResult(None, request.backend, time.perf_counter() - started, nbytes, dumped)


def _run_compile_process(backends: Backends, jobs: int, fork_server: int) -> NoReturn:
    """Compile one request after the other until the other end of the socket `jobs` is closed."""
    _die_with(fork_server)
    os.nice(_NICENESS)
    decode = decoder(CompileRequest).decode
    try:
        while True:
            write_frame(jobs, encode(_compile(backends, decode(read_frame(jobs)))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _fork(backends: Backends, control: socket.socket, jobs: int) -> int:
    """Start a compile process on the socket `jobs`. Returns its pid, or a negative errno."""
    fork_server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        return -(error.errno or 1)
    if pid == 0:
        try:
            control.close()
            _run_compile_process(backends, jobs, fork_server)
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
    return RUNNING if done == 0 else os.waitstatus_to_exitcode(status)


def _run_fork_server(control: socket.socket, vocabulary: int, parent: int) -> None:
    """Warm up, then answer commands until the other end of `control` is closed."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of half a gigabyte takes seconds
    os.dup2(2, 1)
    leave_out_torch()
    backends = Backends(Vocabulary.from_bytes(Path(f"/proc/self/fd/{vocabulary}").read_bytes()))
    os.close(vocabulary)
    _warm(backends)
    gc.collect()
    gc.freeze()  # in a fork, a collection would touch, and so copy, every object
    control.send(COMMAND.pack(READY, 0))
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not command:
            return
        name, pid = COMMAND.unpack(command)
        answer = _fork(backends, control, *descriptors) if name == FORK else _reap(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(COMMAND.pack(name, answer))


if __name__ == "__main__":
    _control, _vocabulary, _parent = map(int, sys.argv[1:])
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the compile actor is gone
        _run_fork_server(socket.socket(fileno=_control), _vocabulary, _parent)
