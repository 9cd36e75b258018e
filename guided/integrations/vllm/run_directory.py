"""The run directory: files through which the processes of one vLLM server or `LLM` exchange notes.

vLLM gives logits processors no channel to the process that answers clients. So the first process of a run makes a
private directory and puts its path into its environment, which the engine's processes inherit. `announce` is called in
every process before anything else (`activation.py`).
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

VARIABLE = "GUIDED_VLLM_DIR"
"""The environment variable with the path of the run directory. Set by hand, to a directory that all machines share, it
also reaches engines that are no descendants of the process that answers."""
SWITCH = "GUIDED_VLLM"
"""The environment variable that turns on `GuidedManager` (`activation.py`)."""
_PREFIX = "guided-vllm-"
_OWNER = "owner"
_FOR_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_log = logging.getLogger("guided.integrations")


def identity(pid: int) -> str:
    """Return host, pid and start time of a process of this machine. No later process with this pid has the same."""
    started = ""
    with contextlib.suppress(OSError):  # there is no such process
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5), from the state on
        started = "" if fields[0] == "Z" else fields[19]  # a zombie has ended
    return f"{socket.gethostname()} {pid} {started}"


def has_ended(process: str) -> bool:
    """Whether the process with this identity is known to have ended. False for processes of other machines."""
    host, pid, _ = process.split(" ")
    return host == socket.gethostname() and process != identity(int(pid))


def announce() -> None:
    """Give this process and those that it starts a run directory. Idempotent. A failure is logged."""
    named = find()
    if named is not None and not _is_inherited(named):
        return
    try:
        _sweep()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))  # 0700
        (path / _OWNER).write_text(identity(os.getpid()))
    except OSError:  # the engine still starts: guided requests are rejected because no worker can register
        _log.exception("the run directory can't be made")
        return
    atexit.register(_remove, path, os.getpid())
    os.environ[VARIABLE] = str(path)
    # Workers on a Ray cluster inherit no environment. vLLM copies the variables that are listed here.
    copied = [name for name in os.environ.get(_FOR_RAY, "").split(",") if name]
    os.environ[_FOR_RAY] = ",".join(dict.fromkeys([*copied, VARIABLE, SWITCH]))


def find() -> Path | None:
    """Return the run directory of this process. None: it has none."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named and os.path.isdir(named) else None


def write_note(folder: str, name: str, content: Any) -> Path:
    """Write `content` (plain JSON) to a file of the run directory atomically. Returns the path of its folder.

    Raises:
        OSError: there is no run directory, or it is not writable.
    """
    run = find()
    if run is None:
        raise FileNotFoundError("there is no run directory")
    directory = run / folder
    directory.mkdir(mode=0o700, exist_ok=True)
    temporary = directory / f".{secrets.token_hex(8)}"
    temporary.write_text(json.dumps(content))
    temporary.replace(directory / name)
    return directory


def read_note(path: Path) -> Any:
    """Read a note. None: there is none, or it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def notes_of_running(folder: str) -> list[dict[str, Any]]:
    """Read the notes in a folder of the run directory that are of processes that still run: those in "process"."""
    run = find()
    notes = [read_note(path) for path in (run / folder).glob("[!.]*")] if run is not None else []
    return [note for note in notes if isinstance(note, dict) and not has_ended(note["process"])]


def _is_inherited(path: Path) -> bool:
    """Whether another run made the directory: one that started this program, which inherited its environment."""
    try:
        owner = (path / _OWNER).read_text()
    except OSError:
        return False  # made by hand
    part_of_run = multiprocessing.parent_process() is not None or Path(sys.argv[0]).name == "default_worker.py"  # Ray's
    return not part_of_run and owner != identity(os.getpid())


def _root() -> str:
    """The user's private directory if the system has one (XDG Base Directory Specification), else the usual one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return runtime if runtime and os.access(runtime, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _sweep() -> None:
    """Remove the directories of runs that were killed."""
    for path in Path(_root()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):  # no owner, or its identity is not complete yet
            if path.stat().st_uid == os.getuid() and has_ended((path / _OWNER).read_text()):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has its parent's exit handlers
        shutil.rmtree(path, ignore_errors=True)
