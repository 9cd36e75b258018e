"""Compile processes as the compile actor sees them: the fork server that starts them, and one process at work.

Nothing here relies on a compile process to behave: every wait has a deadline, and ends with a kill.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.connection import Connection

from msgspec.msgpack import Decoder, encode

from actors.compile.process import NUMBER, RUNNING, CompileRequest, CompileResult
from actors.processes import ProcessHandle, ProcessReading
from guided.errors import BackendError, CompileTimeout, ConstraintTooLarge

_WARM_UP_SECONDS = 120.0
_COMMAND_SECONDS = 10.0
"""A fork takes hundredths of a second. A fork server that takes longer than this is replaced."""
_POLL_SECONDS = 0.01
"""Between two readings of a process's memory and time."""
_EXIT_SECONDS = 1.0
"""Time for a process that has closed its socket to end by itself, so that its exit code is its own."""
_TRANSFER_TIMEOUT = struct.pack("ll", 5, 0)
"""struct timeval: 5 s. A process that takes or sends nothing for longer in the middle of a message is frozen."""
_NO_READING = ProcessReading(resident=0, stopped=False, ending=False, started=0)


class ProcessLost(Exception):
    """The process was killed or stopped from outside, or with its fork server. The constraint is not known to be the
    cause."""


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
        self.started = time.monotonic()
        """`time.monotonic()` when the fork server was last ready."""

    def fork(self) -> CompileProcess:
        """Start a compile process.

        Raises:
            OSError: not possible now: out of memory, or the fork server does not start.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            process = self._process
            assert process is not None
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    pid = self._command(0, theirs)
                if pid < 0:
                    raise OSError(-pid, os.strerror(-pid))
            except OSError:
                ours.close()
                raise
            return CompileProcess(self, process, pid, ours)

    def is_lost(self, process: subprocess.Popen[bytes]) -> bool:
        """Return whether `process`, which runs or ran the fork server, is gone, and all its forks with it."""
        return process is not self._process or process.poll() is not None

    def reap(self, process: subprocess.Popen[bytes], pid: int) -> int | None:
        """Get the exit code of a compile process that has ended or was killed. None if it is not known."""
        deadline = time.monotonic() + _COMMAND_SECONDS
        # Check before taking the lock: another thread may hold it while it starts the next fork server.
        while not self.is_lost(process) and time.monotonic() < deadline:
            with self._lock:
                if self.is_lost(process):
                    return None
                try:
                    exit_code = self._command(pid)
                except OSError:
                    return None
            if exit_code != RUNNING:
                return exit_code
            time.sleep(0.002)
        return None

    def close(self) -> None:
        """End the fork server, and with it all its forks."""
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

    def _command(self, number: int, *passed: socket.socket) -> int:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [NUMBER.pack(number)], [each.fileno() for each in passed])
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

    def __init__(
        self, fork_server: ForkServer, forked_by: subprocess.Popen[bytes], pid: int, jobs: socket.socket
    ) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._forked_by = forked_by
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            jobs.setsockopt(socket.SOL_SOCKET, option, _TRANSFER_TIMEOUT)
        self._jobs = Connection(jobs.detach())
        self._decode = Decoder(CompileResult).decode
        self._process = ProcessHandle(pid)
        self._ended = False
        self._fresh = self._read()

    @property
    def alive(self) -> bool:
        """Whether the process waits for a request. Only meaningful between two requests."""
        return not self._ended and not self._fork_server.is_lost(self._forked_by) and not self._jobs.poll(0)

    @property
    def growth(self) -> int:
        """Growth of its resident memory since its fork, in bytes."""
        return self._read().resident - self._fresh.resident

    def start(self, request: CompileRequest) -> None:
        """Send a request; `wait` returns the result.

        Raises:
            ProcessLost: the process does not take it.
        """
        try:
            self._jobs.send_bytes(encode(request))
        except BlockingIOError:
            raise ProcessLost("it took no constraint") from None
        except OSError:
            raise self._failure() from None

    def wait(self, deadline: float, memory_bytes: int) -> CompileResult:
        """Wait for the result of the request.

        Args:
            deadline: `time.monotonic()` until which to wait.
            memory_bytes: limit of the growth of the process's resident memory since its fork.

        Raises:
            CompileTimeout, ConstraintTooLarge: a limit was exceeded; the process has to be killed.
            BackendError: the process crashed.
            ProcessLost: the process was killed or stopped.
        """
        try:
            while not self._jobs.poll(min(_POLL_SECONDS, deadline - time.monotonic())):
                self._check(deadline, memory_bytes)
            result: CompileResult = self._decode(self._jobs.recv_bytes())
        except BlockingIOError:
            raise CompileTimeout("") from None
        except (EOFError, OSError):
            raise self._failure() from None
        return result

    def kill(self) -> int | None:
        """Kill the process, unless it has ended by itself. Returns its exit code, None if unknown. Idempotent."""
        if self._ended:
            return None
        self._ended = True
        self._jobs.close()
        self._process.kill()
        return self._fork_server.reap(self._forked_by, self.pid)

    def _read(self) -> ProcessReading:
        return self._process.read() or _NO_READING

    def _check(self, deadline: float, memory_bytes: int) -> None:
        """Raise if a limit is exceeded."""
        reading, now = self._read(), time.monotonic()
        if reading.resident - self._fresh.resident > memory_bytes:
            raise ConstraintTooLarge(
                f"compiling this constraint took more than {memory_bytes >> 20} MiB of memory; "
                "try a smaller one, or another backend"
            )
        if reading.stopped:
            raise ProcessLost("SIGSTOP")
        if now >= deadline:
            raise CompileTimeout("")

    def _failure(self) -> BackendError | ProcessLost:
        """Return why the process has closed its socket: it crashed, or was killed externally."""
        orphaned = self._fork_server.is_lost(self._forked_by)
        self._process.wait(_EXIT_SECONDS)
        code = self.kill()
        if orphaned or code is None or code == -signal.SIGKILL:
            return ProcessLost("SIGKILL")
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        return BackendError(f"compiling this constraint ended its process ({how})")
