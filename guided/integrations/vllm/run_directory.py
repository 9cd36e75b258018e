"""The run directory: files through which the processes of one vLLM server or `LLM` exchange notes.

vLLM gives logits processors no channel to the process that answers clients. So the first process of a run makes a
private directory and puts its path into its environment, which the engine's processes inherit. `announce` is a vLLM
general plugin: vLLM calls it in every process before anything else.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing
import os
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["VARIABLE", "Process", "announce", "find", "read_note", "write_note"]

VARIABLE = "GUIDED_VLLM_DIR"
"""The environment variable with the path of the run directory. Set by hand, to a directory that all machines share, it
also reaches engines that are no descendants of the process that answers."""
_PREFIX = "guided-vllm-"
_OWNER = "owner"
_FOR_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_log = logging.getLogger("guided.integrations")


class Process(NamedTuple):
    """Identity of a process. A later process with the same pid is a different one, by its start time."""

    host: str
    pid: int
    started: str

    @classmethod
    def me(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process with id `pid` on this machine."""
        return cls(socket.gethostname(), pid, _started(pid))

    @classmethod
    def lineage(cls) -> list[Process]:
        """This process, its parent, and so on."""
        pid, found = os.getpid(), []
        while pid > 0:
            found.append(cls.of(pid))
            pid = int((_stat(pid) or ["", "0"])[1])
        return found

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Parse the result of `str`. None: `text` is something else."""
        parts = text.split(" ")
        return cls(parts[0], int(parts[1]), parts[2]) if len(parts) == 3 and parts[1].isdecimal() else None

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.started}"

    def has_ended(self) -> bool:
        """Whether the process is known to have ended. False for processes of other machines."""
        return self.host == socket.gethostname() and _started(self.pid) != self.started


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot (proc(5)). "": there is no such process, or it is a zombie."""
    fields = _stat(pid)
    return "" if not fields or fields[0] == "Z" else fields[19]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat (proc(5)) from the state on. Empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def announce() -> None:
    """Give this process and those that it starts a run directory. Idempotent. A failure is logged."""
    named = find()
    if named is not None and not _is_inherited(named):
        return
    try:
        path = _make()
    except OSError:  # the engine still starts: guided requests are rejected because no worker can register
        _log.exception("the run directory can't be made")
        return
    os.environ[VARIABLE] = str(path)
    # Workers on a Ray cluster inherit no environment. vLLM copies the variables that are listed here.
    copied = [name for name in os.environ.get(_FOR_RAY, "").split(",") if name]
    if VARIABLE not in copied:
        os.environ[_FOR_RAY] = ",".join([*copied, VARIABLE])


def _make() -> Path:
    _sweep()
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))  # 0700
    (path / _OWNER).write_text(str(Process.me()))
    atexit.register(_remove, path, os.getpid())
    return path


def find() -> Path | None:
    """Return the run directory of this process. None: it has none."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named and os.path.isdir(named) else None


def write_note(directory: Path, name: str, content: Any) -> None:
    """Write `content` (plain JSON) to `directory / name` atomically. Makes the directory."""
    directory.mkdir(mode=0o700, exist_ok=True)
    temporary = directory / f".{secrets.token_hex(8)}"
    temporary.write_text(json.dumps(content))
    temporary.replace(directory / name)


def read_note(path: Path) -> Any:
    """Read a note. None: there is none, or it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _is_inherited(path: Path) -> bool:
    """Whether another run made the directory: one that started this program, which inherited its environment."""
    try:
        owner = Process.parse((path / _OWNER).read_text())
    except OSError:
        return False  # made by hand
    part_of_run = multiprocessing.parent_process() is not None or Path(sys.argv[0]).name == "default_worker.py"  # Ray's
    return not part_of_run and owner is not None and str(owner) != str(Process.me())


def _root() -> str:
    """The user's private directory if the system has one (XDG Base Directory Specification), else the usual one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return runtime if runtime and os.access(runtime, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _sweep() -> None:
    """Remove the directories of runs that were killed."""
    for path in Path(_root()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            owner = Process.parse((path / _OWNER).read_text()) if path.stat().st_uid == os.getuid() else None
            if owner is not None and owner.has_ended():
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has its parent's exit handlers
        shutil.rmtree(path, ignore_errors=True)
