"""lm-format-enforcer: character-level parsers in Python. The slow one: masks take milliseconds.

Its `TokenEnforcer` is not used: it swallows exceptions and answers with end-of-sequence only, and keeps every prefix
for ever. Its parsers are driven directly, over the vocabulary as characters; a parser's state belongs to one sequence,
masks are shared by equal states within a bounded cache.

It is narrower than the constraint here: strings with a `pattern` match all of it, without quotes and backslashes; where
properties are named, there are no others; big character classes of a regex are cut down to ASCII. Where it would be
wider, we refuse (`lmformatenforcer_schema.py`) or hold it to JSON's syntax.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from guided import regex
from guided.backends.character_tokens import OTHER, CharacterTokens, cut
from guided.backends.lmformatenforcer_automata import Automaton, ChoiceAutomaton, RegexAutomaton, begins
from guided.backends.lmformatenforcer_json import JsonAutomaton
from guided.backends.lmformatenforcer_schema import prepare
from guided.backends.mask_cache import MaskCache
from guided.bitmask import pack
from guided.constraint import Constraint, ConstraintKind
from guided.errors import BackendError, GuidedError, TokenRejected, UnsupportedConstraint, bounded
from guided.vocabulary import Vocabulary

__all__ = ["LMFormatEnforcerBackend"]

_MAX_FORCED = 64

_State = tuple[Any, bytes]
"""An automaton's state, and the bytes of a character that is not whole yet."""

T = TypeVar("T")


class LMFormatEnforcerBackend:
    """The vocabulary as characters, shared by all grammars.

    Args:
        masks: where masks are kept; one of its own where None.
    """

    name: ClassVar[str] = "lm-format-enforcer"
    kinds: ClassVar[frozenset[ConstraintKind]] = frozenset({"json_schema", "json_object", "regex", "choice"})

    def __init__(self, vocabulary: Vocabulary, masks: MaskCache | None = None) -> None:
        self._tokens = CharacterTokens(vocabulary)
        self._masks = MaskCache() if masks is None else masks

    def compile(self, constraint: Constraint) -> LMFormatEnforcerGrammar:
        """See `Backend.compile`."""
        try:
            automaton = self._automaton(constraint)
        except GuidedError:
            raise
        except RecursionError:
            raise UnsupportedConstraint(
                f"lm-format-enforcer can't enforce this {constraint.kind}: it refers to itself with nothing in between",
                param=constraint.kind,
            ) from None
        except Exception as error:  # it raises bare Exceptions for what it doesn't know
            said = f"{type(error).__name__}: {bounded(error)}"
            raise UnsupportedConstraint(
                f"lm-format-enforcer can't enforce this {constraint.kind}: {said}", param=constraint.kind
            ) from error
        return LMFormatEnforcerGrammar(automaton, self._tokens, self._masks, len(constraint.source))

    def load(self, constraint: Constraint, dumped: bytes) -> LMFormatEnforcerGrammar:
        """Compiling again takes milliseconds."""
        return self.compile(constraint)

    def _automaton(self, constraint: Constraint) -> Automaton:
        match constraint.kind:
            case "regex":
                return RegexAutomaton(regex.canonical(constraint.source, small_classes=True), self._tokens)
            case "choice":
                return ChoiceAutomaton(constraint.choices, self._tokens)
        if constraint.whitespace:
            raise UnsupportedConstraint(
                "lm-format-enforcer knows no whitespace pattern, only any whitespace and none",
                param="whitespace_pattern",
            )
        schema = {"type": "object"} if constraint.kind == "json_object" else json.loads(constraint.source)
        return JsonAutomaton(prepare(schema), self._tokens, spaces=constraint.whitespace is None)


