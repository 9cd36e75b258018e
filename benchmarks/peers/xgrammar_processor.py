"""xgrammar's own logits processor for transformers' `generate()`: the caller computes masks after the forward pass.

It is made for a fixed batch that starts and ends together. Here rows end and start as in a server. So a row that starts
gets a new matcher in the running processor. Nothing else of it is changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import xgrammar
import xgrammar.contrib.hf

from benchmarks.delay import delay
from benchmarks.peers.loop import Forward, Slowness, Times
from benchmarks.peers.rows import Document, RunningSequence
from guided.vocabulary import Vocabulary


class XGrammarProcessor:
    """`xgrammar.contrib.hf.LogitsProcessor`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        info = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocabulary.padded_vocab_size,
            stop_token_ids=list(vocabulary.stop_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info)
        self.grammars: dict[str, Any] = {}
        self._opened: dict[int, str] = {}
        self._slow = Slowness()
        self._processor: Any = None
        self._fresh: set[int] = set()
        self._last: list[int] = []
        self._kernel = (0.0, 0.0)
        self._apply = xgrammar.apply_token_bitmask_inplace
        xgrammar.apply_token_bitmask_inplace = self._clocked

    def _clocked(self, *arguments: Any, **named: Any) -> None:
        started, cpu = time.perf_counter(), time.process_time()
        self._apply(*arguments, **named)
        self._kernel = time.perf_counter() - started, time.process_time() - cpu

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        if backend != "xgrammar":
            return {document.name: "not xgrammar" for document in documents}
        refused: dict[str, str] = {}
        for document in documents:
            try:
                if document.schema not in self.grammars:
                    self.grammars[document.schema] = self._compiler.compile_json_schema(
                        document.schema, strict_mode=False
                    )
                matcher = xgrammar.GrammarMatcher(self.grammars[document.schema])
                if not all(matcher.accept_token(token) for token in document.tokens):
                    refused[document.name] = "its tokens are rejected"
            except Exception as error:
                refused[document.name] = f"{type(error).__name__}: {error}"
        return refused

    def begin(self, batch: int, slow: Slowness) -> None:
        self._slow = slow
        self._processor = None
        self._opened.clear()
        self._fresh.clear()

    def open(self, sequence: RunningSequence) -> None:
        if self._processor is None:
            self._opened[sequence.row] = sequence.document.schema
        else:
            self._processor.matchers[sequence.row] = _NewMatcher(self._matcher(sequence))
            self._fresh.add(sequence.row)

    def _matcher(self, sequence: RunningSequence) -> Any:
        matcher = xgrammar.GrammarMatcher(self.grammars[sequence.document.schema])
        return _SlowMatcher(matcher, self._slow) if self._slow.hits(sequence.row) else matcher

    def close(self, sequence: RunningSequence) -> None:
        pass

    def step(self, sequences: Sequence[RunningSequence], forward: Forward) -> tuple[torch.Tensor, Times]:
        if self._processor is None:
            grammars = [self.grammars[self._opened[row]] for row in range(len(sequences))]
            self._processor = xgrammar.contrib.hf.LogitsProcessor(grammars)
            self._processor.batch_size = len(sequences)
            self._processor.matchers = [self._matcher(sequence) for sequence in sequences]
            self._processor.token_bitmask = xgrammar.allocate_token_bitmask(
                len(sequences), self._processor.full_vocab_size
            )
            self._last = [0] * len(sequences)
        input_ids = torch.tensor(self._last).unsqueeze(1)  # it reads the last column only
        forward.start()
        logits = forward.wait()
        started = time.perf_counter()
        logits = self._processor(input_ids, logits)
        kernel, kernel_cpu = self._kernel
        exposed = time.perf_counter() - started - kernel
        for row in self._fresh:
            self._processor.matchers[row] = self._processor.matchers[row].inner
        self._fresh.clear()
        return logits, Times(exposed, exposed, 0.0, kernel, kernel_cpu)

    def sampled(self, sequences: Sequence[RunningSequence], tokens: Sequence[int]) -> float:
        self._last = list(tokens)
        return 0.0


class _NewMatcher:
    """A matcher that ignores the first token, because its row has just started in a running processor."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def accept_token(self, token: int) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        self.inner.fill_next_token_bitmask(bitmask, index)


class _SlowMatcher:
    """A matcher with a delay before each mask."""

    def __init__(self, inner: Any, slow: Slowness) -> None:
        self._inner, self._slow = inner, slow

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        delay(self._slow.kind, self._slow.seconds)
        self._inner.fill_next_token_bitmask(bitmask, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
