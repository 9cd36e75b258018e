"""A grammar library with the faults that its grammar names, in compile processes, actors and the engine's process.

The source of a `regex` or `grammar` constraint is a list of words. `ACTION@PLACE[:POSITION][=ARGUMENT]` is a fault, the
others are settings. `faulty("segfault@fill:3")` makes a constraint with a fault.

    raise        raises an exception                 segfault, abort, exit   end the process
    panic        raises no `Exception` subclass      hold     sleeps without end and holds the GIL
    empty        a mask without tokens (at `fill`)   spin     computes without end and holds the GIL
    reject       rejects an allowed token (`accept`) sleep    `=SECONDS`, while other threads run
    wait         `=PATH`: until the file exists, while other threads run
    eat          takes memory, 32 MiB at a time, up to `=MIB` (4096), then waits without end

Places are `compile`, `load` (into an actor), `open` (a matcher), `accept` and `fill`. A position is a number of tokens;
without it the fault is at all positions. The compile process computes the first mask, so `fill:0` happens there too.

    length=N     sentences have N tokens (default 12), then only the stop token is allowed
    name=TEXT    grammars with the same name and length allow the same tokens, whatever their faults
    touch=PATH   creates this file with the process id when a fault is reached
    once=PATH    the fault happens only if this file doesn't exist; then the file is created

The allowed tokens depend on the whole history, so a matcher with a wrong history allows other tokens.

The backend is registered as "faulty" in processes that have `PATHS` on their PYTHONPATH (`startup/sitecustomize.py`):
those of the `local_ray` fixture and those started with `environment()`. In other processes use
`monkeypatch.setitem(BACKENDS, "faulty", ADAPTER)`.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from guided.backends import Adapter
from guided.backends.base import CompiledGrammar, Matcher
from guided.constraint import Constraint, ConstraintKind
from guided.errors import BackendError, TokenRejected
from guided.vocabulary import Vocabulary

NAME = "faulty"
KINDS: frozenset[ConstraintKind] = frozenset({"regex", "grammar"})
ADAPTER = Adapter("faulty_backend:FaultyBackend", KINDS)
PATHS = (str(Path(__file__).parent / "startup"), str(Path(__file__).parent))


def environment() -> dict[str, str]:
    """Return environment variables with which a process and its children know this backend."""
    return {"PYTHONPATH": os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])}


def faulty(*words: str) -> Constraint:
    """Return a constraint for this backend, by default without a fault."""
    return Constraint.regex(" ".join(words) or "sound")


class Panic(BaseException):
    """Like a Rust panic in Python, which is no `Exception`."""


@dataclass(frozen=True)
class _Fault:
    action: str
    place: str
    position: int | None
    argument: str


@dataclass(frozen=True)
class _Plan:
    """A parsed constraint."""

    faults: tuple[_Fault, ...] = ()
    length: int = 12
    seed: int = 0
    touch: str = ""
    once: str = ""

    @classmethod
    def parse(cls, source: str) -> _Plan:
        faults: list[_Fault] = []
        settings: dict[str, str] = {}
        for word in source.split():
            head, _, argument = word.partition("=")
            action, at, where = head.partition("@")
            if at:
                place, _, position = where.partition(":")
                faults.append(_Fault(action, place, int(position) if position else None, argument))
            else:
                settings[head] = argument
        length = int(settings.get("length", 12))
        seed = int.from_bytes(f"{settings.get('name', '')} {length}".encode()) % 2**61
        return cls(tuple(faults), length, seed, settings.get("touch", ""), settings.get("once", ""))

    def reach(self, place: str, position: int | None = None) -> str:
        """Run the faults at this place. Returns the action that the caller must do, if any."""
        for fault in self.faults:
            if fault.place != place or fault.position not in (None, position):
                continue
            if self.once:
                if Path(self.once).exists():
                    continue
                Path(self.once).touch()
            if self.touch:
                written = Path(f"{self.touch}.{os.getpid()}")
                written.write_text(str(os.getpid()))
                written.rename(self.touch)  # atomic: a reader never gets an empty file
            if fault.action in ("empty", "reject"):
                return fault.action
            _ACTIONS[fault.action](fault.argument)
        return ""


def _raise(error: BaseException) -> None:
    raise error


def _hold(argument: str) -> None:
    # PyDLL keeps the GIL during the call. It uses no CPU.
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(3600)


def _wait(argument: str) -> None:
    while not Path(argument).exists():
        time.sleep(0.005)


def _eat(argument: str) -> None:
    eaten: list[bytearray] = []
    while 32 * len(eaten) < int(argument or 4096):
        eaten.append(bytearray(os.urandom(1) * (32 << 20)))
        time.sleep(0.005)
    while True:
        time.sleep(1)


_ACTIONS: dict[str, Callable[[str], object]] = {
    "raise": lambda argument: _raise(ValueError("the library raised")),
    "panic": lambda argument: _raise(Panic("the library panicked")),
    "segfault": lambda argument: ctypes.string_at(0),
    "abort": lambda argument: os.abort(),
    "exit": lambda argument: os._exit(3),
    "hold": _hold,
    "spin": lambda argument: sum(range(10**18)),
    "sleep": lambda argument: time.sleep(float(argument)),
    "wait": _wait,
    "eat": _eat,
}


class _Matcher(Matcher):
    def __init__(self, grammar: _Grammar, tokens: list[int]) -> None:
        self._grammar = grammar
        self._tokens = tokens

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            action = self._grammar.plan.reach("accept", len(self._tokens))
            legal = token in self._grammar.stop if self.is_accepting() else bool(self._allowed()[token])
            if action == "reject" or self.is_terminated() or not legal:
                raise TokenRejected(f"token {token} is not allowed here")
            self._tokens.append(token)

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        empty = self._grammar.plan.reach("fill", len(self._tokens)) == "empty"
        row[:] = 0
        if not empty and not self.is_accepting():
            bits = np.packbits(self._allowed(), bitorder="little")
            row.view(np.uint8)[: len(bits)] = bits
        return self.is_accepting()

    def _allowed(self) -> NDArray[np.bool_]:
        grammar = self._grammar
        drawn = np.random.default_rng([grammar.plan.seed, *self._tokens]).random(grammar.size) < 0.5
        drawn[list(grammar.stop)] = False
        return drawn

    def rollback(self, count: int) -> None:
        if count > len(self._tokens):
            raise BackendError("nothing to roll back")
        del self._tokens[len(self._tokens) - count :]

    def fork(self) -> _Matcher:
        return _Matcher(self._grammar, list(self._tokens))

    def is_accepting(self) -> bool:
        return len(self._tokens) >= self._grammar.plan.length

    def is_terminated(self) -> bool:
        return len(self._tokens) > self._grammar.plan.length

    def forced_tokens(self) -> list[int]:
        return []


@dataclass
class _Grammar(CompiledGrammar):
    plan: _Plan
    size: int
    stop: frozenset[int]

    def matcher(self) -> _Matcher:
        self.plan.reach("open")
        return _Matcher(self, [])

    def dump(self) -> bytes:
        return b""


class FaultyBackend:
    """See the module."""

    name: ClassVar[str] = NAME
    kinds: ClassVar[frozenset[ConstraintKind]] = KINDS

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = vocabulary.vocab_size
        self._stop = frozenset(vocabulary.stop_token_ids)

    def compile(self, constraint: Constraint) -> _Grammar:
        return self._grammar(constraint, "compile")

    def load(self, constraint: Constraint, dumped: bytes) -> _Grammar:
        return self._grammar(constraint, "load")

    def _grammar(self, constraint: Constraint, place: str) -> _Grammar:
        plan = _Plan.parse(constraint.source)
        plan.reach(place)
        return _Grammar(plan, self._size, self._stop)
