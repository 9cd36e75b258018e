"""Registrations: whether the engine's workers have the logits processor, and what keeps them from using it.

vLLM drops logits processors without a word in some set-ups. The process that admits requests must know: a guided
request that nobody masks is refused.
"""

from __future__ import annotations

from guided.embedded.run_directory import Process, find, read_note, write_note
from guided.errors import PoolUnavailable

__all__ = ["check", "register"]

_DIRECTORY = "workers"


def register(refusal: str | None = None) -> None:
    """In a worker: it has the logits processor.

    Args:
        refusal: why it can't be used all the same; None where it can.

    Raises:
        OSError: there is no run directory, or it can't be written to.
    """
    run = find()
    if run is None:
        raise FileNotFoundError("there is no run directory")
    me = Process.me()
    write_note(run / _DIRECTORY, f"{me.host}-{me.pid}", {"process": str(me), "refusal": refusal})


def check() -> None:
    """In the process that admits requests: some worker masks guided ones, and none says that it can't.

    Raises:
        PoolUnavailable: guided requests can't be served; says why, and what would help.
    """
    run = find()
    notes = [read_note(path) for path in (run / _DIRECTORY).glob("[!.]*")] if run is not None else []
    living = [note for note in notes if _is_alive(note)]
    if not living:
        raise PoolUnavailable(
            "no worker of this engine masks guided requests: with speculative decoding vLLM's V1 runner leaves "
            "logits processors out, without it start vLLM with "
            "--logits-processors guided.embedded.vllm:GuidedLogitsProcessor (and where VLLM_PLUGINS is set, "
            "it has to have 'guided' among its names)"
        )
    for note in living:
        if note["refusal"] is not None:
            raise PoolUnavailable(note["refusal"])


def _is_alive(note: object) -> bool:
    process = Process.parse(str(note.get("process"))) if isinstance(note, dict) else None
    return process is not None and not process.is_gone()
