"""Checked grammars: the library enforces a superset of a schema, and the document is
validated before it may end.

The same holds for the schemas of a structural tag: a content is validated where it
ends, because free text may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.msgpack import Decoder, encode

from guided.backends.base import (
    Backend,
    CompiledGrammar,
    Matcher,
    OutputRule,
    TextMatcher,
)
from guided.backends.literals import literals
from guided.backends.rules import LineBreaks, NumberLimit, token_limit
from guided.bitmask import Bitmask
from guided.constraint import Constraint, ConstraintKind
from guided.errors import (
    ConstraintNotMet,
    InvalidConstraint,
    UnsupportedConstraint,
    bounded,
)
from guided.tags.structural_tag import Content, contents
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    from guided.backends.content_reader import ContentReader, Reading
    from guided.schema.beginnings import Beginnings

_CHECKED = b"checked:"
"""Prefix of the serialisation of a grammar that is checked."""


_decode = Decoder(tuple[memoryview, tuple[str, ...], tuple[str, ...]]).decode
"""Reads the library's serialisation, `CompiledGrammar.checked` and
`Constraint.leave_out`."""


class CheckedBackend(Backend):
    """An adapter that also takes schemas of which its library enforces only a part: the
    rest is checked.

    Args:
        inner: the adapter of a library.
    """

    def __init__(self, inner: Backend, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._numbers = NumberLimit(vocabulary)
        self._line_breaks = (
            LineBreaks(vocabulary) if inner.breaks_lines_anywhere else None
        )

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """See `Backend.compile`. Leaves out more and more keywords of a schema that the
        library refuses."""
        from guided.backends.schema_lowering import TIERS

        if "grammar" in _kinds(constraint) and constraint.kind == "structural_tag":
            # where such a content ends is not known here
            constraint = replace(constraint, strict=True)
        refusal: UnsupportedConstraint | None = None
        for tier in TIERS:
            constraint = replace(constraint, leave_out=(*constraint.leave_out, *tier))
            try:
                grammar = self._inner.compile(constraint)
            except UnsupportedConstraint as error:
                refusal = refusal or error
                if (
                    constraint.kind not in ("json_schema", "structural_tag")
                    or constraint.strict
                ):
                    break
            else:
                return self._whole(constraint, grammar, tuple(grammar.checked))
        assert refusal is not None
        raise refusal

    def load(self, constraint: Constraint, dumped: memoryview) -> CompiledGrammar:
        """See `Backend.load`."""
        if dumped[: len(_CHECKED)] != _CHECKED:
            return self._whole(constraint, self._inner.load(constraint, dumped), ())
        inner, checked, leave_out = _decode(dumped[len(_CHECKED) :])
        constraint = replace(constraint, leave_out=leave_out)
        return self._whole(constraint, self._inner.load(constraint, inner), checked)

    def _whole(
        self, constraint: Constraint, grammar: CompiledGrammar, checked: tuple[str, ...]
    ) -> CompiledGrammar:
        """Return a library's grammar with the final check, where something is checked,
        and the rules of the worker."""
        if checked:
            reader = _reader(constraint, checked, self._vocabulary)
            grammar = CheckedGrammar(grammar, reader, checked, constraint.leave_out)
        kinds = _kinds(constraint)
        limit = None
        if constraint.kind == "structural_tag":
            limit = token_limit(constraint.outline, self._vocabulary)
        grammar.literals = literals(constraint)
        rules: list[OutputRule] = []
        if not kinds.isdisjoint(("json_schema", "json_object")):
            rules.append(self._numbers)
            if constraint.whitespace is None:
                grammar.line_breaks = self._line_breaks
        if limit is not None:
            rules.append(limit)
        grammar.rules = rules
        return grammar


def _kinds(constraint: Constraint) -> set[ConstraintKind]:
    """Return the kinds of the contents of a structural tag, or the kind of another
    constraint."""
    if constraint.kind != "structural_tag":
        return {constraint.kind}
    return {content.kind for content in contents(constraint.outline)}


def _reader(
    constraint: Constraint, checked: Sequence[str], vocabulary: Vocabulary
) -> ContentReader:
    """Return the reader that validates the contents with a pointer in `checked`."""
    from guided.backends.content_reader import ContentReader

    # imported for the first grammar that is checked
    from guided.schema.beginnings import Beginnings

    if constraint.kind == "structural_tag":
        node = constraint.tag
    else:
        node = Content("json_schema", constraint.schema_text, "")
    schemas = {}
    for content in contents(node):
        within = (
            place for place in checked if f"{place}/".startswith(f"{content.pointer}/")
        )
        places = [place.removeprefix(content.pointer) for place in within]
        if places and content.kind == "json_schema":
            try:
                schemas[content.pointer] = Beginnings(
                    constraint.inner(content).value, places, content.pointer
                )
            except ValueError as error:
                message = f"the schema can't be validated: {bounded(error)}"
                raise InvalidConstraint(
                    message, param=constraint.kind, pointer=content.pointer
                ) from None
    return ContentReader(node, schemas, vocabulary)


class CheckedGrammar(CompiledGrammar):
    """A library's grammar of a superset, and the reader that validates its outputs."""

    def __init__(
        self,
        inner: CompiledGrammar,
        reader: ContentReader,
        checked: tuple[str, ...],
        leave_out: tuple[str, ...],
    ) -> None:
        self._inner = inner
        self._leave_out = leave_out
        self.reader = reader
        self.vocabulary = reader.vocabulary
        self.checked = checked
        self.special_token_ids = inner.special_token_ids

    def matcher(self) -> CheckedMatcher:
        return CheckedMatcher(self, self._inner.matcher())

    def dump(self) -> bytes:
        """See `CompiledGrammar.dump`."""
        return _CHECKED + encode((self._inner.dump(), self.checked, self._leave_out))


