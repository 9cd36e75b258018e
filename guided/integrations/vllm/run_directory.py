"""The run directory: where the processes of one vLLM server or `LLM` leave notes for each other.

vLLM gives a logits processor no way to speak to the process that answers the client. So the first process of a run
makes a private directory and names it in its environment, which the engine's processes inherit. `announce` is one of
vLLM's general plugins, which it calls in every process before anything else.
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
from typing import Any

__all__ = ["VARIABLE", "Process", "announce", "find", "read_note", "write_note"]

VARIABLE = "GUIDED_VLLM_DIR"
"""The environment variable that names the run directory. Set by hand (to a directory that all machines share), it also
serves engines that don't descend from the process that answers."""
_PREFIX = "guided-vllm-"
_OWNER = "owner"
_FOR_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_log = logging.getLogger("guided.integrations")


class Process:
    """One process of one machine that can't be mistaken for a later one with the same id: "host pid start"."""

    def __init__(self, host: str, pid: int, started: str) -> None:
        self.host, self.pid, self.started = host, pid, started

    @classmethod
    def me(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """One of this machine."""
        return cls(socket.gethostname(), pid, _started(pid))

    @classmethod
    def lineage(cls) -> list[Process]:
        """This process, the one that started it, the one that started that, and so on."""
        pid, found = os.getpid(), []
        while pid > 0:
            found.append(cls.of(pid))
            pid = int((_stat(pid) or ["", "0"])[1])
        return found

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """What `str` wrote; None for anything else."""
        parts = text.split(" ")
        return cls(parts[0], int(parts[1]), parts[2]) if len(parts) == 3 and parts[1].isdecimal() else None

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.started}"

    def is_gone(self) -> bool:
        """Known to have ended: it was on this machine, and isn't there any more."""
        return self.host == socket.gethostname() and _started(self.pid) != self.started


def _started(pid: int) -> str:
    """When a process started, in clock ticks since the machine did (proc(5)); "" where there is none, or a zombie."""
    fields = _stat(pid)
    return "" if not fields or fields[0] == "Z" else fields[19]


def _stat(pid: int) -> list[str]:
    """What proc(5) says of a process, from its state on; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def announce() -> None:
    """Make sure that this process, and those it starts, have a run directory. Idempotent; without one, it is logged."""
    named = find()
    if named is not None and not _is_somebody_elses(named):
        return
    try:
        path = _make()
    except OSError:  # the engine goes on: guided requests are refused where nobody can register
        _log.exception("there can be no run directory")
        return
    os.environ[VARIABLE] = str(path)
    # Workers on a Ray cluster inherit nothing; vLLM hands them what is named here.
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
    """The run directory of this process, where it has one."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named and os.path.isdir(named) else None


def write_note(directory: Path, name: str, content: Any) -> None:
    """Leave `content` (plain JSON) as `directory / name`, all at once. Makes the directory."""
    directory.mkdir(mode=0o700, exist_ok=True)
    unfinished = directory / f".{secrets.token_hex(8)}"
    unfinished.write_text(json.dumps(content))
    unfinished.replace(directory / name)


def read_note(path: Path) -> Any:
    """What `write_note` left there; None where there is nothing, or nothing of the kind."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _is_somebody_elses(path: Path) -> bool:
    """Whether a program that is no part of this run made it: it started this one, which inherited its environment."""
    try:
        owner = Process.parse((path / _OWNER).read_text())
    except OSError:
        return False  # made by hand
    part_of_run = multiprocessing.parent_process() is not None or Path(sys.argv[0]).name == "default_worker.py"  # Ray's
    return not part_of_run and owner is not None and str(owner) != str(Process.me())


def _root() -> str:
    """Private to the user where the system has such a place (XDG Base Directory Specification)."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return runtime if runtime and os.access(runtime, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _sweep() -> None:
    """Remove what runs that were killed have left."""
    for path in Path(_root()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            owner = Process.parse((path / _OWNER).read_text()) if path.stat().st_uid == os.getuid() else None
            if owner is not None and owner.is_gone():
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a fork has its parent's exit handlers
        shutil.rmtree(path, ignore_errors=True)
