"""MaskBench's protocol: does a compiled schema accept its valid instances, reject the invalid ones, and how fast?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jsonschema import Draft202012Validator

from guided.backend_process import BackendProcess, set_time_limit
from guided.backends import AUTO, Backends, candidates
from guided.backends.base import Matcher
from guided.backends.guarded import GuardedMatcher
from guided.bitmask import words
from guided.compilation import compile_constraint
from guided.constraint import Constraint
from guided.errors import CompileTimeout, GuidedError, InvalidConstraint, TokenRejected
from guided.schema import string_pattern
from guided.schema.form import NormalForm
from guided.schema.keywords import Schema
from guided.schema.normal_form import normalise
from guided.vocabulary import Vocabulary

Outcome = Literal["passes", "accepts invalid", "rejects valid", "refused", "timeout", "error"]
OUTCOMES: tuple[Outcome, ...] = ("passes", "accepts invalid", "rejects valid", "refused", "timeout", "error")
_REPLAY_SECONDS = 120.0
"""Time limit for the instances of an entry."""


@dataclass(frozen=True)
class Result:
    """The result of one entry."""

    id: str
    outcome: Outcome
    backend: str = ""
    """The backend that compiled the schema; empty if none did."""
    reason: str = ""
    """The error's message, or the instance that was not decided as expected."""
    pointer: str | None = None
    """JSON pointer to the refused part of the schema."""
    keyword: str = ""
    """The last keyword of the pointer."""
    reordered: bool = False
    """A valid instance was accepted only with its properties in the schema's order."""
    not_enforced: tuple[str, ...] = ()
    compile_seconds: float = 0.0
    """Includes the first mask."""
    mask_seconds: list[float] = field(default_factory=list)
    """For each mask along the instances, including the acceptance of the token after it."""
    library_seconds: list[float] = field(default_factory=list)
    """The same for the library without the guard, if there is a guard over it."""
    guarded: tuple[str, ...] = ()
    """The keywords that are guarded."""


def _judge(backends: Backends, entry: Mapping[str, Any], names: Sequence[str], seconds: float) -> Result:
    """Compile `entry["schema"]` and replay `entry["tests"]`, each `{"valid", "data"}`, token by token.

    Args:
        names: backends to try in order.
        seconds: time limit of the compilation. This process is killed after it.
    """
    set_time_limit(seconds)
    name = str(entry.get("id", ""))
    started = time.perf_counter()
    try:
        constraint = Constraint.json_schema(entry["schema"])
        result = compile_constraint(backends, constraint, names)
    except InvalidConstraint as error:
        return _refused(name, error)
    except GuidedError as error:
        return Result(name, "error", reason=str(error))
    compile_seconds = time.perf_counter() - started
    set_time_limit(_REPLAY_SECONDS)
    replay = _Replay(backends.vocabulary)
    outcome: Outcome = "passes"
    reason, reordered = "", False
    for test in entry["tests"]:
        try:
            accepted = replay.accepts(result.grammar.matcher(), test["data"])
            if test["valid"] and not accepted:
                ordered = in_schema_order(test["data"], normalise(json.loads(constraint.source)))
                accepted = replay.accepts(result.grammar.matcher(), ordered)
                reordered = reordered or accepted
        except GuidedError as error:
            return Result(name, "error", result.backend, str(error))
        if accepted != test["valid"] and outcome != "accepts invalid":
            outcome = "rejects valid" if test["valid"] else "accepts invalid"
            reason = json.dumps(test["data"], ensure_ascii=False)
    return Result(
        name,
        outcome,
        result.backend,
        reason,
        reordered=reordered,
        not_enforced=constraint.not_enforced,
        compile_seconds=compile_seconds,
        mask_seconds=replay.seconds,
        library_seconds=replay.library_seconds,
        guarded=result.grammar.guarded,
    )


def _refused(name: str, error: InvalidConstraint) -> Result:
    pointer = error.pointer
    named = [token for token in (pointer or "").split("/") if not token.isdecimal()]
    return Result(name, "refused", reason=error.message, pointer=pointer, keyword=named[-1] if named else "")


