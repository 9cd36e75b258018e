"""The guard over a backend: the library enforces a superset, and tokens that would violate the schema are vetoed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import Backend, CompiledGrammar, Matcher
from guided.bitmask import pack, words
from guided.constraint import Constraint
from guided.errors import BackendError, InvalidConstraint, TokenRejected, UnsupportedConstraint, bounded
from guided.guard.plan import Plan, has_few_names, plan_superset, repeats_keys
from guided.guard.rules import minified
from guided.guard.text import AFTER, BEFORE_KEY, BEFORE_VALUE, KEY, SCALAR, STRING, Choice, Frame, State, Veto, advance
from guided.guard.tokens import TokenIndex
from guided.vocabulary import Vocabulary

_MARKS = {b"keys:": False, b"superset:": True}
"""Prefixes of a serialised grammar that is guarded -> whether the library got a superset."""
_SPACE = re.compile(rb'("(?:[^"\\]|\\.)*"?)|[ \t\r\n]+', re.DOTALL)
_FOLLOWS = b",]} \t\n\r:"
_MAX_QUESTIONS = 200
"""Maximum number of masks to compute to find a text that is allowed."""
_DIGITS = re.compile(rb"-?\d*")
_BITS = [np.array(1 << bit, np.uint32).view(np.int32)[()] for bit in range(32)]


class GuardedBackend(Backend):
    """A backend that refuses no schema which the guard can enforce, and repeats no key of an object.

    Args:
        inner: the adapter of a library.
        supersets: give the library a superset of what it can't enforce.
    """

    name = "guarded"

    def __init__(self, inner: Backend, vocabulary: Vocabulary, *, supersets: bool = True) -> None:
        self._inner = inner
        self._supersets = supersets
        self._vocabulary = vocabulary
        self._index: TokenIndex | None = None

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """See `Backend.compile`. Compiles the constraint itself if the library can enforce it."""
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

    def load(self, constraint: Constraint, dumped: bytes) -> CompiledGrammar:
        """See `Backend.load`."""
        if constraint.kind not in ("json_schema", "json_object"):
            return self._inner.load(constraint, dumped)
        if not dumped:
            return self.compile(constraint)
        for mark, is_superset in _MARKS.items():
            if dumped.startswith(mark):
                plan = plan_superset(constraint.source) if is_superset else Plan()
                assert plan is not None
                inner = constraint if plan.superset is None else replace(constraint, source=plan.superset)
                return self._guarded(constraint, self._inner.load(inner, dumped[len(mark) :]), plan)
        return self._inner.load(constraint, dumped)

    def _guarded(self, constraint: Constraint, grammar: CompiledGrammar, plan: Plan) -> CompiledGrammar:
        if self._index is None:
            self._index = TokenIndex(self._vocabulary)
        if constraint.kind == "json_schema" and has_few_names(json.loads(constraint.source)):
            plan = replace(plan, has_few_names=True)
        return GuardedGrammar(grammar, plan, self._index, self._vocabulary)


def _repeats_keys(constraint: Constraint) -> bool:
    if constraint.kind == "json_object":
        return True
    return constraint.kind == "json_schema" and repeats_keys(json.loads(constraint.source))


class GuardedGrammar(CompiledGrammar):
    """A grammar for a superset, and the plan of what is to be guarded."""

    def __init__(self, inner: CompiledGrammar, plan: Plan, index: TokenIndex, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self.plan = plan
        self.index = index
        self.vocabulary = vocabulary
        self.text_tokens = pack(vocabulary.text_token_ids, vocabulary.padded_vocab_size)
        self.guarded = plan.keywords
        self.nbytes = inner.nbytes + len(plan.superset or "")

    def matcher(self) -> GuardedMatcher:
        return GuardedMatcher(self, self._inner.matcher(), bytearray(), [(State(), 0)])

    def dump(self) -> bytes:
        """The library's own, with a mark; empty where compiling again is cheaper."""
        dumped = self._inner.dump()
        mark = next(mark for mark, is_superset in _MARKS.items() if is_superset == (self.plan.superset is not None))
        return mark + dumped if dumped else b""


