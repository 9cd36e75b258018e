"""The process that compiles: warm, one constraint at a time, made to be killed. `python -m actors.compile_process`.

Frames on stdin: the vocabulary, then jobs. Frames on stdout: an empty one when warm, then an answer a job. What a
grammar library prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time

import msgspec

from actors.frames import read_frame, write_frame
from guided.backends import BACKENDS, Backends
from guided.compilation import compile_constraint
from guided.constraint import Constraint
from guided.errors import Wire, to_wire
from guided.messages import decoder, encode
from guided.vocabulary import Vocabulary

__all__ = ["Job", "Outcome"]

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""A compilation takes whole seconds of a core: the engine and the masks go first."""
_log = logging.getLogger(__name__)


class Job(msgspec.Struct, array_like=True, frozen=True):
    """Compile `constraint` by the first of `backends` that can."""

    constraint: Constraint
    backends: list[str]


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """What became of a job: an error, or the grammar as another process can load it."""

    error: Wire | None = None
    backend: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    """What the grammar weighs in a process that holds it, bytes."""
    dumped: bytes = b""


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; at once if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _warm(backends: Backends) -> None:
    for name in BACKENDS:
        started = time.perf_counter()
        try:
            backends[name]
        except Exception:  # it is reported to whoever asks for this backend
            _log.exception("backend %s can't be loaded", name)
        else:
            _log.info("backend %s loaded in %.2f s", name, time.perf_counter() - started)


def _compile(backends: Backends, job: Job) -> Outcome:
    started = time.perf_counter()
    try:
        compiled = compile_constraint(backends, job.constraint, job.backends)
        dumped = compiled.grammar.dump()
    except Exception as error:
        return Outcome(error=to_wire(error), seconds=time.perf_counter() - started)
    return Outcome(None, compiled.backend, time.perf_counter() - started, compiled.grammar.nbytes, dumped)


def _main() -> None:
    _die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)
    backends = Backends(Vocabulary.from_bytes(read_frame(0)))
    _warm(backends)
    os.nice(_NICENESS)
    write_frame(answers, b"")
    decode = decoder(Job).decode
    while True:
        outcome = _compile(backends, decode(read_frame(0)))
        write_frame(answers, encode(outcome))


if __name__ == "__main__":
    try:
        _main()
    except (EOFError, BrokenPipeError):  # the actor is gone
        sys.exit(0)
