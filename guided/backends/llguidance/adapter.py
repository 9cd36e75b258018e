"""Adapter for llguidance: every kind of constraint, compiled in a millisecond, masks in
tens of microseconds.

In llguidance, errors are states: a matcher that exceeded its limits, or got a wrong
token, gives a mask that allows end-of-sequence only. So the adapter checks the error
state after every call and raises a `BackendError`, or an `UnsupportedConstraint` where
the constraint exceeds llguidance's limits.

What only `compile` needs is imported there: a mask worker loads compiled grammars.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING

import llguidance

from guided.backends.base import Backend, CompiledGrammar, TextMatcher
from guided.bitmask import Bitmask
from guided.constraint import LINE_BREAK, Constraint
from guided.errors import (
    BackendError,
    DeadEnd,
    InvalidConstraint,
    TokenRejected,
    UnsupportedConstraint,
    bounded,
)
from guided.json_text import JsonObject
from guided.vocabulary import TokenIds, Vocabulary

if TYPE_CHECKING:
    from guided.backends.llguidance.schema import LLGuidanceLowering

_VERSION = metadata.version("llguidance")
REPEATS_WHITESPACE = tuple(map(int, _VERSION.split(".")[:2])) < (1, 8)
"""Whether llguidance allows several matches of `whitespace_pattern` in a row: 1.7.6
does, which vLLM 0.33 pins; 1.9.1 does not. The separators of items and keys are never
repeated."""

_LEXER_FUEL = 2_000_000
"""Maximum number of expressions that the lexer makes for one token. With llguidance's
default, a tenth of it, `^(\\S+\\s+){0,99}\\S+$` up to 5,000 characters compiles, and
fails at its second token."""
_EXCEEDED = re.compile(r"too many|\bmax is\b|limit|fuel", re.IGNORECASE)
"""Matches llguidance's messages about exceeded limits."""


class LLGuidanceBackend(Backend):
    """One tokenizer, shared by all grammars."""

    breaks_lines_anywhere = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            _Tokenizer(vocabulary),
            n_vocab=vocabulary.padded_vocab_size,
            eos_token=list(vocabulary.stop_token_ids),
        )

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        from guided.backends.llguidance.tag import TagGrammar

        if constraint.kind == "structural_tag":
            tag = TagGrammar(constraint, self._vocabulary.special_names, self._inner)
            grammar = self._grammar(
                constraint, json.dumps(tag.source()), tag.special_token_ids
            )
            grammar.checked = tuple(tag.checked)
        else:
            source, checked = self._source(constraint)
            grammar = self._grammar(constraint, source)
            grammar.checked = tuple(checked)
        return grammar

    def load(self, constraint: Constraint, dumped: memoryview) -> CompiledGrammar:
        source, special = json.loads(bytes(dumped))
        return self._grammar(constraint, source, special)

    def _grammar(
        self, constraint: Constraint, source: str, special: Iterable[int] = ()
    ) -> CompiledGrammar:
        limits = None
        if constraint.kind != "grammar":
            # Maximum number of parser items at one position (`max_items_in_row`).
            # llguidance's default admits only 498 optional properties of an object.
            # Grammars keep the default, because they may be so ambiguous that a mask
            # takes seconds.
            limits = llguidance.LLParserLimits(
                max_items_in_row=50_000,
                initial_lexer_fuel=2 * _LEXER_FUEL,
                step_lexer_fuel=_LEXER_FUEL,
            )
        matcher = llguidance.LLMatcher(
            self._tokenizer, source, log_level=0, limits=limits
        )
        if matcher.is_error():
            raise _refusal(matcher.get_error(), constraint)
        return LLGuidanceGrammar(self._vocabulary, matcher, source, frozenset(special))

    def _source(self, constraint: Constraint) -> tuple[str, list[str]]:
        """Return the constraint in llguidance's own format, and the pointers of the
        keywords that are left out."""
        from guided.backends.grammar import check_lark
        from guided.backends.llguidance.schema import LLGuidanceLowering
        from guided.regex import tree as regex

        make = llguidance.LLMatcher
        match constraint.kind:
            case "json_schema" | "json_object":
                lowering = LLGuidanceLowering(constraint)
                try:
                    return _json_source(lowering, constraint.whitespace), list(
                        lowering.checked
                    )
                except ValueError as error:  # more than 128 levels
                    raise _refusal(str(error), constraint) from None
            case "grammar":
                return str(make.grammar_from_lark(check_lark(constraint.source))), []
        texts = constraint.texts
        assert texts is not None
        return str(make.grammar_from_regex(regex.render(texts))), []

    def _inner(self, content: Constraint) -> tuple[JsonObject, list[str]]:
        """Return a content of a structural tag as an entry of llguidance's list of
        grammars; see `_source`."""
        if content.kind == "grammar":
            from guided.backends.grammar import check_lark

            # its errors point to this content
            self._grammar(content, self._source(content)[0])
            return {"lark_grammar": check_lark(content.source)}, []
        source, checked = self._source(content)
        return json.loads(source)["grammars"][0], checked


@dataclass(eq=False)
class LLGuidanceGrammar(CompiledGrammar):
    """A matcher at the start. Each sequence gets a copy; copies share the automaton of
    the lexer."""

    vocabulary: Vocabulary
    start: llguidance.LLMatcher
    source: str
    special_token_ids: frozenset[int]

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.vocabulary, self.start.deep_copy())

    def dump(self) -> bytes:
        """Return the constraint in llguidance's own format: matchers can't be
        serialised."""
        return json.dumps([self.source, sorted(self.special_token_ids)]).encode()


