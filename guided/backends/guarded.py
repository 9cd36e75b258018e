"""The guard over a backend: the library enforces a superset, and tokens that would violate the schema are vetoed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from guided.backends.base import Backend, CompiledGrammar, Matcher
from guided.bitmask import each_allowed, forbid, words
from guided.constraint import Constraint
from guided.errors import BackendError, InvalidConstraint, TokenRejected, UnsupportedConstraint, bounded
from guided.guard.candidates import Candidates
from guided.guard.keys import ending_names, few_names, may_repeat, open_object
from guided.guard.outlook import Forbidden, forbidden, may_continue
from guided.guard.plan import Plan, plan_superset
from guided.guard.text import KEY, STRING, State, Veto, advance
from guided.guard.tokens import TokenIndex
from guided.number_limit import NumberLimit
from guided.vocabulary import Vocabulary

_GUARDED = b"guarded:"
"""Prefix of the serialisation of a grammar that is guarded."""
_JSON_KINDS = ("json_schema", "json_object")
_BLANKS = b" \t\n\r"
_ENDS = b",]}:" + _BLANKS
"""Bytes after a complete key or value."""
_NUMERIC = b"-0123456789"
_MAX_MASKS = 200
"""Maximum number of masks to compute to find a text that is allowed."""


class _Dumped(msgspec.Struct, array_like=True):
    """A guarded grammar, serialised."""

    grammar: bytes
    """The library's serialisation, of the constraint itself or of a superset."""
    is_superset: bool
    few_names: str | None
    """Pattern of `Plan.few_names`. It takes tens of milliseconds to find in a large schema, as do the next ones."""
    ending_names: str | None
    """Pattern of `Plan.ending_names`."""


_decode = Decoder(_Dumped).decode


class GuardedBackend(Backend):
    """Puts the guard over a backend. It accepts each schema that the guard can enforce, and allows no duplicate keys.

    Args:
        inner: the adapter of a library.
        supersets: give the library a superset of a schema that it can't enforce, and guard the rest.
    """

    name = "guarded"

    def __init__(self, inner: Backend, vocabulary: Vocabulary, *, supersets: bool = True) -> None:
        self._inner = inner
        self._supersets = supersets
        self._vocabulary = vocabulary
        self._numbers = NumberLimit(vocabulary)
        self._index: TokenIndex | None = None

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """See `Backend.compile`. Compiles the constraint itself if the library can enforce it."""
        return self._with_limit(constraint, self._compile(constraint))

    def load(self, constraint: Constraint, dumped: bytes) -> CompiledGrammar:
        """See `Backend.load`."""
        return self._with_limit(constraint, self._load(constraint, dumped))

    def _with_limit(self, constraint: Constraint, grammar: CompiledGrammar) -> CompiledGrammar:
        grammar.numbers = self._numbers if constraint.kind in _JSON_KINDS else None
        return grammar

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            grammar = self._inner.compile(constraint)
        except UnsupportedConstraint as refusal:
            plan = plan_superset(constraint.source) if self._supersets and constraint.kind == "json_schema" else None
            if plan is None or plan.superset is None:
                raise
            try:
                return self._guarded(constraint, self._inner.compile(replace(constraint, source=plan.superset)), plan)
            except InvalidConstraint:
                raise refusal from None
        return self._guarded(constraint, grammar, Plan()) if _repeats_keys(constraint) else grammar

    def _load(self, constraint: Constraint, dumped: bytes) -> CompiledGrammar:
        if constraint.kind not in _JSON_KINDS:
            return self._inner.load(constraint, dumped)
        if not dumped:
            return self._compile(constraint)
        if not dumped.startswith(_GUARDED):
            return self._inner.load(constraint, dumped)
        found = _decode(dumped.removeprefix(_GUARDED))
        plan = Plan()
        if found.is_superset:
            known = plan_superset(constraint.source)
            assert known is not None
            assert known.superset is not None
            plan, constraint = known, replace(constraint, source=known.superset)
        few, ending = (None if one is None else re.compile(one) for one in (found.few_names, found.ending_names))
        return self._with_guard(
            self._inner.load(constraint, found.grammar), replace(plan, few_names=few, ending_names=ending)
        )

    def _guarded(self, constraint: Constraint, grammar: CompiledGrammar, plan: Plan) -> CompiledGrammar:
        if constraint.kind == "json_schema":
            source = constraint.source
            plan = replace(plan, few_names=few_names(source), ending_names=ending_names(source))
        return self._with_guard(grammar, plan)

    def _with_guard(self, grammar: CompiledGrammar, plan: Plan) -> CompiledGrammar:
        if self._index is None:
            self._index = TokenIndex(self._vocabulary)
        return GuardedGrammar(grammar, plan, self._index, self._vocabulary)


def _repeats_keys(constraint: Constraint) -> bool:
    if constraint.kind == "json_object":
        return True
    return constraint.kind == "json_schema" and open_object(constraint.source) is not None


