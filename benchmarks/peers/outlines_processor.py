"""outlines-core's own masks: a `Guide` per row and the kernels of `outlines_core.kernels.torch`.

The caller computes the masks after the forward pass. This does the same as `OutlinesCoreLogitsProcessor` of outlines,
without outlines: each row's guide advances by the last token and writes its bitmask, and the kernel applies it, row by
row.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import outlines_core
import torch
from outlines_core.json_schema import build_regex_from_schema
from outlines_core.kernels.torch import allocate_token_bitmask, apply_token_bitmask_inplace, fill_next_token_bitmask

from benchmarks.delay import delay
from benchmarks.peers.loop import Forward, Slowness, Times
from benchmarks.peers.rows import Document, RunningSequence
from guided.vocabulary import Vocabulary

COMPILE_SECONDS = 5.0
"""Time limit for the compilation of a regex, as in vLLM."""


class OutlinesProcessor:
    """Masks with `outlines_core.Guide` and outlines-core's kernels."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens: dict[bytes, list[int]] = {}
        for token in vocabulary.text_token_ids:
            tokens.setdefault(vocabulary.token_bytes[token], []).append(token)
        self._stop = vocabulary.stop_token_ids[0]
        self._width = vocabulary.padded_vocab_size
        self._vocabulary = outlines_core.Vocabulary(self._stop, tokens)
        self._indices: dict[str, Any] = {}
        self._guides: dict[int, Any] = {}
        self._masks: list[torch.Tensor] = []
        self._last: dict[int, int] = {}
        self._slow = Slowness()

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        if backend != "outlines":
            return {document.name: "not outlines" for document in documents}
        # The first call compiles the kernel.
        apply_token_bitmask_inplace(torch.zeros(1, self._width), allocate_token_bitmask(self._width))
        refused: dict[str, str] = {}
        for document in documents:
            try:
                if document.schema not in self._indices:
                    pattern = build_regex_from_schema(document.schema)
                    self._indices[document.schema] = _compiled(pattern, self._vocabulary)
                guide = outlines_core.Guide(self._indices[document.schema])
                if not guide.accepts_tokens(list(document.tokens)):
                    refused[document.name] = "its tokens are rejected"
            except Exception as error:
                refused[document.name] = f"{type(error).__name__}: {error}"
        return refused

    def begin(self, batch: int, slow: Slowness) -> None:
        self._slow = slow
        self._guides.clear()
        self._last.clear()
        self._masks = [allocate_token_bitmask(self._width) for _ in range(batch)]

    def open(self, sequence: RunningSequence) -> None:
        self._guides[sequence.row] = outlines_core.Guide(self._indices[sequence.document.schema])
        self._last.pop(sequence.row, None)

    def close(self, sequence: RunningSequence) -> None:
        pass

    def step(self, sequences: Sequence[RunningSequence], forward: Forward) -> tuple[torch.Tensor, Times]:
        forward.start()
        logits = forward.wait()
        started = time.perf_counter()
        for row, mask in enumerate(self._masks):
            if self._slow.hits(row):
                delay(self._slow.kind, self._slow.seconds)
            guide = self._guides[row]
            if row in self._last and not guide.is_finished():
                guide.advance(self._last[row], return_tokens=False)
            fill_next_token_bitmask(guide, mask)
        filled, cpu = time.perf_counter(), time.process_time()
        for row, mask in enumerate(self._masks):
            apply_token_bitmask_inplace(logits[row].unsqueeze(0), mask)
        kernel, cpu = time.perf_counter() - filled, time.process_time() - cpu
        return logits, Times(filled - started, filled - started, 0.0, kernel, cpu)

    def sampled(self, sequences: Sequence[RunningSequence], tokens: Sequence[int]) -> float:
        for sequence, token in zip(sequences, tokens, strict=True):
            self._last[sequence.row] = token
        return 0.0


def _compiled(pattern: str, vocabulary: Any) -> Any:
    """Compile the index in a process, which is killed after the time limit. Nothing else can end it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compile, args=(pattern, vocabulary, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(COMPILE_SECONDS):
            raise TimeoutError(f"not compiled after {COMPILE_SECONDS:g} s")
        answer = pickle.loads(receiver.recv_bytes())
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, str):
        raise ValueError(answer)
    return answer


def _compile(pattern: str, vocabulary: Any, sender: Connection) -> None:
    try:
        answer: Any = outlines_core.Index(pattern, vocabulary)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    sender.send_bytes(pickle.dumps(answer))