class LMFormatEnforcerGrammar:
    """An automaton over characters; its states are immutable and shared."""

    def __init__(self, automaton: Automaton, tokens: CharacterTokens, masks: MaskCache, source_bytes: int) -> None:
        self.automaton = automaton
        self.characters = tokens
        self.masks = masks.of_grammar()
        self.nbytes = 32 * 1024 + 40 * source_bytes
        """An estimate."""

    def matcher(self) -> LMFormatEnforcerMatcher:
        """See `CompiledGrammar.matcher`."""
        return LMFormatEnforcerMatcher(self, [(self.automaton.start, b"")])

    def dump(self) -> bytes:
        """Nothing: see `LMFormatEnforcerBackend.load`."""
        return b""


class LMFormatEnforcerMatcher:
    """One sequence: the states after each of its tokens."""

    def __init__(self, grammar: LMFormatEnforcerGrammar, states: list[_State], stopped: bool = False) -> None:
        self._grammar = grammar
        self._automaton = grammar.automaton
        self._vocabulary = grammar.characters.vocabulary
        self._states = states
        self._stopped = stopped

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """See `Matcher.accept_tokens`."""
        for token in token_ids:
            if self._stopped:
                raise TokenRejected("the sequence is over: a stop token was accepted")
            if token in self._vocabulary.stop_token_ids:
                if not self.is_accepting():
                    raise TokenRejected(f"stop token {token} is not allowed here: the constraint is not satisfied")
                self._stopped = True
                continue
            content = self._vocabulary.token_bytes[token] if 0 <= token < self._vocabulary.vocab_size else b""
            after = _guarded(self._feed, *self._states[-1], content) if content else None
            if after is None:
                raise TokenRejected(f"token {token} is not allowed here")
            self._states.append(after)

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """See `Matcher.fill_bitmask`."""
        row[:] = _guarded(self._mask, *self._states[-1])

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        if count and self._stopped:
            self._stopped = False
            count -= 1
        if count:
            del self._states[-count:]

    def fork(self) -> LMFormatEnforcerMatcher:
        """See `Matcher.fork`."""
        return LMFormatEnforcerMatcher(self._grammar, list(self._states), self._stopped)

    def is_accepting(self) -> bool:
        """See `Matcher.is_accepting`."""
        state, pending = self._states[-1]
        return not pending and _guarded(self._automaton.final, state)

    def is_terminated(self) -> bool:
        """See `Matcher.is_terminated`."""
        return self._stopped

    def forced_tokens(self) -> list[int]:
        """See `Matcher.forced_tokens`. The last token is left out: what follows may be part of it."""
        state, pending = self._states[-1]
        if self._stopped or pending:
            return []
        return self._vocabulary.encode(_guarded(self._forced, state))[:-1]

    def _forced(self, state: Any) -> str:
        text = ""
        while len(text) < _MAX_FORCED and not self._automaton.final(state):
            following = list(self._automaton.following(state))
            if len(following) != 1 or following[0] == OTHER:
                break
            after = self._automaton.step(state, following[0])
            if after is None:
                break
            text, state = text + following[0], after
        return text

    def _feed(self, state: Any, pending: bytes, content: bytes) -> tuple[Any, bytes] | None:
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
        key = self._automaton.key(state)
        where = None if key is None else (key, pending)
        mask = None if where is None else self._grammar.masks.get(where)
        if mask is None:
            if pending:
                continuing = self._grammar.characters.continuing
                contents = self._vocabulary.token_bytes
                tokens = [token for token in continuing if self._feed(state, pending, contents[token]) is not None]
                mask = pack(tokens, self._vocabulary.padded_vocab_size)
            else:
                mask = self._automaton.mask(state)
            if where is not None:
                self._grammar.masks.put(where, mask, keeps=state)
        return mask


def _guarded(call: Callable[..., T], *arguments: Any) -> T:
    """What the library raises, whatever it is, as a `BackendError`."""
    try:
        return call(*arguments)
    except GuidedError:
        raise
    except Exception as error:
        raise BackendError(f"lm-format-enforcer: {type(error).__name__}: {bounded(error)}") from error
