"""Compile processes from their owner's side: the template they are forked from, and one of them at work.

What a compile process does with its constraint is nobody's guess: everything here has a deadline, and ends with a kill.
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
from dataclasses import dataclass

import psutil

from actors.compile.process import (
    COMMAND,
    FORK,
    NOT_YET,
    REAP,
    CompileRequest,
    CompileResult,
    read_frame,
    readable,
    write_frame,
)
from guided.errors import BackendError, CompileTimeout, ConstraintTooLarge
from guided.messages import decoder, encode

__all__ = ["CompileProcess", "ForkServer", "ProcessLimits", "ProcessLost", "TimeSliceExceeded"]

_WARM_UP_SECONDS = 120.0
_COMMAND_SECONDS = 10.0
"""A fork takes hundredths of a second; a template that takes so long is replaced."""
_CHECK_SECONDS = 0.01
"""Between two looks at a process's memory and time."""
_WALL_PER_SLICE = 4.0
"""A slice is over after so many times its length on the wall clock too: a process may hang without computing."""
_SEND_TIMEOUT = struct.pack("ll", 5, 0)


class ProcessLost(Exception):
    """The process is gone, and nothing says that its constraint did it: killed or stopped from outside, or with its
    template."""


class TimeSliceExceeded(Exception):
    """It isn't done, and has computed for as long as it may while others wait. It goes on running."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What one attempt may take.

    Args:
        deadline: `time.monotonic()` at which it is killed.
        memory_bytes: resident memory beyond what a compile process has when it is forked.
        cpu_seconds: computing time after which `TimeSliceExceeded` is raised; None: there is no slice.
    """

    deadline: float
    memory_bytes: int
    cpu_seconds: float | None = None


