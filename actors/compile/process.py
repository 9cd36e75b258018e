"""Compile constraints in processes that can be killed. `ForkServer` (child.py) runs `python -m actors.compile.process`.

Importing the grammar libraries and reading a large vocabulary takes up to ten seconds. So one process, the fork server,
does it once, and every compile process is a fork of it, ready within hundredths of a second. A compile process that had
to be killed is replaced at once, and the memory that a constraint left behind is gone with it. The fork server has one
thread and never compiles a user's constraint.

The control socket of the fork server carries sockets in, and a `NUMBER` for each out: it starts a compile process on
the socket. That socket carries `CompileRequest`s in and `CompileResult`s out. What the grammar libraries print goes to
stderr.
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
import struct
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.msgpack import Decoder, encode

from actors.processes import enter_session
from guided.backends import BACKENDS, Backends
from guided.backends.without_torch import leave_out_torch
from guided.compilation import compile_with
from guided.constraint import Constraint
from guided.errors import ConstraintTooLarge, UnsupportedConstraint, Wire, to_wire
from guided.process_memory import give_back_free_memory
from guided.vocabulary import Vocabulary

NUMBER = struct.Struct("<q")
"""An answer of the fork server: the pid of a compile process, or a negative errno. The first says that it is warm."""

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""A compilation takes seconds of a core: the engine and the masks have precedence."""
_WARM_UP = (
    Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
    Constraint.regex(r"\d\w\s"),  # Unicode classes take half a second, once per process
    Constraint.grammar('start: "a"'),
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
    """Memory of the grammar in a process that has loaded it, as measured here."""
    dumped: bytes = b""
    checked: list[str] = []
    """JSON pointers of keywords that are checked when the output ends, not enforced by the mask."""
    crashed: list[str] = []
    """Backends that crashed while they compiled this constraint."""
    timed_out: list[str] = []
    mask_seconds: float = 0.0
    """Seconds that the first mask took."""


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
                    with contextlib.suppress(UnsupportedConstraint):  # no backend has both formats of grammars
                        compile_with(backends, constraint, name).grammar.dump()
        except BaseException:  # requests for this backend get the error
            _log.exception("backend %s cannot be loaded", name)
        else:
            _log.info("backend %s loaded in %.2f s", name, time.perf_counter() - started)


def _compile(backends: Backends, request: CompileRequest) -> CompileResult:
    started = time.perf_counter()
    try:
        compiled = compile_with(backends, request.constraint, request.backend)
        dumped, checked = compiled.grammar.dump(), list(compiled.grammar.checked)
        size = max(compiled.nbytes, len(dumped))
        if size > request.max_bytes:
            raise ConstraintTooLarge(
                f"the compiled constraint takes {size >> 20} MiB with {request.backend}; "
                f"the limit is {request.max_bytes >> 20} MiB"
            )
    except Exception as error:
        return CompileResult(to_wire(error), request.backend, time.perf_counter() - started)
    seconds = time.perf_counter() - started
    return CompileResult(None, request.backend, seconds, size, dumped, checked, mask_seconds=compiled.mask_seconds)


def _run_compile_process(backends: Backends, jobs: int, fork_server: int) -> NoReturn:
    """Compile one request after the other until the other end of the socket `jobs` is closed."""
    _die_with(fork_server)
    os.nice(_NICENESS)
    enter_session()
    connection, decode = Connection(jobs), Decoder(CompileRequest).decode
    try:
        while True:
            connection.send_bytes(encode(_compile(backends, decode(connection.recv_bytes()))))
            gc.collect()
            give_back_free_memory()
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
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _run_compile_process(backends, jobs, fork_server)
        except BaseException:
            _log.exception("a compile process failed")
        finally:
            os._exit(1)
    return pid


def _run_fork_server(control: socket.socket, vocabulary: int, parent: int) -> None:
    """Warm up, then answer commands until the other end of `control` is closed."""
    _die_with(parent)
    enter_session()  # loading the libraries takes seconds of a core too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # compile processes that end leave nothing behind
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of half a gigabyte takes seconds
    os.dup2(2, 1)
    leave_out_torch()
    backends = Backends(Vocabulary.from_bytes(Path(f"/proc/self/fd/{vocabulary}").read_bytes()))
    os.close(vocabulary)
    _warm(backends)
    gc.collect()
    gc.freeze()  # in a fork, a collection would touch, and so copy, every object
    control.send(NUMBER.pack(0))
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not command:
            return
        (jobs,) = descriptors
        pid = _fork(backends, control, jobs)
        os.close(jobs)
        control.send(NUMBER.pack(pid))


if __name__ == "__main__":
    _control, _vocabulary, _parent = map(int, sys.argv[1:])
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the compile actor is gone
        _run_fork_server(socket.socket(fileno=_control), _vocabulary, _parent)