class LLGuidanceMatcher(TextMatcher):
    """One sequence. The adapter handles stop tokens: llguidance's matcher sees text
    tokens only."""

    def __init__(self, vocabulary: Vocabulary, matcher: llguidance.LLMatcher) -> None:
        super().__init__(vocabulary)
        self._vocabulary = vocabulary
        self.native = matcher
        """The library's own matcher."""

    def accept_text(self, token_ids: list[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self._vocabulary.padded_vocab_size:
            raise TokenRejected("a token id outside the vocabulary")
        accepted = self.native.try_consume_tokens(token_ids)
        if accepted < len(token_ids):
            self._check()
            # shows whether the lexer, which copies share, is over a limit
            self.native.compute_bitmask()
            with contextlib.suppress(DeadEnd):
                self._check()
            raise TokenRejected(f"token {token_ids[accepted]} is not allowed here")

    def fill_bitmask(self, row: Bitmask) -> bool:
        """See `Matcher.fill_bitmask`. Written in place, without a copy."""
        self.native.unsafe_compute_mask_ptr(
            addressof(c_char.from_buffer(row.data)), row.nbytes
        )
        self._check()
        return self._vocabulary.allows_stop(row)

    def rollback_text(self, count: int) -> None:
        self.native.rollback(count)
        self._check()

    def copy_state(self) -> None:
        self.native = self.native.deep_copy()

    def is_accepting(self) -> bool:
        accepting = self.native.is_accepting()
        self._check()
        return bool(accepting)

    def accepts(self, token_ids: TokenIds) -> int:
        return int(self.native.validate_tokens(list(token_ids)))

    def forced_tokens(self) -> list[int]:
        if self._terminated:
            return []
        tokens = self.native.compute_ff_tokens()
        self._check()
        return [int(token) for token in tokens if token not in self._stop_token_ids]

    def _check(self) -> None:
        if self.native.is_error():
            # The first part is the error; the rest is the parser's state, which
            # contains the user's text.
            what = self.native.get_error().partition("<state>")[0].strip()
            if what == "NoExtensionBias":
                raise DeadEnd(
                    "no token is allowed here, and the constraint is not satisfied"
                )
            if _EXCEEDED.search(what):
                raise UnsupportedConstraint(
                    f"the constraint is too ambiguous, or has too many alternatives, for llguidance ({bounded(what)}): "
                    "simplify it, or choose another backend"
                )
            raise BackendError(f"llguidance: {bounded(what)}")


class _Tokenizer:
    """The tokenizer interface of `LLTokenizer`: the bytes of each id, the special ids,
    and encoding."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.stop_token_ids[0]
        text = vocabulary.text_token_ids
        # In llguidance, bytes that start with 0xFF mark a token that is no text.
        self.tokens = [
            b"\xff[%d]" % token for token in range(vocabulary.padded_vocab_size)
        ]
        for token in text:
            self.tokens[token] = vocabulary.token_bytes[token]
        self.special_token_ids = sorted(
            set(range(vocabulary.padded_vocab_size)).difference(text)
        )
        self._encode_short = lru_cache(maxsize=16384)(vocabulary.encode)

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode a text that a grammar forces. Short texts are cached, because property
        names recur."""
        if len(text) <= 64:
            return self._encode_short(text)
        return self._vocabulary.encode(text)


def _json_source(lowering: LLGuidanceLowering, whitespace: str | None) -> str:
    """Return a schema in llguidance's own format."""
    schema = lowering.document()
    # An unknown option is an error, so only those of version 1.7 are set here.
    options: JsonObject = {
        "lenient": False,
        "coerce_one_of": False,
        "json_allowed_escapes": None,
    }
    if lowering.names_properties:
        # Letters that may follow a backslash in JSON strings. Without `u`: llguidance
        # allows the same escapes in additional keys, so `{"\u0061": ...}` would evade
        # the schema of `a`.
        options["json_allowed_escapes"] = 'bfnrt"\\'
    elif not REPEATS_WHITESPACE:
        options["json_allow_general_unicode_escapes"] = True
    options |= _spaced(whitespace)
    return str(
        llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides=options
        )
    )


def _spaced(whitespace: str | None) -> JsonObject:
    """Return the whitespace between JSON tokens as options. (The separators are regexes
    in all releases.)"""
    if whitespace and REPEATS_WHITESPACE:
        raise UnsupportedConstraint(
            f"llguidance {_VERSION} takes any number of matches of whitespace_pattern in a row, instead of one; "
            "leave the pattern out, or use another backend",
            param="whitespace_pattern",
        )
    from guided.schema import string_pattern

    if whitespace is None:
        pattern = LINE_BREAK
        blank = " ?"
    else:
        pattern = string_pattern.whitespace(whitespace)
        blank = ""
    return {
        "item_separator": f",{blank}",
        "key_separator": f":{blank}",
        "whitespace_flexible": pattern != "",
        "whitespace_pattern": pattern or None,
    }


def _refusal(message: str, constraint: Constraint) -> Exception:
    """Return the error for a message of llguidance."""
    said = message.partition("<state>")[0].rstrip()
    if constraint.kind != "grammar":
        said = " ".join(said.split())  # it has lines, with a caret
    reason = bounded(said)
    if "nsatisfiable" in reason and constraint.kind != "json_schema":
        return InvalidConstraint(
            f"no output satisfies this {constraint.kind}: {reason}",
            param=constraint.kind,
        )
    if constraint.kind == "grammar":
        where = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", reason)
        return InvalidConstraint(
            f"llguidance can't read the grammar: {where}", param=constraint.kind
        )
    return UnsupportedConstraint(
        f"llguidance can't enforce this {constraint.kind}: {reason}",
        param=constraint.kind,
    )
