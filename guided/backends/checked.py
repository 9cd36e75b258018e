"""Checked grammars: the library enforces a superset of a schema, and the document is validated before it may end."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from guided.backends.base import Backend, CompiledGrammar, Matcher
from guided.backends.native import guard
from guided.backends.schema_lowering import TIERS
from guided.constraint import Constraint
from guided.errors import ConstraintNotMet, InvalidConstraint, TokenRejected, UnsupportedConstraint, bounded
from guided.number_limit import NumberLimit
from guided.schema.validation import Validator
from guided.vocabulary import Vocabulary

_CHECKED = b"checked:"
"""Prefix of the serialisation of a grammar that is checked."""
_native = guard("jsonschema-rs")


class _Dumped(msgspec.Struct, array_like=True):
    """A checked grammar, serialised."""

    grammar: bytes
    """The library's serialisation."""
    checked: list[str]
    leave_out: tuple[str, ...]
    """See `Backend.compile`."""


_decode = Decoder(_Dumped).decode


class CheckedBackend(Backend):
    """An adapter that also takes schemas of which its library enforces only a part: the rest is checked.

    Args:
        inner: the adapter of a library.
    """

    name = "checked"

    def __init__(self, inner: Backend, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._numbers = NumberLimit(vocabulary)

    def compile(self, constraint: Constraint, leave_out: Collection[str] = ()) -> CompiledGrammar:
        """See `Backend.compile`. Leaves out more and more keywords of a schema that the library refuses."""
        refusal: UnsupportedConstraint | None = None
        for tier in TIERS:
            leave_out = (*leave_out, *tier)
            try:
                grammar = self._inner.compile(constraint, leave_out)
            except UnsupportedConstraint as error:
                refusal = refusal or error
                if constraint.kind != "json_schema" or constraint.strict:
                    break
            else:
                dumped = _Dumped(grammar.dump(), list(grammar.checked), leave_out) if grammar.checked else None
                return self._whole(constraint, grammar, dumped)
        assert refusal is not None
        raise refusal

    def load(self, constraint: Constraint, dumped: bytes, leave_out: Collection[str] = ()) -> CompiledGrammar:
        """See `Backend.load`."""
        if not dumped.startswith(_CHECKED):
            return self._whole(constraint, self._inner.load(constraint, dumped, leave_out), None)
        found = _decode(dumped.removeprefix(_CHECKED))
        return self._whole(constraint, self._inner.load(constraint, found.grammar, found.leave_out), found)

    def _whole(self, constraint: Constraint, grammar: CompiledGrammar, dumped: _Dumped | None) -> CompiledGrammar:
        """Return a library's grammar with the final check, where something is checked, and the limit of numbers."""
        if dumped is not None:
            grammar = CheckedGrammar(grammar, _validator(constraint), self._vocabulary, dumped)
        grammar.numbers = self._numbers if constraint.kind in ("json_schema", "json_object") else None
        return grammar


def _validator(constraint: Constraint) -> Validator:
    try:
        with _native:
            return Validator(json.loads(constraint.source))
    except ValueError as error:
        raise InvalidConstraint(f"the schema can't be validated: {bounded(error)}", param="json_schema") from None


class CheckedGrammar(CompiledGrammar):
    """A library's grammar of a superset, and the validator of the schema."""

    def __init__(self, inner: CompiledGrammar, validator: Validator, vocabulary: Vocabulary, dumped: _Dumped) -> None:
        self._inner = inner
        self._dumped = dumped
        self.validator = validator
        self.vocabulary = vocabulary
        self.checked = tuple(dumped.checked)

    def matcher(self) -> CheckedMatcher:
        return CheckedMatcher(self, self._inner.matcher(), [])

    def dump(self) -> bytes:
        """See `CompiledGrammar.dump`."""
        return _CHECKED + encode(self._dumped)


class CheckedMatcher(Matcher):
    """One sequence: the library's matcher and the tokens."""

    def __init__(self, grammar: CheckedGrammar, inner: Matcher, tokens: list[int]) -> None:
        self._grammar = grammar
        self._inner = inner
        self._tokens = tokens
        self._validated = -1
        """Number of tokens of the document that was validated last."""
        self._violation: ConstraintNotMet | None = None
        """The result of that."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        if token_ids and token_ids[-1] in self._grammar.vocabulary.stop_token_ids:
            self._accept(token_ids[:-1])
            if not self.is_accepting():
                raise TokenRejected(f"stop token {token_ids[-1]} is not allowed here: the constraint is not satisfied")
            token_ids = token_ids[-1:]
        self._accept(token_ids)

    def _accept(self, token_ids: Sequence[int]) -> None:
        self._inner.accept_tokens(token_ids)
        self._tokens.extend(token_ids)

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        return self._inner.fill_bitmask(row) and self.violation() is None

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)
        if count:
            del self._tokens[-count:]
            self._validated = -1

    def fork(self) -> CheckedMatcher:
        return CheckedMatcher(self._grammar, self._inner.fork(), list(self._tokens))

    def is_accepting(self) -> bool:
        return self._inner.is_accepting() and self.violation() is None

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def forced_tokens(self) -> list[int]:
        return self._inner.forced_tokens()

    def violation(self) -> ConstraintNotMet | None:
        """Return why the output may not end, though the library has it complete."""
        if self._validated != len(self._tokens):
            self._validated, self._violation = len(self._tokens), None
            if self._inner.is_accepting():
                with _native:
                    self._violation = self._grammar.validator.violation(self._grammar.vocabulary.decode(self._tokens))
        return self._violation
