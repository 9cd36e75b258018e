"""Registry of the workers that have loaded the logits processor.

In some configurations vLLM drops logits processors silently. The process that admits requests checks this registry, and
rejects guided requests if no worker would mask them. vLLM does not tell which engine a request is for: if a process has
several engines, each of them needs a registered worker.
"""

from __future__ import annotations

import os
from multiprocessing import active_children
from typing import Any

from guided.errors import PoolUnavailable
from guided.integrations.vllm.run_directory import VARIABLE, identity, notes_of_running, write_note

_DIRECTORY = "workers"
_ENGINE_PROCESS = "EngineCore"
"""Prefix of the names of vLLM's engine processes, which are started by `multiprocessing`."""
_HELP = (
    "with speculative decoding vLLM's V1 runner drops logits processors; without it, start vLLM with "
    "--logits-processors guided.integrations.vllm.processor:GuidedLogitsProcessor (and if VLLM_PLUGINS is set, include "
    f"'guided'); for workers on other machines, or not started by this process, set {VARIABLE} to one directory that "
    "all machines share"
)


def register(rejection: str | None = None, engine: str = "") -> None:
    """Register this worker.

    Args:
        rejection: why the worker can't mask guided requests. None: it can.
        engine: id of the worker's engine, equal for all workers of the engine.

    Raises `OSError` as `write_note`.
    """
    process = identity(os.getpid())
    parents = [process, identity(os.getppid())]
    note = {"process": process, "rejection": rejection, "engine": engine, "parents": parents}
    write_note(_DIRECTORY, process.rpartition(" ")[0].replace(" ", "-"), note)


def check() -> None:
    """Check, in the process that admits requests, that workers mask guided requests.

    Raises:
        PoolUnavailable: they don't. The message has the reason and the remedy.
    """
    workers = notes_of_running(_DIRECTORY)
    for worker in workers:
        if worker["rejection"] is not None:
            raise PoolUnavailable(worker["rejection"])
    if not workers:
        raise PoolUnavailable(f"no worker of this engine masks guided requests: {_HELP}")
    if _has_engine_without_worker(workers):
        raise PoolUnavailable(
            "this process has several engines, and one of them has no worker that masks guided requests, or is just "
            f"starting: vLLM does not tell which engine a request is for. {_HELP[0].upper()}{_HELP[1:]}"
        )


def _has_engine_without_worker(workers: list[dict[str, Any]]) -> bool:
    """Whether one of this process's engines has no registered worker.

    A worker is its engine's process or a child of it, unless Ray started it. For Ray's, engine ids are counted.
    """
    engines = {
        identity(child.pid) for child in active_children() if child.pid and child.name.startswith(_ENGINE_PROCESS)
    }
    found: set[str] = set()
    elsewhere: set[str] = set()
    for worker in workers:
        its_engines = engines.intersection(worker.get("parents", ()))
        found |= its_engines
        if not its_engines and worker["process"] != identity(os.getpid()):
            elsewhere.add(worker.get("engine", ""))
    return len(engines - found) > len(elsewhere)