class GuardedGrammar(CompiledGrammar):
    """A library's grammar for a superset, and the plan for the guard."""

    def __init__(self, inner: CompiledGrammar, plan: Plan, index: TokenIndex, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self.plan = plan
        self.index = index
        self.vocabulary = vocabulary
        self.guarded = plan.keywords

    def matcher(self) -> GuardedMatcher:
        return GuardedMatcher(self, self._inner.matcher(), bytearray(), [(State(), 0)])

    def dump(self) -> bytes:
        """See `CompiledGrammar.dump`. Empty if the library's is."""
        dumped = self._inner.dump()
        if not dumped:
            return b""
        few, ending = (None if one is None else one.pattern for one in (self.plan.few_names, self.plan.ending_names))
        return _GUARDED + encode(_Dumped(dumped, self.plan.superset is not None, few, ending))


class GuardedMatcher(Matcher):
    """One sequence: the library's matcher, the text, and after each token the guard's state and the text's length."""

    def __init__(
        self, grammar: GuardedGrammar, inner: Matcher, text: bytearray, states: list[tuple[State, int]]
    ) -> None:
        self._grammar = grammar
        self._plan, self._index = grammar.plan, grammar.index
        self.inner = inner
        """The library's own matcher."""
        self._text = text
        self._states = states
        self._keys_only = not (grammar.plan.planner or grammar.plan.ending_names or grammar.index.has_later_key)
        self._checked = -1
        """Length of the complete text that was validated last."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        stops = self._grammar.vocabulary.stop_token_ids
        contents, plain = self._index.contents, self._index.plain
        self.inner.accept_tokens(token_ids)
        text, states = self._text, self._states
        state, length = states[-1]
        for token in token_ids:
            if token not in stops:
                text += contents[token]
                if not (plain[token] and state.mode in (KEY, STRING) and not state.escaped):
                    try:
                        state = advance(state, text, length, self._plan.root)
                    except Veto:
                        raise TokenRejected(f"token {token} is not allowed here") from None
                length = len(text)
            elif not self._complete(state):
                raise TokenRejected(f"stop token {token} is not allowed here: the constraint is not satisfied")
            states.append((state, length))

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)
            del self._states[-count:]
            del self._text[self._states[-1][1] :]
            self._checked = -1

    def fork(self) -> GuardedMatcher:
        text = self._text[: self._states[-1][1]]
        return GuardedMatcher(self._grammar, self.inner.fork(), text, list(self._states))

    def is_terminated(self) -> bool:
        return self.inner.is_terminated()

    def is_accepting(self) -> bool:
        return self.inner.is_accepting() and self._complete(self._states[-1][0])

    def forced_tokens(self) -> list[int]:
        tokens = self.inner.forced_tokens()
        return tokens if tokens and self._allows(tokens) else []

    def fill_bitmask(self, row: NDArray[np.int32], *, look_ahead: bool = True) -> None:
        """See `Matcher.fill_bitmask`. Without `look_ahead`, it only forbids tokens that violate a rule at once."""
        self.inner.fill_bitmask(row)
        state = self._states[-1][0]
        if self._keys_only and not may_repeat(state, self._text):
            return  # the usual case
        candidates = Candidates(self._index, state, self._text, row)
        for token in candidates.find(self._plan, look_ahead=look_ahead):
            if not self._allows([token], look_ahead=look_ahead):
                forbid(row, token)

    def _allows(self, tokens: list[int], *, look_ahead: bool = True) -> bool:
        """Whether `tokens` violate no rule; with `look_ahead`, also whether the text can go on without a violation."""
        state, length = self._states[-1]
        for token in tokens:
            self._text += self._index.contents[token]
        try:
            after = advance(state, self._text, length, self._plan.root)
            if not may_continue(after, self._text):
                return False
            return not look_ahead or all(
                self._can_avoid(avoided, tokens) for avoided in forbidden(after, self._text, self._plan.ending_keys)
            )
        except Veto:
            return False
        finally:
            del self._text[length:]

    def _can_avoid(self, avoided: Forbidden, tokens: list[int]) -> bool:
        """Whether the library allows a text that is not forbidden after `tokens`.

        Follows the tokens that continue a forbidden text, until one of them leads to another text.
        """
        if avoided.is_avoidable:
            return True
        start = self.fork()
        start.accept_tokens(tokens)
        on_the_way = [(start, avoided.partial)]
        row = np.empty(words(self._grammar.vocabulary.padded_vocab_size), np.int32)
        for _ in range(_MAX_MASKS):
            if not on_the_way:
                return False
            matcher, partial = on_the_way.pop()
            matcher.fill_bitmask(row, look_ahead=False)
            row &= self._grammar.vocabulary.text_mask
            rests = [text[len(partial) :] for text in avoided.texts if text.startswith(partial)]
            places = np.flatnonzero(row).tolist()
            for token in each_allowed(map(row.item, places), places):
                content = self._index.contents[token]
                if content[0] in _BLANKS and not partial.startswith(b'"'):
                    continue  # between tokens of JSON: changes nothing
                if _leaves(content, rests):
                    return True
                goes_on = (partial or content)[0] in _NUMERIC  # also where a forbidden text ends, as 0 in 0.5
                if any(len(rest) + goes_on > len(content) and rest.startswith(content) for rest in rests):
                    after = matcher.fork()
                    after.accept_tokens([token])
                    on_the_way.append((after, partial + content))
        return False

    def _complete(self, state: State) -> bool:
        """Whether the text is a whole document; validated where the library did not enforce all of it."""
        if state.frame is not None or self._plan.validator is None or self._checked == len(self._text):
            return state.frame is None
        document = json.loads(self._text)
        error = next(self._plan.validator.iter_errors(document), None)
        if error is not None:
            raise BackendError(f"the guard let an invalid document through: {bounded(error.message)}")
        self._checked = len(self._text)
        return True


def _leaves(content: bytes, rests: list[bytes]) -> bool:
    """Whether `content` leads away from all forbidden texts. `rests`: what is missing of each of them."""
    if any(rest and (rest.startswith(content) or content.startswith(rest)) for rest in rests):
        return False
    return b"" not in rests or content[0] not in _ENDS  # a complete text ends here, or goes on as another one
