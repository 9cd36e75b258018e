"""lm-format-enforcer's own function for transformers' `PrefixConstrainedLogitsProcessor`.

The caller computes the masks after the forward pass. A row that starts gets a new enforcer, which takes the row's
earlier tokens as the prompt.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from typing import Any

import lmformatenforcer
import torch
from transformers import PrefixConstrainedLogitsProcessor

from benchmarks.delay import delay
from benchmarks.peers.import_fixes import fix_lm_format_enforcer_imports
from benchmarks.peers.loop import Forward, Slowness, Times
from benchmarks.peers.rows import Document, RunningSequence
from guided.vocabulary import Vocabulary

fix_lm_format_enforcer_imports()
integration: Any = importlib.import_module("lmformatenforcer.integrations.transformers")


class LMFormatEnforcerProcessor:
    """transformers' `PrefixConstrainedLogitsProcessor` with lm-format-enforcer's function for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        def decode(tokens: Sequence[int]) -> str:
            return vocabulary.decode(tokens).decode("utf-8", "replace").rstrip("�")

        # Like `build_token_enforcer_tokenizer_data` with a byte-level tokenizer: no token starts a word.
        regular = [(token, decode([token]), False) for token in vocabulary.text_token_ids]
        stop = vocabulary.stop_token_ids[0]
        self._data = lmformatenforcer.TokenEnforcerTokenizerData(
            regular, decode, stop, False, vocabulary.padded_vocab_size
        )
        self._functions: dict[int, Any] = {}
        self._processor = PrefixConstrainedLogitsProcessor(self._allowed, 1)
        self._input_ids = torch.empty(0, 0, dtype=torch.int64)
        self._slow = Slowness()
        self._seconds = self._cpu = 0.0

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        if backend != "lm-format-enforcer":
            return {document.name: "not lm-format-enforcer" for document in documents}
        refused: dict[str, str] = {}
        for document in documents:
            try:
                self._function(document)
            except Exception as error:
                refused[document.name] = f"{type(error).__name__}: {error}"
        return refused

    def _function(self, document: Document) -> Any:
        parser = lmformatenforcer.JsonSchemaParser(json.loads(document.schema))
        return integration.TransformersPrefixAllowedTokensFn(lmformatenforcer.TokenEnforcer(self._data, parser))

    def begin(self, batch: int, slow: Slowness) -> None:
        self._slow = slow
        self._input_ids = torch.ones(batch, 1, dtype=torch.int64)

    def open(self, sequence: RunningSequence) -> None:
        # The new enforcer takes the row's earlier tokens as the prompt.
        self._functions[sequence.row] = self._function(sequence.document)

    def close(self, sequence: RunningSequence) -> None:
        pass

    def _allowed(self, row: int, tokens: torch.Tensor) -> list[int]:
        started, cpu = time.perf_counter(), time.process_time()
        if self._slow.hits(row):
            delay(self._slow.kind, self._slow.seconds)
        allowed: list[int] = self._functions[row](row, tokens)
        self._seconds += time.perf_counter() - started
        self._cpu += time.process_time() - cpu
        return allowed

    def step(self, sequences: Sequence[RunningSequence], forward: Forward) -> tuple[torch.Tensor, Times]:
        forward.start()
        logits = forward.wait()
        self._seconds = self._cpu = 0.0
        started, cpu = time.perf_counter(), time.process_time()
        logits = self._processor(self._input_ids, logits)
        kernel = time.perf_counter() - started - self._seconds
        kernel_cpu = time.process_time() - cpu - self._cpu
        return logits, Times(self._seconds, self._seconds, 0.0, kernel, kernel_cpu)

    def sampled(self, sequences: Sequence[RunningSequence], tokens: Sequence[int]) -> float:
        self._input_ids = torch.cat([self._input_ids, torch.tensor(tokens).unsqueeze(1)], dim=1)
        return 0.0
