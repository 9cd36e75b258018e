"""What became of requests that could not be kept to their constraint, told outside of vLLM's answers.

vLLM has no finish reason for it: such a request ends with a stop token like any other. The engine's process reports the
error here, before that token is sampled, under the request id that the user passed in; the process that answers takes
it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from guided.errors import GuidedError, from_wire, to_wire
from guided.integrations.vllm.run_directory import find, read_note, write_note

__all__ = ["REQUEST_ID", "report", "take"]

REQUEST_ID = "guided_request_id"
"""The parameter (`SamplingParams.extra_args`, `vllm_xargs`) that names a request."""
_DIRECTORY = "ended"
_MOST = 1024
"""Reports that nobody takes: the oldest go."""


def report(request_id: str, error: GuidedError) -> None:
    """In the engine's process: this request is ending because of `error`. A second report replaces the first.

    Raises:
        OSError: the run directory can't be written to.
    """
    run = find()
    if run is None:
        raise FileNotFoundError("there is no run directory")
    directory = run / _DIRECTORY
    write_note(directory, _name(request_id), to_wire(error))
    _bound(directory)


def take(request_id: str) -> GuidedError | None:
    """In the process that answers: why this request ended, once; None where nothing was reported."""
    run = find()
    if run is None:
        return None
    path = run / _DIRECTORY / _name(request_id)
    wire = read_note(path)
    path.unlink(missing_ok=True)
    return from_wire(tuple(wire)) if isinstance(wire, list) and len(wire) == 4 else None


def _name(request_id: str) -> str:
    """A file's name for any text."""
    return hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()


def _bound(directory: Path) -> None:
    entries = sorted(os.scandir(directory), key=_age)
    for entry in entries[:-_MOST]:
        Path(entry.path).unlink(missing_ok=True)


def _age(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:  # taken meanwhile
        return 0.0
