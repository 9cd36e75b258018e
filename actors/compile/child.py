"""Compile processes as the compile actor sees them: the fork server that starts them, and one process at work.

Nothing here relies on a compile process to behave: every wait has a deadline, and ends with a kill.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.connection import Connection

from msgspec.msgpack import Decoder, encode

from actors.compile.process import NUMBER, CompileRequest, CompileResult
from actors.processes import ProcessHandle
from guided.errors import BackendError, CompileTimeout, ConstraintTooLarge

_WARM_UP_SECONDS = 120.0
_COMMAND_SECONDS = 10.0
"""A fork takes hundredths of a second. A fork server that takes longer than this is replaced."""
_POLL_SECONDS = 0.01
"""Between two readings of a process's memory and time."""
_TRANSFER_TIMEOUT = struct.pack("ll", 5, 0)
"""struct timeval: 5 s. A process that takes or sends nothing for longer in the middle of a message is frozen."""


class ForkServer:
    """The warm process that compile processes are forks of. Started when first needed, and again when it is lost.

    It dies with the thread that started it, and its forks die with it: threads that call `fork` must live as long as
    this object is used.
    """

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = os.memfd_create("vocabulary")
        weakref.finalize(self, os.close, self._vocabulary)
        with open(self._vocabulary, "wb", closefd=False) as file:
            file.write(vocabulary)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self.started = time.monotonic()
        """`time.monotonic()` when the fork server was last ready."""

    def fork(self) -> CompileProcess:
        """Start a compile process.

        Raises:
            OSError: not possible now: out of memory, or the fork server does not start.
        """
        with self._lock:
            if self._closed:
                raise OSError("the fork server was closed")
            if self._process is None or self._process.poll() is not None:
                self._start()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    pid = self._command(theirs)
                if pid < 0:
                    raise OSError(-pid, os.strerror(-pid))
            except OSError:
                ours.close()
                raise
            return CompileProcess(pid, ours)

    def close(self) -> None:
        """End the fork server, and with it all its forks, for good."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # without the lock: another thread may wait in `fork` until the process is warm
        with self._lock:
            self._discard()

    def _start(self) -> None:
        self._discard()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has one thread only
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        descriptors = (theirs.fileno(), self._vocabulary)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actors.compile.process", *map(str, descriptors), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, **one_thread, **path},
            )
        try:
            self._receive(_WARM_UP_SECONDS)
        except OSError as error:
            raise OSError(f"the fork server of the compile processes did not start: {error!r}") from error
        self.started = time.monotonic()

    def _command(self, jobs: socket.socket) -> int:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [b"f"], [jobs.fileno()])
        except OSError:
            self._discard()
            raise
        return self._receive(_COMMAND_SECONDS)

    def _receive(self, seconds: float) -> int:
        """Wait for the fork server's answer; discard the fork server if none comes."""
        assert self._control is not None
        try:
            self._control.settimeout(seconds)
            answer = self._control.recv(NUMBER.size)
            if not answer:
                raise ConnectionResetError("the fork server is gone")
        except OSError:
            self._discard()
            raise
        return int(*NUMBER.unpack(answer))

    def _discard(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None


class CompileProcess:
    """One compile process. Used by one thread at a time."""

    def __init__(self, pid: int, jobs: socket.socket) -> None:
        self.pid = pid
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            jobs.setsockopt(socket.SOL_SOCKET, option, _TRANSFER_TIMEOUT)
        self._jobs = Connection(jobs.detach())
        self._decode = Decoder(CompileResult).decode
        self._process = ProcessHandle(pid)
        self._fresh = self._process.resident()

    @property
    def alive(self) -> bool:
        """Whether the process waits for a request. Only meaningful between two requests."""
        return not self._jobs.poll(0)

    @property
    def growth(self) -> int:
        """Growth of its resident memory since its fork, in bytes."""
        return self._process.resident() - self._fresh

    def compile(self, request: CompileRequest, deadline: float, memory_bytes: int) -> CompileResult:
        """Have the process compile a constraint. If this raises, the process has to be killed.

        Args:
            deadline: `time.monotonic()` until which to wait.
            memory_bytes: limit of the growth of the process's resident memory since its fork.

        Raises:
            CompileTimeout, ConstraintTooLarge: a limit was exceeded.
            BackendError: the process ended: it crashed, or was killed from outside.
        """
        try:
            self._jobs.send_bytes(encode(request))
            while not self._jobs.poll(min(_POLL_SECONDS, deadline - time.monotonic())):
                if self.growth > memory_bytes:
                    raise ConstraintTooLarge(
                        f"compiling this constraint took more than {memory_bytes >> 20} MiB of memory; "
                        "try a smaller one, or another backend"
                    )
                if time.monotonic() >= deadline:
                    raise CompileTimeout("")
            result: CompileResult = self._decode(self._jobs.recv_bytes())
        except BlockingIOError:
            raise CompileTimeout("") from None
        except (EOFError, OSError):
            raise BackendError("compiling this constraint ended its process") from None
        return result

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        self._jobs.close()
        self._process.kill()
