"""Registrations: whether the engine's workers have the logits processor, and what keeps them from using it.

vLLM drops logits processors without a word in some set-ups. The process that admits requests must know: a guided
request that nobody masks is refused.

vLLM doesn't say which engine a request is for. Where a process has several, all of them need a worker that registered.
"""

from __future__ import annotations

from multiprocessing import active_children
from typing import Any

from guided.errors import PoolUnavailable
from guided.integrations.vllm.run_directory import VARIABLE, Process, find, read_note, write_note

__all__ = ["check", "register"]

_DIRECTORY = "workers"
_ENGINE = "EngineCore"
"""How vLLM names the processes of engines, which it starts through `multiprocessing`."""


def register(refusal: str | None = None, engine: str = "") -> None:
    """In a worker: it has the logits processor.

    Args:
        refusal: why it can't be used all the same; None where it can.
        engine: whose worker it is: what all workers of one engine, and of no other, say here.

    Raises:
        OSError: there is no run directory, or it can't be written to.
    """
    run = find()
    if run is None:
        raise FileNotFoundError("there is no run directory")
    me = Process.me()
    lineage = [str(process) for process in Process.lineage()]
    note = {"process": str(me), "refusal": refusal, "engine": engine, "lineage": lineage}
    write_note(run / _DIRECTORY, f"{me.host}-{me.pid}", note)


def check() -> None:
    """In the process that admits requests: some worker masks guided ones, and none says that it can't.

    Raises:
        PoolUnavailable: guided requests can't be served; says why, and what would help.
    """
    run = find()
    notes = [read_note(path) for path in (run / _DIRECTORY).glob("[!.]*")] if run is not None else []
    living = [note for note in notes if _is_alive(note)]
    for note in living:
        if note["refusal"] is not None:
            raise PoolUnavailable(note["refusal"])
    help_ = (
        "with speculative decoding vLLM's V1 runner leaves logits processors out, without it start vLLM with "
        "--logits-processors guided.integrations.vllm.processor:GuidedLogitsProcessor (and where VLLM_PLUGINS is set, "
        "it has to have 'guided' among its names); workers on other machines, or not started from here, are seen where "
        f"{VARIABLE} names one directory for all"
    )
    if not living:
        raise PoolUnavailable(f"no worker of this engine masks guided requests: {help_}")
    if _without_worker(living):
        raise PoolUnavailable(
            "this process has several engines, and one of them has no worker that masks guided requests, or is just "
            f"starting: vLLM doesn't say which engine a request is for. {help_[0].upper()}{help_[1:]}"
        )


def _without_worker(living: list[dict[str, Any]]) -> bool:
    """Whether this process has an engine that nobody registered for.

    An engine's workers descend from its process, but for those that Ray started: they are counted, by engine.
    """
    engines = {
        str(Process.of(child.pid)) for child in active_children() if child.pid and child.name.startswith(_ENGINE)
    }
    elsewhere: set[str] = set()
    found: set[str] = set()
    me = str(Process.me())
    for note in living:
        lineage: list[str] = note.get("lineage", [])
        if engines.isdisjoint(lineage):
            if note["process"] != me:
                elsewhere.add(note.get("engine", ""))
        else:
            found.update(engines.intersection(lineage))
    return len(engines - found) > len(elsewhere)


def _is_alive(note: object) -> bool:
    process = Process.parse(str(note.get("process"))) if isinstance(note, dict) else None
    return process is not None and not process.is_gone()