class CheckedMatcher(TextMatcher):
    """One sequence: the library's matcher, the tokens, and what was read of them."""

    def __init__(self, grammar: CheckedGrammar, inner: Matcher) -> None:
        super().__init__(grammar.vocabulary)
        self._grammar = grammar
        self._inner = inner
        self._readings = [grammar.reader.start]
        """What is known of longer and longer beginnings of the output."""

    def accept_text(self, token_ids: list[int]) -> None:
        self._inner.accept_tokens(token_ids)

    def fill_bitmask(self, row: Bitmask) -> bool:
        accepting = self._inner.fill_bitmask(row)
        if not (
            accepting or (self._grammar.reader.reads_tag and self._ends_with_bracket())
        ):
            return False
        violation = self.violation()
        if violation is not None and not self._readings[-1].states:
            row.fill(0)  # nothing can make it valid
        return accepting and violation is None

    def rollback_text(self, count: int) -> None:
        self._inner.rollback(count)
        while self._readings[-1].length > len(self._tokens):
            del self._readings[-1]

    def copy_state(self) -> None:
        self._inner, self._readings = self._inner.fork(), list(self._readings)

    def is_accepting(self) -> bool:
        return self._inner.is_accepting() and self.violation() is None

    def forced_tokens(self) -> list[int]:
        if self._terminated:
            return []
        return self._inner.forced_tokens()

    def open_content(self) -> tuple[Beginnings, int] | None:
        """Return the schema of the content that the output ends in, if it is checked,
        and the content's first byte."""
        reading = self._reading()
        return self._grammar.reader.open_content(
            reading, self._grammar.vocabulary.spelled(self._tokens)
        )

    def _reading(self) -> Reading:
        if self._readings[-1].length < len(self._tokens):
            text = self._grammar.vocabulary.spelled(self._tokens)
            self._readings.append(
                self._grammar.reader.read(self._readings[-1], text, len(self._tokens))
            )
        return self._readings[-1]

    def violation(self) -> ConstraintNotMet | None:
        """Return why the output may not go on, or why it may not end though the library
        has it complete."""
        reading = self._reading()
        if reading.complete or (reading.states and not self._inner.is_accepting()):
            return None
        return reading.violation or ConstraintNotMet(
            "the output could not be read as JSON", param="json_schema"
        )

    def _ends_with_bracket(self) -> bool:
        last = self._grammar.vocabulary.decode(self._tokens[-1:])
        return b"}" in last or b"]" in last
