"""The compile processes of this process."""

from __future__ import annotations

import psutil


def compile_pids() -> list[int]:
    """Return the pids of the forks of all fork servers."""
    found = psutil.Process().children(recursive=True)
    program = {each.pid: each for each in found if "actors.compile_process" in each.cmdline()}
    return [pid for pid, each in program.items() if each.ppid() in program]
