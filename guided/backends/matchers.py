"""A matcher with stop tokens, for libraries that get text tokens only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from guided.backends.base import Matcher
from guided.errors import TokenRejected
from guided.vocabulary import Vocabulary


class TextMatcher(Matcher):
    """A matcher that handles stop tokens itself."""

    def __init__(self, vocabulary: Vocabulary, terminated: bool) -> None:
        self._stop_token_ids = frozenset(vocabulary.stop_token_ids)
        self._terminated = terminated

    @abstractmethod
    def accept_text(self, token_ids: list[int]) -> None:
        """Advance by tokens that are no stop tokens. Raises as `accept_tokens` does."""

    @abstractmethod
    def rollback_text(self, count: int) -> None:
        """Take back the last `count` text tokens, at least one."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        if self._terminated and token_ids:
            raise TokenRejected("the sequence is over: a stop token was accepted")
        text = list(token_ids)
        stop = text.pop() if text and text[-1] in self._stop_token_ids else None
        if not self._stop_token_ids.isdisjoint(text):
            raise TokenRejected("a stop token before the end of the sequence")
        if text:
            self.accept_text(text)
        if stop is not None:
            if not self.is_accepting():
                raise TokenRejected(f"stop token {stop} is not allowed here: the constraint is not satisfied")
            self._terminated = True

    def rollback(self, count: int) -> None:
        if count and self._terminated:
            self._terminated = False
            count -= 1
        if count:
            self.rollback_text(count)

    def is_terminated(self) -> bool:
        return self._terminated
