"""Kinds and memory of the processes that belong to a server or an engine. Sizes are in MiB."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import psutil

MIB = 2**20
COMPILE_ACTOR = "compile actor"
COMPILE_PROCESS = "compile process"
FORK_SERVER = "fork server"
KINDS = {
    "raylet/raylet": "Ray: raylet",  # first: its command line contains that of its workers
    "MaskActor": "mask actor",
    "CompileActor": COMPILE_ACTOR,
    "actors.compile.process": COMPILE_PROCESS,
    "guided-cleanup": "cleanup process",
    "actors.driver.process": "Ray: driver",
    "default_worker": "Ray: starting worker",
    "gcs_server": "Ray: gcs_server",
    "log_monitor": "Ray: log_monitor",
    "dashboard/dashboard": "Ray: dashboard",
    "monitor.py": "Ray: monitor",
    "runtime_env": "Ray: runtime_env",
    "agent.py": "Ray: agent",
}
"""Part of a command line -> kind of process."""


def family(root: int, root_kind: str) -> list[tuple[str, psutil.Process]]:
    """Return (kind, process) for a process and its descendants that still exist."""
    found: dict[int, tuple[str, psutil.Process]] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(root)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.status() != psutil.STATUS_ZOMBIE:
                    kind = root_kind if process == top else _kind(process)
                    if kind == COMPILE_PROCESS and found.get(process.ppid(), ("", top))[0] == COMPILE_ACTOR:
                        kind = FORK_SERVER
                    found[process.pid] = (kind, process)
    return list(found.values())


def _kind(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for part, kind in KINDS.items():
        if part in command:
            return kind
    name = command.partition(" ")[0]
    if name.startswith("ray::"):
        return f"Ray: {name.removeprefix('ray::').partition('.')[0]}"
    return f"other: {Path(name).name or '?'}"


def memory(root: int, root_kind: str) -> list[dict[str, Any]]:
    """Return `process` (kind), `pid`, `rss_mib`, `pss_mib` and `uss_mib` of a process and its descendants.

    RSS is all resident memory. PSS divides shared memory among the processes that map it. USS would be free if the
    process ended. Takes some ten milliseconds.
    """
    rows = []
    for kind, process in family(root, root_kind):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            full = process.memory_full_info()
            sizes = {f"{name}_mib": round(getattr(full, name) / MIB, 1) for name in ("rss", "pss", "uss")}
            rows.append({"process": kind, "pid": process.pid, **sizes})
    return rows
