"""Adapter for outlines-core: one automaton over tokens, built in advance; then each step is a look-up.

Compilation takes a second on average, in one case of five over ten seconds, and gigabytes at worst: run it in a process
that may be killed.

Properties of the library that the adapter compensates:

- Its automata prefer the first alternative (`yes|yes please` allows `yes` only), unless the pattern ends with `$`. A
  pattern that ends with `$` can't match the empty text, so the empty text is handled apart.
- It knows one end-of-sequence token only, so the adapter handles stop tokens.
- A regex can't count levels. So `json_object` allows three: the object, and objects and arrays within values of it.
- It reads a subschema by its first keyword of `properties`, `allOf`, `anyOf`, `oneOf`, `prefixItems`, `enum`, `const`,
  `$ref`, `type`, ignores others, and puts patterns between quotes unchanged. So it gets one of them at a time.
- An `Index` lists a state's tokens only as a Python list: milliseconds where much is allowed. A `Guide` writes them as
  bits, ten to twenty times faster, but only for its current state: it repeats the tokens that lead there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, ClassVar

import numpy as np
import outlines_core
from numpy.typing import NDArray
from outlines_core.json_schema import build_regex_from_schema

from guided import regex
from guided.backends.base import Backend
from guided.backends.few_keywords import FewKeywords
from guided.backends.matchers import StateGrammar
from guided.backends.native import guard
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import UnsupportedConstraint, bounded
from guided.schema import string_pattern
from guided.schema.keywords import Schema
from guided.vocabulary import Vocabulary

_PLAIN = regex.Chars(string_pattern.PLAIN)
_native = guard("outlines")


class OutlinesBackend(Backend):
    """One vocabulary in outlines' own form, shared by all grammars."""

    name: ClassVar[str] = "outlines"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        tokens: dict[bytes, list[int]] = {}
        for token in vocabulary.text_token_ids:
            tokens.setdefault(vocabulary.token_bytes[token], []).append(token)
        with _native:
            self._tokens = outlines_core.Vocabulary(vocabulary.stop_token_ids[0], tokens)

    def compile(self, constraint: Constraint, leave_out: Collection[str] = ()) -> OutlinesGrammar:
        checked: tuple[str, ...] = ()
        if constraint.kind in ("json_schema", "json_object"):
            document = json.loads(constraint.source or '{"type": "object"}')
            lowering = _Lowering(document, leave_out=leave_out, strict=constraint.strict)
            pattern, empty = _json(lowering.document(), constraint.whitespace), False
            checked = tuple(lowering.checked)
        else:
            pattern, empty = self._pattern(constraint)
        try:
            index = outlines_core.Index(f"(?:{pattern})$", self._tokens)
        except ValueError as error:
            raise UnsupportedConstraint(
                f"outlines refuses the {constraint.kind}: {bounded(error)}", param=constraint.kind
            ) from None
        grammar = OutlinesGrammar(self._vocabulary, index, empty)
        grammar.checked = checked
        return grammar

    def load(self, constraint: Constraint, dumped: bytes, leave_out: Collection[str] = ()) -> OutlinesGrammar:
        with _native:
            index = outlines_core.Index.from_binary(dumped[1:])
        return OutlinesGrammar(self._vocabulary, index, dumped[:1] == b"\x01")

    def _pattern(self, constraint: Constraint) -> tuple[str, bool]:
        """Return the constraint as one regex without the empty text, and whether it allows the empty text."""
        match constraint.kind:
            case "regex":
                node = regex.parse(constraint.source)
                rest = regex.nonempty(node)
                if rest is None:
                    raise UnsupportedConstraint(
                        "outlines can't enforce a regex that only the empty text matches", param="regex"
                    )
                return regex.render(rest), regex.nullable(node)
            case "choice":
                return regex.render(regex.choice(map(regex.literal, constraint.choices))), False
        raise UnsupportedConstraint(
            f"backend 'outlines' does not support {constraint.kind!r} constraints", param=constraint.kind
        )


def _json(schema: dict[str, Any], whitespace: str | None) -> str:
    """Return a schema in outlines' terms as a regex."""
    spaces = f"(?:{string_pattern.whitespace(whitespace)})" if whitespace else whitespace
    try:
        built: str = build_regex_from_schema(json.dumps(schema, ensure_ascii=False), spaces)
    except ValueError as error:
        raise UnsupportedConstraint(f"outlines refuses the schema: {bounded(error)}", param="json_schema") from None
    return built


