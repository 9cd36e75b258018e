"""Memory of processes and shared segments."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import psutil

__all__ = ["own_memory", "processes", "segments"]

MIB = 2**20
RAY = ("gcs_server", "raylet/raylet", "log_monitor", "dashboard/dashboard", "monitor.py", "runtime_env", "agent.py")


def own_memory() -> dict[str, float]:
    """Return the resident memory of this process in MiB: `anonymous` (its own) and `files` (code that may be
    shared)."""
    found = dict(re.findall(r"^(Rss\w+):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
    return {"anonymous": int(found["RssAnon"]) / 1024, "files": (int(found["RssFile"]) + int(found["RssShmem"])) / 1024}


def processes(root: int) -> list[dict[str, Any]]:
    """Return the memory of a process and all its descendants, in MiB.

    `pss` divides shared memory among the processes that map it; `uss` would be free if the process ended; `rss` is all
    resident memory.
    """
    tree = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    roles = {process.pid: "engine" if process.pid == root else _role(process) for process in tree}
    rows = []
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            full = process.memory_full_info()
            role = roles[process.pid]
            if role == "compile process" and roles.get(process.ppid()) != "compile process":
                role = "compile template"
            sizes = {"rss": full.rss / MIB, "pss": full.pss / MIB, "uss": full.uss / MIB}
            rows.append({"role": role, "pid": process.pid, **sizes})
    return rows


def _role(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "gone"
    if "MaskActor" in command:
        return "mask actor"
    if "CompileActor" in command:
        return "compile actor"
    if "compile_process" in command:
        return "compile process"
    if "janitor" in command:
        return "janitor"
    if command.startswith("ray::"):
        return f"Ray: {command.split()[0].removeprefix('ray::')}"
    if "default_worker" in command:
        return "Ray: a starting worker"
    found = next((part for part in RAY if part in command), None)
    return f"Ray: {Path(found).stem}" if found else f"other: {Path(command.split()[0]).name if command else '?'}"


def segments() -> list[dict[str, float]]:
    """Return the shared-memory segments of this process, in MiB: reserved size, and memory in use."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:guided-rows" in os.readlink(f"/proc/self/fd/{name}"):
                status = os.stat(f"/proc/self/fd/{name}")
                found[status.st_ino] = {"reserved": status.st_size / MIB, "taken": status.st_blocks * 512 / MIB}
    return list(found.values())
