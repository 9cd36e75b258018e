"""A grammar library with the faults that its grammar names, in compile processes,
actors and the engine's process.

The source of a `regex` constraint is a list of words.
`ACTION@PLACE[:POSITION][=ARGUMENT]` is a fault, the others are settings.
`faulty("segfault@fill:3")` makes a constraint with a fault.

    raise        raises an exception                 segfault, exit   end the process
    panic        raises no `Exception` subclass      hold     sleeps without end and holds the GIL
    empty        a mask without tokens (at `fill`)   sleep    `=SECONDS`, while other threads run
    reject       rejects an allowed token (`accept`) wait     `=PATH`: until the file exists, while other threads run
    freeze       stops the process (SIGSTOP)         burn     `=SECONDS` of CPU time
    eat          takes memory, 32 MiB at a time, up to `=MIB` (4096), then waits without end
    watch        from now on, writes the longest seconds without the interpreter lock to `=PATH` with the process id

Places are `compile`, `load` (into an actor), `accept` and `fill`. A position is a
number of tokens; without it the fault is at all positions. The compile process computes
the first mask, so `fill:0` happens there too.

    length=N     sentences have N tokens (default 12), then only the stop token is allowed
    name=TEXT    grammars with the same name and length allow the same tokens, whatever their faults
    dump=MIB     size of the serialized grammar, which is read when it is loaded, while other threads run
    touch=PATH   creates this file with the process id when a fault is reached
    once=PATH    the fault happens only if this file doesn't exist; then the file is created

The allowed tokens depend on the whole history, so a matcher with a wrong history allows
other tokens.

The backend is registered as "faulty" in processes that have `PATHS` on their PYTHONPATH
(`startup/sitecustomize.py`): those of the `local_ray` fixture and those started with
`environment()`. In other processes use `monkeypatch.setitem(BACKENDS, "faulty",
ADAPTER)`. The first actor that imports it while the file exists that `FAULTY_IMPORT`
names in its environment deletes the file and stops there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scripted_grammar import ScriptedMatcher

from actors.processes import thread_times
from guided.backends import Adapter
from guided.backends.base import Backend, CompiledGrammar
from guided.constraint import Constraint
from guided.errors import TokenRejected
from guided.vocabulary import Vocabulary

NAME = "faulty"
ADAPTER = Adapter("faulty_backend:FaultyBackend", frozenset({"regex"}))
PATHS = (str(Path(__file__).parent / "startup"), str(Path(__file__).parent))


def environment() -> dict[str, str]:
    """Return environment variables with which a process and its children know this
    backend."""
    return {
        "PYTHONPATH": os.pathsep.join(
            [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    }


def faulty(*words: str) -> Constraint:
    """Return a constraint for this backend, by default without a fault."""
    return Constraint.regex(" ".join(words) or "sound")


class Panic(BaseException):
    """Like a Rust panic in Python, which is no `Exception`."""


@dataclass(frozen=True)
class _Plan:
    """A parsed constraint."""

    faults: list[tuple[str, str, str]]
    """Action, place with its position, argument."""
    length: int
    seed: int
    touch: str
    once: str
    dump: int

    @classmethod
    def parse(cls, source: str) -> _Plan:
        parts = [word.partition("=") for word in source.split()]
        settings = {head: argument for head, _, argument in parts if "@" not in head}
        faults = [
            (*head.split("@"), argument) for head, _, argument in parts if "@" in head
        ]
        length = int(settings.get("length", 12))
        seed = int.from_bytes(f"{settings.get('name', '')} {length}".encode()) % 2**61
        dump = int(settings.get("dump", 0)) << 20
        return cls(
            faults,
            length,
            seed,
            settings.get("touch", ""),
            settings.get("once", ""),
            dump,
        )

    def reach(self, place: str, position: int | None = None) -> str:
        """Run the faults at this place. Returns the action that the caller must do, if
        any."""
        for action, where, argument in self.faults:
            if where not in (place, f"{place}:{position}"):
                continue
            if self.once:
                if Path(self.once).exists():
                    continue
                Path(self.once).touch()
            if self.touch:
                written = Path(f"{self.touch}.{os.getpid()}")
                written.write_text(str(os.getpid()))
                written.rename(self.touch)  # atomic: a reader never gets an empty file
            if action in ("empty", "reject"):
                return action
            _ACTIONS[action](argument)
        return ""


def _raise(error: BaseException) -> None:
    raise error


def _hold(argument: str) -> None:
    # PyDLL keeps the GIL during the call. It uses no CPU.
    while True:
        ctypes.PyDLL(None).sleep(3600)


def _freeze(argument: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # a process stops a moment later


def _burn(argument: str) -> None:
    began = time.thread_time()
    while time.thread_time() - began < float(argument):
        zlib.crc32(bytes(1 << 20))


def _wait(argument: str) -> None:
    while not Path(argument).exists():
        time.sleep(0.005)


def _eat(argument: str) -> None:
    eaten: list[bytearray] = []
    while 32 * len(eaten) < int(argument or 4096):
        eaten.append(bytearray(os.urandom(1) * (32 << 20)))
        time.sleep(0.005)
    time.sleep(3600)


def _watch(argument: str) -> None:
    threading.Thread(
        target=_measure, args=(f"{argument}.{os.getpid()}",), daemon=True
    ).start()


def _measure(path: str) -> None:
    """Sleep a millisecond again and again. What it takes longer, without a wait for a
    CPU, is a wait for the lock."""
    thread, longest = threading.get_native_id(), 0.0
    _, waited = thread_times(thread)
    while True:
        began = time.monotonic()
        time.sleep(0.001)
        ended, before = time.monotonic(), waited
        _, waited = thread_times(thread)
        seconds = ended - began - 0.001 - (waited - before)
        if seconds > longest:
            longest = seconds
            Path(path).write_text(str(longest))


_ACTIONS: dict[str, Callable[[str], object]] = {
    "raise": lambda argument: _raise(ValueError("the library raised")),
    "panic": lambda argument: _raise(Panic("the library panicked")),
    "segfault": lambda argument: ctypes.string_at(0),
    "exit": lambda argument: os._exit(3),
    "hold": _hold,
    "sleep": lambda argument: time.sleep(float(argument)),
    "wait": _wait,
    "eat": _eat,
    "burn": _burn,
    "freeze": _freeze,
    "watch": _watch,
}


class _Matcher(ScriptedMatcher):
    def __init__(self, grammar: _Grammar, tokens: list[int]) -> None:
        super().__init__(grammar, tokens)
        self.stop_ids = grammar.stop

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self.grammar.plan.reach("accept", len(self.tokens)) == "reject":
                raise TokenRejected("told to reject")
            super().accept_tokens([token])

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        empty = self.grammar.plan.reach("fill", len(self.tokens)) == "empty"
        super().fill_bitmask(row)
        row[:] = 0 if empty else row
        return self.is_accepting()

    def _next(self) -> list[int]:
        if self.is_accepting():
            return []
        drawn = (
            np.random.default_rng([self.grammar.plan.seed, *self.tokens]).random(
                self.grammar.size
            )
            < 0.5
        )
        return [
            token
            for token in np.flatnonzero(drawn).tolist()
            if token not in self.stop_ids
        ]

    def fork(self) -> _Matcher:
        return _Matcher(self.grammar, list(self.tokens))

    def is_accepting(self) -> bool:
        return len(self.tokens) >= self.grammar.plan.length

    def forced_tokens(self) -> list[int]:
        return []


class _Grammar(CompiledGrammar):
    fail_at = None

    def __init__(self, vocabulary: Vocabulary, source: str, place: str) -> None:
        self.plan = _Plan.parse(source)
        self.size = vocabulary.vocab_size
        self.stop = frozenset(vocabulary.stop_token_ids)
        self.plan.reach(place)

    def matcher(self) -> _Matcher:
        return _Matcher(self, [])

    def dump(self) -> bytes:
        return bytes(self.plan.dump)


class FaultyBackend(Backend):
    """See the module."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # in an actor
        if "ray" in sys.modules and (path := os.environ.get("FAULTY_IMPORT")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                _freeze("")

    def compile(self, constraint: Constraint) -> _Grammar:
        return _Grammar(self._vocabulary, constraint.source, "compile")

    def load(self, constraint: Constraint, dumped: memoryview) -> _Grammar:
        zlib.crc32(dumped)
        return _Grammar(self._vocabulary, constraint.source, "load")