class _Replay:
    """Replays instances, and measures the masks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary.encode
        self._row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
        self.seconds: list[float] = []
        self.library_seconds: list[float] = []

    def accepts(self, matcher: Matcher, document: Any) -> bool:
        """Whether the matcher accepts `document` as JSON text, and every mask allows the token that follows."""
        trials = [(matcher, self.seconds)]
        if isinstance(matcher, GuardedMatcher):
            trials.append((matcher.inner.fork(), self.library_seconds))
        for token in self._encode(json.dumps(document, ensure_ascii=False)):
            accepted = [self._accept(*trial, token) for trial in trials]
            if not all(accepted):
                return False
            trials.reverse()  # the first one has the library's cold caches
        return matcher.is_accepting()

    def _accept(self, matcher: Matcher, seconds: list[float], token: int) -> bool:
        started = time.perf_counter()
        matcher.fill_bitmask(self._row)
        allowed = int(self._row[token >> 5]) >> (token & 31) & 1
        if allowed:
            try:
                matcher.accept_tokens([token])
            except TokenRejected:
                allowed = 0
        seconds.append(time.perf_counter() - started)
        return bool(allowed)


def in_schema_order(value: Any, form: NormalForm) -> Any:
    """Return `value` with its properties in the order of the schema, which a grammar may require."""
    return _Order(form).ordered(value, [form.root])


class _Order:
    def __init__(self, form: NormalForm) -> None:
        self._form = form
        self._validator = Draft202012Validator({"$defs": form.definitions})

    def ordered(self, value: Any, schemas: Iterable[Schema]) -> Any:
        """Return `value`, which satisfies all of `schemas`, in their order."""
        parts = [part for schema in schemas for part in self._parts(value, schema)]
        if isinstance(value, list):
            prefixes = [part.get("prefixItems", []) for part in parts]
            return [
                self.ordered(
                    item, [p[at] if at < len(p) else s.get("items", True) for p, s in zip(prefixes, parts, strict=True)]
                )
                for at, item in enumerate(value)
            ]
        if not isinstance(value, dict):
            return value
        names = dict.fromkeys(name for part in parts for name in part.get("properties", {}) if name in value)
        return {name: self.ordered(value[name], self._of(name, parts)) for name in {**names, **value}}

    def _of(self, name: str, parts: list[dict[str, Any]]) -> Iterator[Schema]:
        for part in parts:
            yield part.get("properties", {}).get(name, part.get("additionalProperties", True))
            with suppress(InvalidConstraint):  # a pattern that we can't read
                for pattern, schema in part.get("patternProperties", {}).items():
                    if string_pattern.matches(pattern, name):
                        yield schema

    def _parts(self, value: Any, schema: Schema) -> Iterator[dict[str, Any]]:
        """Yield the subschemas with keywords of their own that apply to `value`."""
        if isinstance(schema, bool):
            return
        if "$ref" in schema:
            yield from self._parts(value, self._form.target(schema))
        for part in schema.get("allOf", ()):
            yield from self._parts(value, part)
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            if self._validator.evolve(schema={"allOf": [part], "$defs": self._form.definitions}).is_valid(value):
                yield from self._parts(value, part)
                break
        yield schema


def judge_all(
    entries: Iterable[Mapping[str, Any]],
    vocabulary: Vocabulary,
    *,
    names: Sequence[str] | None = None,
    seconds: float = 10.0,
) -> Iterator[Result]:
    """Judge entries in order in another process. One that takes longer than `seconds` to compile is a `timeout`.

    After a timeout or a crash (an `error`), the process is replaced.
    """
    names = names or candidates("json_schema", AUTO)
    process = BackendProcess(vocabulary, names)
    try:
        for entry in entries:
            try:
                result: Result = process.call(_judge, entry, names, seconds)
            except GuidedError as error:
                outcome: Outcome = "timeout" if isinstance(error, CompileTimeout) else "error"
                result = Result(str(entry.get("id", "")), outcome, reason=error.message)
            if result.outcome == "error":
                process.stop()
            yield result
    finally:
        process.stop()