class _Lowering(FewKeywords):
    """Objects have the named properties in this order and no others, arrays with `prefixItems` exactly these items.

    Strings with a length or a pattern have no escapes: with them, 20 characters take a minute to compile.
    """

    library = "outlines"
    enforced: ClassVar[dict[str, tuple[str, ...]]] = {
        "string": ("minLength", "maxLength", "pattern", "format"),
        "array": ("items", "prefixItems", "minItems", "maxItems"),
        "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    }

    def __init__(self, schema: Schema, *, leave_out: Collection[str] = (), strict: bool = False) -> None:
        super().__init__(schema, leave_out=leave_out, strict=strict)
        self._open: list[str] = []
        """The references that are being expanded."""

    def any_value(self) -> dict[str, Any]:
        return {"anyOf": [{}]}  # alone, `{}` becomes alternatives without parentheses

    def reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        if schema["$ref"] in self._open:
            raise self.refusal(schema, "$ref", " that is recursive: a regex can't count levels")
        self._open.append(schema["$ref"])
        expanded = self.lower(self.form.target(schema))
        self._open.pop()
        return expanded

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        for value in values:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            if not re.fullmatch(build_regex_from_schema(json.dumps({"const": value}), ""), text):
                raise self.refusal(schema, keyword, f" with {bounded(text, 60)}")  # some numbers are rounded
        return {"enum": values}

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        conditions = [name for name in ("format", "pattern", "minLength", "maxLength") if name in schema]
        if not conditions:
            return {"type": "string"}
        if conditions[0].endswith("Length"):
            most = schema.get("maxLength")
            return self._matching(
                regex.repeat(_PLAIN, int(schema.get("minLength", 0)), None if most is None else int(most))
            )
        if len(conditions) > 1:
            raise self.refusal(schema, conditions[1], f" next to {conditions[0]!r}")
        if "format" in schema:
            if schema["format"] != "uuid":
                raise self.refusal(schema, "format", f" {schema['format']}")
            return {"type": "string", "format": "uuid"}
        plain = regex.within(self.parse_pattern(schema), string_pattern.PLAIN)
        if plain is None:
            raise self.refusal(schema, "pattern", " that only text with escaped characters matches")
        return self._matching(plain)

    def _matching(self, pattern: regex.Node) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^(?:{regex.render(pattern)})$"}

    def name(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1]  # outlines does not escape names


class OutlinesGrammar(StateGrammar):
    """An automaton over tokens, and the masks of its states."""

    def __init__(self, vocabulary: Vocabulary, index: Any, accepts_empty: bool) -> None:
        self.vocabulary = vocabulary
        self.accepts_empty = accepts_empty
        self.start = int(index.get_initial_state())
        self._words = words(vocabulary.padded_vocab_size)
        self._index = index
        self._guide = outlines_core.Guide(index)
        self._reached: dict[int, tuple[int, int]] = {}
        """State -> the state and the token from which it was first reached."""
        with _native:
            _, (binary,) = index.__reduce__()
        self._dumped = bytes([accepts_empty]) + bytes(binary)

    def dump(self) -> bytes:
        """Return one byte (whether the empty text matches), then the automaton in outlines' own serialisation."""
        return self._dumped

    def next_state(self, state: int, token: int) -> int | None:
        if not 0 <= token < self.vocabulary.padded_vocab_size:
            return None
        with _native:
            reached: int | None = self._index.get_next_state(state, token)
        if reached is not None and reached not in self._reached:
            self._reached[reached] = state, token
        return reached

    def is_final(self, state: int) -> bool:
        with _native:
            return bool(self._index.is_final_state(state))

    def mask(self, state: int) -> NDArray[np.int32]:
        row = np.empty(self._words, dtype=np.int32)
        with _native:
            self._guide.reset()
            for token in self.path(state):
                self._guide.advance(token, return_tokens=False)
            self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
        return row

    def path(self, state: int) -> list[int]:
        """Return the tokens that lead from the start to `state`, which was reached before, without a loop."""
        path: list[int] = []
        while state != self.start:
            state, token = self._reached[state]
            path.append(token)
        return path[::-1]
