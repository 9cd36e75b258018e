"""Random requests: every kind of constraint on every backend that supports it, unconstrained ones, several choices,
streamed and not."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from benchmarks.chaos.examples import EXAMPLES, PLAIN_PROMPTS, Example, fresh
from guided.backends import AUTO, BACKENDS
from guided.constraint import KINDS, ConstraintKind

ClientBehavior = Literal["reads", "leaves", "stalls"]
Path = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Path = "/v1/chat/completions"
COMPLETIONS: Path = "/v1/completions"
ABLE: list[tuple[ConstraintKind, str]] = [
    (kind, backend)
    for kind in KINDS
    for backend in (AUTO, *BACKENDS)
    if backend == AUTO or kind in BACKENDS[backend].kinds
]
"""Every (kind, backend) that must work."""


@dataclass(frozen=True)
class Request:
    """One HTTP request."""

    number: int
    path: Path
    body: dict[str, Any]
    example: Example | None = None
    """The constraint; None for an unconstrained request."""
    backend: str | None = None
    behavior: ClientBehavior = "reads"
    """"leaves": the client disconnects early. "stalls": it stops reading for some seconds, then leaves."""
    hostile: str | None = None
    """Id of the hostile input, if it is one."""

    @cached_property
    def content(self) -> bytes:
        """The encoded body."""
        return json.dumps(self.body).encode()

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def good(self) -> bool:
        """Whether it must get a valid answer under any fault."""
        return self.hostile is None and self.behavior == "reads"

    @property
    def key(self) -> str | None:
        """A key that is equal for requests with equal outputs, or None if the output is random."""
        if self.hostile is not None or self.body.get("temperature") != 0:
            return None
        kept = {name: value for name, value in self.body.items() if name not in ("stream", "stream_options", "n")}
        return json.dumps([self.path, kept], sort_keys=True)


@dataclass(frozen=True)
class Mix:
    """Shares of the traffic, 0 to 1."""

    plain: float = 0.25
    fresh: float = 0.1
    """Of the constrained requests: those with a new constraint."""
    streamed: float = 0.5
    several: float = 0.1
    """Requests with n of 2 or 3."""
    random: float = 0.3
    """Of the constrained requests: those with temperature 1."""
    leaving: float = 0.03
    stalling: float = 0.01


class Traffic:
    """An endless, reproducible sequence of requests."""

    def __init__(self, seed: int = 0, mix: Mix | None = None) -> None:
        self._seed = seed
        self._mix = mix or Mix()

    def request(self, number: int) -> Request:
        """Return the `number`th request, the same at every call."""
        source, mix = random.Random(f"{self._seed}:{number}"), self._mix
        if source.random() < mix.plain:
            made = plain(number, source.randrange(len(PLAIN_PROMPTS)))
        else:
            kind, backend = source.choice(ABLE)
            is_fresh = source.random() < mix.fresh and kind != "json_object"
            example = fresh(kind, source) if is_fresh else source.choice(EXAMPLES[kind])
            made = constrained(number, example, backend, CHAT if source.random() < 0.7 else COMPLETIONS)
            if source.random() < mix.random:
                made.body.update(temperature=1.0, seed=number)
        if source.random() < mix.streamed:
            made.body.update(stream=True)
        if source.random() < mix.several:
            made.body.update(n=source.choice((2, 3)))
        chance = source.random()
        behavior: ClientBehavior = "reads"
        if chance < mix.leaving:
            behavior = "leaves"
        elif chance < mix.leaving + mix.stalling and made.stream:
            behavior = "stalls"
        return Request(number, made.path, made.body, made.example, made.backend, behavior)

    @staticmethod
    def repeated() -> list[Request]:
        """Return one of each repeated request with a deterministic output, for the reference outputs."""
        requests = [plain(index, index) for index in range(len(PLAIN_PROMPTS))]
        for kind, backend in ABLE:
            for example in EXAMPLES[kind]:
                for path in (CHAT, COMPLETIONS):
                    requests.append(constrained(len(requests), example, backend, path))
        return requests


def plain(number: int, prompt: int) -> Request:
    """Return an unconstrained greedy request."""
    messages = [{"role": "user", "content": PLAIN_PROMPTS[prompt]}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24 + prompt, "ignore_eos": True}
    return Request(number, CHAT, body)


def constrained(number: int, example: Example, backend: str, path: Path) -> Request:
    """Return a constrained greedy request."""
    body: dict[str, Any] = {example.kind: example.value, "backend": backend, "temperature": 0, "max_tokens": 80}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": example.prompt}]
    else:
        body["prompt"] = example.prompt + "\n"
    return Request(number, path, body, example, backend)
