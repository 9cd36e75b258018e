"""Reports of failed requests, from the engine's process to the process that answers the client.

vLLM has no finish reason for a request that could not be constrained: it ends with a stop token. The engine's process
writes a report before that token is sampled, under the user's request id.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from guided.errors import GuidedError, from_wire, to_wire
from guided.integrations.vllm.run_directory import find, read_note, write_note

REQUEST_ID = "guided_request_id"
"""The parameter (`SamplingParams.extra_args`, `vllm_xargs`) that names a request."""
_DIRECTORY = "ended"
_MAX_REPORTS = 1024
"""Maximum number of reports. The oldest ones are removed."""


def report(request_id: str, error: GuidedError) -> None:
    """Report, in the engine's process, that a request ends because of `error`. Raises `OSError` as `write_note`."""
    directory = write_note(_DIRECTORY, _file_name(request_id), to_wire(error))
    for entry in sorted(os.scandir(directory), key=_age)[:-_MAX_REPORTS]:
        Path(entry.path).unlink(missing_ok=True)


def report_engine_request(engine_id: str, error: GuidedError) -> None:
    """Report the end of a request by the id that vLLM's engine has for it.

    The process that answers the client knows only a part of this id: `3_cmpl-ID-0-1f2e3d4c` is choice 3 of prompt 0 of
    request `cmpl-ID`.
    """
    outer = re.sub(r"^\d+_|-[0-9a-f]{8}$", "", engine_id)
    for request_id in {outer, re.sub(r"-\d+$", "", outer)}:
        report(request_id, error)


def take(request_id: str) -> GuidedError | None:
    """Return and remove the report of a request, in the process that answers the client. None: there is none."""
    run = find()
    if run is None:
        return None
    path = run / _DIRECTORY / _file_name(request_id)
    wire = read_note(path)
    path.unlink(missing_ok=True)
    return from_wire(tuple(wire)) if isinstance(wire, list) and len(wire) == 4 else None


def _file_name(request_id: str) -> str:
    return hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()


def _age(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:  # taken in the meantime
        return 0.0