class GuardedMatcher(Matcher):
    """One sequence: the library's matcher, the text, and the states after each token with the lengths of the text."""

    def __init__(
        self, grammar: GuardedGrammar, inner: Matcher, text: bytearray, states: list[tuple[State, int]]
    ) -> None:
        self._grammar = grammar
        self._plan, self._index = grammar.plan, grammar.index
        self.inner = inner
        """The library's own matcher."""
        self._text = text
        self._states = states
        self._keys_only = (
            grammar.plan.planner is None and not grammar.plan.has_few_names and not grammar.index.has_later_key
        )
        self._asking = False
        """This copy only finds out what may follow (`_leaves`)."""
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

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        self.inner.fill_bitmask(row)
        state = self._states[-1][0]
        if self._keys_only and state.mode not in (KEY, BEFORE_KEY):
            return  # the usual case: no key may end here
        for token in self._candidates(state, row):
            if not self._allows([token]):
                row[token >> 5] &= ~_BITS[token & 31]

    def _candidates(self, state: State, row: NDArray[np.int32]) -> Iterable[int]:
        """Return all allowed tokens that may have to be vetoed. Clears some that have to be."""
        index, mode, frame = self._index, state.mode, state.frame
        if state.escaped:
            return index.quoted.allowed(row)
        found = index.has_later_key.allowed(row)
        if mode in (KEY, BEFORE_KEY):
            assert frame is not None
            started = bytes(self._text[state.begin + 1 :]) if mode == KEY else None
            found += self._ending_keys(frame, started, row)
        if self._plan.has_few_names and frame is not None and frame.keys:
            found += self._near_used_keys(state, frame, row)
        if self._plan.planner is None:
            return found
        found += (index.ends_string_and_opens if mode in (KEY, STRING) else index.opens).allowed(row)
        if frame is not None and not frame.watched:
            return found
        if not _is_quiet(state):
            if mode in (KEY, STRING):
                found += index.ends_string_and_more.allowed(row)
            else:
                ends = {AFTER: index.after_value, SCALAR: index.ends_scalar}.get(mode, index.has_end)
                found += ends.allowed(row)
        if frame is not None and mode != AFTER and frame.rule is not None and frame.rule.vetoes:
            choice = frame.rule.choice(frame.state, mode in (KEY, BEFORE_KEY))
            if choice is not None:
                partial = bytes(self._text[state.begin :]) if mode in (KEY, STRING, SCALAR) else b""
                found += self._chosen(choice, partial, row)
        if frame is not None and not self._asking:
            found += self._in_items(state, frame, row)
        return set(found)

    def _ending_keys(self, frame: Frame, started: bytes | None, row: NDArray[np.int32]) -> list[int]:
        """Return the tokens that may end a key which is not allowed. `started`: the beginning of the key, if any."""
        index = self._index
        keys: Collection[bytes] = frame.keys if frame.rule is None else frame.keys | frame.rule.names
        if started is None:
            return self._allowed((token for key in keys for token in index.by_key.get(key, ())), row)
        if b"\\" in started:
            return index.quoted.allowed(row) if keys else []
        keys = [key for key in keys if key.startswith(started)]
        found = index.ends_after_escape.allowed(row) if keys else []
        for key in keys:
            found += self._allowed(index.starting_with(key[len(started) :] + b'"'), row)
        return found

    def _near_used_keys(self, state: State, frame: Frame, row: NDArray[np.int32]) -> list[int]:
        """Return the tokens after which there may be no other key than those used, if another one has to come."""
        index = self._index
        if state.mode in (KEY, BEFORE_KEY):
            partial = bytes(self._text[state.begin :]) if state.mode == KEY else b""
            return self._chosen(Choice(None, _as_texts(frame.keys), frozenset()), partial, row)
        ends = {STRING: index.ends_string_and_more, SCALAR: index.ends_scalar}.get(state.mode, index.has_end)
        return ends.allowed(row)

    def _has_other_keys(self, state: State, frame: Frame, tokens: list[int]) -> bool:
        if not frame.keys or state.mode not in (KEY, BEFORE_KEY) or self._asking:
            return True
        partial = bytes(self._text[state.begin :]) if state.mode == KEY else b""
        never = [text for text in _as_texts(frame.keys) if text.startswith(partial)]
        return not never or self._leaves(tokens, partial, never)

    def _allowed(self, tokens: Iterable[int], row: NDArray[np.int32]) -> list[int]:
        return [token for token in tokens if row[token >> 5] & _BITS[token & 31]]

    def _chosen(self, choice: Choice, partial: bytes, row: NDArray[np.int32]) -> list[int]:
        """Return the tokens that may begin or end a restricted key or value. Clears those that begin none of `only`."""
        index = self._index
        found: set[int] = set()
        for text in choice.never if choice.only is None else choice.only:
            if text.startswith(partial):
                on = choice.only is not None or _may_be_stuck(text, choice)
                for lead in (b"",) if partial else (b"", b" "):
                    rest = lead + text[len(partial) :]
                    found.update(index.beginning(rest) if on else ())
                    found.update(index.starting_with(rest) if rest else index.ends_scalar.allowed(row))
        if choice.only is not None:
            found.update(index.blank.allowed(row))
            found.update(index.after_value.allowed(row))
            row &= pack(sorted(found), len(row) * 32)[: len(row)]
        elif b"\\" in partial:
            found.update(index.quoted.allowed(row))
        elif partial.startswith(b"-0") or (partial[:1] != b'"' and not _DIGITS.fullmatch(partial)):
            found.update(index.ends_scalar.allowed(row))  # another way to write a number
        return self._allowed(found, row)

    def _in_items(self, state: State, frame: Frame, row: NDArray[np.int32]) -> list[int]:
        """Return the tokens that may lead to a container which is not allowed, as in an array of unique objects."""
        index = self._index
        found: set[int] = set()
        for partial, never in self._forbidden(frame):
            for text in never:
                for lead in (b"",) if state.mode in (KEY, STRING, SCALAR) else (b"", b" "):
                    found.update(index.beginning(lead + text[len(partial) :]))
                    found.update(index.starting_with(lead + text[len(partial) :]))
            if state.mode not in (KEY, STRING):
                found.update(index.spaced.allowed(row))
        return self._allowed(found, row)

    def _forbidden(self, frame: Frame) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the text of each open container that may become one that is not allowed, and those."""
        inner = frame
        while inner.parent is not None:
            outer = inner.parent
            if outer.rule is not None and outer.rule.vetoes:
                choice = outer.rule.choice(outer.state, False)
                if choice is not None and choice.never and self._text[inner.begin] not in choice.endless:
                    partial = _SPACE.sub(lambda match: match[1] or b"", self._text[inner.begin :])
                    never = [text for text in choice.never if text.startswith(partial)]
                    if never:
                        yield partial, never
            inner = outer

    def _allows(self, tokens: list[int]) -> bool:
        """Whether no rule is violated after more tokens, and none has to be."""
        state, length = self._states[-1]
        for token in tokens:
            self._text += self._index.contents[token]
        try:
            after = advance(state, self._text, length, self._plan.root)
            if after.frame is None:
                return True
            if self._plan.has_few_names and not self._has_other_keys(after, after.frame, tokens):
                return False
            return not after.frame.watched or self._continues(after, after.frame, tokens)
        except Veto:
            return False
        finally:
            del self._text[length:]

    def _continues(self, state: State, frame: Frame, tokens: list[int]) -> bool:
        """Whether some text after `tokens` satisfies the rules."""
        if state.mode != AFTER and frame.rule is not None and frame.rule.vetoes:
            choice = frame.rule.choice(frame.state, state.mode in (KEY, BEFORE_KEY))
            if choice is not None:
                partial = b"" if state.mode in (BEFORE_VALUE, BEFORE_KEY) else bytes(self._text[state.begin :])
                if choice.only is not None and not any(text.startswith(partial) for text in choice.only):
                    if state.mode != BEFORE_KEY or frame.keys:
                        return False
                    frame.rule.close(frame.state)  # at once, or never
                never = [text for text in choice.never if text.startswith(partial)]
                stuck = choice.only is None and any(_may_be_stuck(text, choice, partial) for text in never)
                asks = stuck and not self._asking and (partial or not choice.endless)
                if asks and not self._leaves(tokens, partial, never):
                    return False
        if self._asking:
            return True
        return all(self._leaves(tokens, partial, never) for partial, never in self._forbidden(frame))

    def _leaves(self, tokens: list[int], partial: bytes, never: list[bytes]) -> bool:
        """Whether some text from `partial` on is none of `never`."""
        matcher = self.fork()
        matcher._asking = True
        matcher.accept_tokens(tokens)
        todo: list[tuple[GuardedMatcher, bytes]] = [(matcher, partial)]
        row = np.empty(words(self._grammar.vocabulary.padded_vocab_size), np.int32)
        for _ in range(_MAX_QUESTIONS):
            if not todo:
                return False
            matcher, partial = todo.pop()
            matcher.fill_bitmask(row)
            row &= self._grammar.text_tokens
            rests = [text[len(partial) :] for text in never if text.startswith(partial)]
            blanks = not partial.startswith(b'"')
            for token in _each(row):
                content = self._index.contents[token]
                if blanks and content[0] in b" \t\n\r":
                    continue
                same = [rest for rest in rests if rest.startswith(content) or content.startswith(rest)]
                if not same or (same == [b""] and content[0] not in _FOLLOWS):
                    return True
                if any(len(rest) > len(content) for rest in same):
                    after = matcher.fork()
                    after._asking = True
                    after.accept_tokens([token])
                    todo.append((after, partial + content))
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


def _as_texts(keys: frozenset[bytes]) -> frozenset[bytes]:
    """Return keys as JSON texts."""
    return frozenset(minified(key.decode("utf-8", "surrogatepass")) for key in keys)


def _is_quiet(state: State) -> bool:
    """Whether no comma and no end of a container can be vetoed next."""
    frame, complete = state.frame, state.mode == AFTER
    if frame is None:
        return False
    outer = False
    while frame is not None:
        rule = frame.rule
        if rule is not None and rule.vetoes:
            if not rule.is_quiet(frame.state, complete):
                return False
            if outer and not frame.is_object and rule.choice(frame.state, False) is not None:
                return False  # the end of the container within completes an item
        frame, complete, outer = frame.parent, False, True
    return True


def _may_be_stuck(text: bytes, choice: Choice, partial: bytes = b"0") -> bool:
    """Whether the library may allow nothing but `text` after `partial`."""
    return text[0] not in choice.endless or (partial in (b"0", b"-0") and text in (b"0", b"-0"))


def _each(row: NDArray[np.int32]) -> Iterator[int]:
    """Iterate over the tokens that `row` allows."""
    for index in np.flatnonzero(row).tolist():
        word = int(row[index]) & 0xFFFFFFFF
        while word:
            low = word & -word
            yield index * 32 + low.bit_length() - 1
            word ^= low
