"""A grammar library that fails as its grammar tells it to: in the compile process, in an actor, wherever it is.

The source of a `regex` or `grammar` constraint is a list of words: `ACTION@PLACE[:POSITION][=ARGUMENT]` are faults, the
others are settings. `faulty("segfault@fill:3")` makes one.

    raise        an exception                        segfault, abort, exit   the end of the process
    panic        one that is no `Exception`          hold     sleeps for ever, and holds the interpreter's lock
    empty        a mask without a token (at `fill`)  spin     computes for ever, and holds the interpreter's lock
    reject       a token of its own mask (`accept`)  sleep    `=SECONDS`, while other threads run
    leak         `=MIB` every time, for ever         wait     `=PATH`: until that file is there, while others run
    eat          memory, 32 MiB at a time, without end (at the most `=MIB`, 4096, then it waits for ever)

Places are `compile`, `load` (into an actor), `open` (a matcher), `accept` and `fill`; a position is how many tokens
there are, none is all of them. Mind that the first mask is computed where it is compiled too: `fill:0` happens there.

    length=N     sentences have so many tokens (default 12), then only the stop token is allowed
    name=TEXT    grammars of one name and length allow the same, whatever their faults
    touch=PATH   this file is made when a fault is reached; the process id stands in it
    once=PATH    a fault only happens where this file isn't there yet; it is made then

Which tokens are allowed is drawn from the whole history: a matcher that was brought there wrongly allows others.

In processes that have `PATHS` on their PYTHONPATH the backend is registered as "faulty" (`startup/sitecustomize.py`):
those of the `local_ray` fixture do, and those that are started with `environment()`. Elsewhere:
`monkeypatch.setitem(BACKENDS, "faulty", ADAPTER)`.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from guided.backends import Adapter
from guided.constraint import Constraint, ConstraintKind
from guided.errors import BackendError, TokenRejected
from guided.vocabulary import Vocabulary

NAME = "faulty"
KINDS: frozenset[ConstraintKind] = frozenset({"regex", "grammar"})
ADAPTER = Adapter("faulty_backend", "FaultyBackend", KINDS)
PATHS = (str(Path(__file__).parent / "startup"), str(Path(__file__).parent))


def environment() -> dict[str, str]:
    """Variables for a process that is to know this backend, and for those that it starts."""
    return {"PYTHONPATH": os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])}


def faulty(*words: str) -> Constraint:
    """A constraint for this backend; without a fault it is like any other."""
    return Constraint.regex(" ".join(words) or "sound")


class Panic(BaseException):
    """What a Rust panic is in Python: no `Exception`."""


@dataclass(frozen=True)
class _Fault:
    action: str
    place: str
    position: int | None
    argument: str


@dataclass(frozen=True)
class _Plan:
    """What a constraint's source says."""

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
        """Do what is to be done here. Returns the action that the caller has to do itself, if any."""
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
                written.rename(self.touch)  # who sees it can read it
            if fault.action in ("empty", "reject"):
                return fault.action
            _ACTIONS[fault.action](fault.argument)
        return ""


def _raise(argument: str) -> None:
    raise ValueError("the library raised")


def _panic(argument: str) -> None:
    raise Panic("the library panicked")


def _hold(argument: str) -> None:
    # PyDLL keeps the interpreter's lock; no core is kept busy.
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


_leaked: list[bytearray] = []

_ACTIONS: dict[str, Callable[[str], object]] = {
    "raise": _raise,
    "panic": _panic,
    "segfault": lambda argument: ctypes.string_at(0),
    "abort": lambda argument: os.abort(),
    "exit": lambda argument: os._exit(3),
    "hold": _hold,
    "spin": lambda argument: sum(range(10**18)),
    "sleep": lambda argument: time.sleep(float(argument)),
    "wait": _wait,
    "eat": _eat,
    "leak": lambda argument: _leaked.append(bytearray(os.urandom(1) * (int(argument) << 20))),
}


class _Matcher:
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

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        empty = self._grammar.plan.reach("fill", len(self._tokens)) == "empty"
        row[:] = 0
        if not empty and not self.is_accepting():
            bits = np.packbits(self._allowed(), bitorder="little")
            row.view(np.uint8)[: len(bits)] = bits

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


@dataclass(frozen=True)
class _Grammar:
    plan: _Plan
    size: int
    stop: frozenset[int]
    nbytes: int = field(default=100)

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
