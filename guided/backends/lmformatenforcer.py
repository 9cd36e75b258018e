"""Adapter for lm-format-enforcer: character-level parsers in Python. The slow backend: a mask takes milliseconds.

The library's `TokenEnforcer` is not used: it answers exceptions with end-of-sequence only, and stores every prefix for
ever. The adapter drives the library's parsers over the vocabulary as characters; equal states share a cached mask.

The backend is narrower than the constraint in these cases: strings with a `pattern` match it as a whole, without quotes
and backslashes; objects with named properties hold no others; large character classes of a regex are reduced to ASCII.
Where the library would be wider, the adapter refuses the schema (`lmformatenforcer_schema.py`) or enforces JSON's
syntax.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from guided import regex
from guided.backends.base import Backend
from guided.backends.character_tokens import CharacterTokens, cut
from guided.backends.lmformatenforcer_automata import Automaton, ChoiceAutomaton, RegexAutomaton, begins
from guided.backends.lmformatenforcer_json import JsonAutomaton
from guided.backends.lmformatenforcer_schema import lower
from guided.backends.mask_cache import MaskCache
from guided.backends.matchers import StateGrammar
from guided.backends.native import guard
from guided.bitmask import pack
from guided.constraint import Constraint
from guided.errors import GuidedError, UnsupportedConstraint, bounded
from guided.vocabulary import Vocabulary

_native = guard("lm-format-enforcer")

_State = tuple[Any, bytes]
"""An automaton's state, and the first bytes of an incomplete character."""


class LMFormatEnforcerBackend(Backend):
    """The vocabulary as characters, shared by all grammars.

    Args:
        masks: storage for masks. None: a new one.
    """

    name: ClassVar[str] = "lm-format-enforcer"

    def __init__(self, vocabulary: Vocabulary, masks: MaskCache | None = None) -> None:
        self._tokens = CharacterTokens(vocabulary)
        self._masks = MaskCache() if masks is None else masks

    def compile(self, constraint: Constraint) -> LMFormatEnforcerGrammar:
        try:
            automaton = self._automaton(constraint)
        except GuidedError:
            raise
        except Exception as error:  # the library raises bare Exceptions for what it doesn't know
            recursion = isinstance(error, RecursionError)
            reason = "it refers to itself with nothing in between" if recursion else f"{type(error).__name__}: {error}"
            raise UnsupportedConstraint(
                f"lm-format-enforcer can't enforce this {constraint.kind}: {bounded(reason)}", param=constraint.kind
            ) from error
        return LMFormatEnforcerGrammar(automaton, self._tokens, self._masks)

    def load(self, constraint: Constraint, dumped: bytes) -> LMFormatEnforcerGrammar:
        """Compile again: it takes milliseconds."""
        return self.compile(constraint)

    def _automaton(self, constraint: Constraint) -> Automaton:
        match constraint.kind:
            case "regex":
                pattern = regex.canonical(constraint.source, small_classes=True)
                # The library's automaton of an empty pattern has no alphabet.
                return RegexAutomaton(pattern, self._tokens) if pattern else ChoiceAutomaton([""], self._tokens)
            case "choice":
                return ChoiceAutomaton(constraint.choices, self._tokens)
        if constraint.whitespace:
            raise UnsupportedConstraint(
                "lm-format-enforcer has no whitespace pattern, only any whitespace and none", param="whitespace_pattern"
            )
        schema = {"type": "object"} if constraint.kind == "json_object" else json.loads(constraint.source)
        return JsonAutomaton(lower(schema), self._tokens, spaces=constraint.whitespace is None)


class LMFormatEnforcerGrammar(StateGrammar):
    """An automaton over characters, applied to tokens."""

    accepts_empty = False

    def __init__(self, automaton: Automaton, tokens: CharacterTokens, masks: MaskCache) -> None:
        self.vocabulary = tokens.vocabulary
        self.start: _State = (automaton.start, b"")
        self._automaton = automaton
        self._continuing = tokens.continuing
        self._masks = masks.of_grammar()

    def dump(self) -> bytes:
        """Return nothing: see `LMFormatEnforcerBackend.load`."""
        return b""

    def next_state(self, state: _State, token: int) -> _State | None:
        content = self.vocabulary.token_bytes[token] if 0 <= token < self.vocabulary.vocab_size else b""
        with _native:
            return self._after(*state, content) if content else None

    def is_final(self, state: _State) -> bool:
        automaton_state, pending = state
        with _native:
            return not pending and self._automaton.final(automaton_state)

    def mask(self, state: _State) -> NDArray[np.int32]:
        with _native:
            key = self.key(state)
            mask = None if key is None else self._masks.get(key)
            if mask is None:
                mask = self._mask(*state)
                if key is not None:
                    self._masks.put(key, mask, keeps=state[0])
            return mask

    def key(self, state: _State) -> tuple[Any, bytes] | None:
        """Return a key that is equal for states that allow the same tokens; None if that is not known."""
        automaton_state, pending = state
        key = self._automaton.key(automaton_state)
        return None if key is None else (key, pending)

    def _after(self, state: Any, pending: bytes, content: bytes) -> _State | None:
        parts = cut(pending + content)
        if parts is None:
            return None
        text, tail = parts
        for character in text:
            state = self._automaton.step(state, character)
            if state is None:
                return None
        return None if tail and not begins(self._automaton, state, tail) else (state, tail)

    def _mask(self, state: Any, pending: bytes) -> NDArray[np.int32]:
        if not pending:
            return self._automaton.mask(state)
        contents = self.vocabulary.token_bytes
        tokens = [token for token in self._continuing if self._after(state, pending, contents[token]) is not None]
        return pack(tokens, self.vocabulary.padded_vocab_size)