class ForkServer:
    """The warm process that compile processes are forked from; started when it is needed, and again when it is lost.

    It ends with the thread that had it started, and its forks with it: threads that call `fork` live as long as it.
    """

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.started = time.monotonic()
        """When it was last ready."""

    def fork(self) -> CompileProcess:
        """A compile process.

        Raises:
            OSError: there can't be one now: not the memory for it, or the template doesn't start.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            process = self._process
            assert process is not None
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    pid = self._command(FORK, 0, theirs)
                if pid < 0:
                    raise OSError(-pid, os.strerror(-pid))
            except OSError:
                ours.close()
                raise
            return CompileProcess(self, process, pid, ours)

    def is_lost(self, process: subprocess.Popen[bytes]) -> bool:
        """That template, and so everything that it forked, is gone."""
        return process is not self._process or process.poll() is not None

    def reap(self, process: subprocess.Popen[bytes], pid: int) -> int | None:
        """How a process that was killed or has hung up ended; None where it can't be told."""
        deadline = time.monotonic() + _COMMAND_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                if self.is_lost(process):
                    return None
                try:
                    status = self._command(REAP, pid)
                except OSError:
                    return None
            if status != NOT_YET:
                return status
            time.sleep(0.002)
        return None

    def close(self) -> None:
        """End it, and with it all its forks."""
        with self._lock:
            self._discard()

    def _start(self) -> None:
        self._discard()
        ours, theirs = socket.socketpair()
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads don't survive a fork
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actors.compile.process", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **one_thread, **path},
            )
        self._control = ours
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_WARM_UP_SECONDS), 0))
        try:
            write_frame(ours.fileno(), self._vocabulary)
            read_frame(ours.fileno(), time.monotonic() + _WARM_UP_SECONDS)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self._discard()
            raise OSError(f"the template of compile processes didn't start: {error!r}") from error
        self.started = time.monotonic()

    def _command(self, what: bytes, pid: int, passed: socket.socket | None = None) -> int:
        assert self._control is not None
        try:
            descriptors = [] if passed is None else [passed.fileno()]
            socket.send_fds(self._control, [COMMAND.pack(what, pid)], descriptors)
            answer = b""
            deadline = time.monotonic() + _COMMAND_SECONDS
            while len(answer) < COMMAND.size:
                if not readable(self._control.fileno(), deadline - time.monotonic()):
                    raise TimeoutError("the template doesn't answer")
                more = self._control.recv(COMMAND.size - len(answer))
                if not more:
                    raise ConnectionResetError("the template is gone")
                answer += more
        except OSError:
            self._discard()
            raise
        result: int = COMMAND.unpack(answer)[1]
        return result

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

    def __init__(self, template: ForkServer, made_by: subprocess.Popen[bytes], pid: int, jobs: socket.socket) -> None:
        self.pid = pid
        self._template = template
        self._made_by = made_by
        self._jobs = jobs
        jobs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._decode = decoder(CompileResult).decode
        self._ended = False
        self._computed = 0.0
        self._started = 0.0
        self._seen = psutil.Process(pid)
        self._least_rss = self._memory()

    @property
    def alive(self) -> bool:
        """It has not hung up, and its template is there. Asked while it has nothing to do."""
        return not self._ended and not self.orphaned and not readable(self._jobs.fileno(), 0)

    @property
    def orphaned(self) -> bool:
        """Its template is gone, and took it along."""
        return self._template.is_lost(self._made_by)

    @property
    def growth(self) -> int:
        """Resident bytes more than it had in the beginning."""
        return self._memory() - self._least_rss

    def start(self, attempt: CompileRequest) -> None:
        """Give it an attempt; `wait` follows.

        Raises:
            ProcessLost: it doesn't take it.
        """
        self._computed = self._cpu_seconds()
        self._started = time.monotonic()
        try:
            write_frame(self._jobs.fileno(), encode(attempt))
        except BlockingIOError:
            raise ProcessLost("it took no constraint") from None
        except OSError:
            raise self._crash() from None

    def wait(self, allowance: ProcessLimits) -> CompileResult:
        """The outcome of what it was given.

        Raises:
            TimeSliceExceeded: not yet; it may be waited for again.
            CompileTimeout, ConstraintTooLarge: it took too much: kill it.
            BackendError: it died.
            ProcessLost: it was killed, or stopped.
        """
        answers = self._jobs.fileno()
        try:
            while not readable(answers, min(_CHECK_SECONDS, allowance.deadline - time.monotonic())):
                if self.growth > allowance.memory_bytes:
                    raise ConstraintTooLarge(
                        f"compiling this constraint took more than {allowance.memory_bytes >> 20} MiB of memory; "
                        "a smaller one, or another backend, may do"
                    )
                if self._is(psutil.STATUS_STOPPED):
                    raise ProcessLost("SIGSTOP")
                if time.monotonic() >= allowance.deadline:
                    raise TimeoutError
                if allowance.cpu_seconds is not None and self._slice_is_over(allowance.cpu_seconds):
                    raise TimeSliceExceeded
            outcome: CompileResult = self._decode(read_frame(answers, allowance.deadline))
        except TimeoutError:
            raise CompileTimeout("") from None
        except (EOFError, OSError):
            raise self._crash() from None
        return outcome

    def kill(self) -> int | None:
        """End it, whatever it does: how it had ended before, if it had. Idempotent."""
        if self._ended:
            return None
        self._ended = True
        self._jobs.close()
        if self.orphaned:
            return None
        os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so that this pid is nobody else's
        return self._template.reap(self._made_by, self.pid)

    def _slice_is_over(self, seconds: float) -> bool:
        wall = time.monotonic() - self._started
        return wall > _WALL_PER_SLICE * seconds or self._cpu_seconds() - self._computed > seconds

    def _crash(self) -> BackendError | ProcessLost:
        orphaned = self.orphaned
        code = self._end_of_its_own()
        if orphaned or code is None or code == -signal.SIGKILL:
            return ProcessLost("SIGKILL")
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        return BackendError(f"compiling this constraint ended its process ({how})")

    def _end_of_its_own(self) -> int | None:
        """Like `kill`, with a moment for it to end by itself: it has hung up already."""
        if self.orphaned or self._ended:
            return None
        code = self._template.reap(self._made_by, self.pid) if self._is_dying() else self.kill()
        self._ended = True
        self._jobs.close()
        return code

    def _is_dying(self) -> bool:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            if self._is(psutil.STATUS_ZOMBIE):
                return True
            time.sleep(0.005)
        return False

    def _is(self, status: str) -> bool:
        try:
            return bool(self._seen.status() == status)
        except psutil.NoSuchProcess:
            return status == psutil.STATUS_ZOMBIE

    def _memory(self) -> int:
        try:
            return int(self._seen.memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def _cpu_seconds(self) -> float:
        try:
            times = self._seen.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)
