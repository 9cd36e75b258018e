"""RFC5423Adapter: runs a post-processor that is written literally as in vLLM's RFC
5423.

    class LogitPostProcessor:
        def initialize(self, logit_processor_config): ...
        def prepare(self, seq_group_metadata_list): ...
        def apply(self, logits): ...                      # returns the logits
        def sampled(self, seq, token_id, logprobs): ...   # optional, from the RFC's discussion
        def free(self, request_id): ...                   # optional, likewise

A class of your own better derives from `guided.LogitPostProcessor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from guided.processors.logit_post_processor import LogitPostProcessor, SampledEdit
from guided.sequence import GuidedSequence, SequenceOutput

if TYPE_CHECKING:
    import torch

    from guided.processors.logit_post_processor import LogitsRows


def is_literal(kind: type) -> bool:
    """Return whether a class is written literally as in the RFC."""
    if issubclass(kind, LogitPostProcessor):
        return False
    return all(hasattr(kind, method) for method in ("initialize", "prepare", "apply"))


class RFC5423Adapter(LogitPostProcessor):
    """A `LogitPostProcessor` that calls the methods of the RFC's class.

    Args:
        processor: an object with these methods. It may set `all_rows` and
            `max_rollback` too.
        config: the argument of its `initialize`.
    """

    def __init__(self, processor: Any, config: object) -> None:
        self._processor = processor
        self.all_rows = getattr(processor, "all_rows", True)
        self.max_rollback = getattr(processor, "max_rollback", 0)
        self._sampled = getattr(processor, "sampled", None)
        self.needs_samples = self._sampled is not None
        processor.initialize(config)

    @property
    def name(self) -> str:
        return type(self._processor).__name__

    def prepare(
        self,
        sequences: Sequence[GuidedSequence],
        logits_rows: LogitsRows = None,
        batch: int | None = None,
    ) -> None:
        self._processor.prepare(sequences)

    def apply(self, logits: torch.Tensor, deadline: float | None = None) -> None:
        changed = self._processor.apply(logits)
        if changed is not None and changed is not logits:
            logits.copy_(changed)

    def edits(
        self,
        sequences: Sequence[GuidedSequence],
        samples: Sequence[SequenceOutput | None] = (),
    ) -> dict[int, SampledEdit | Exception]:
        """Translate what `sampled` returns: the number of tokens to remove before the
        sampled one, the tokens that replace it, and whether the sequence ends."""
        edits: dict[int, SampledEdit | Exception] = {}
        for sequence, sample in zip(sequences, samples, strict=False):
            if sample is None or self._sampled is None:
                continue
            token = sample.output_token
            try:
                backtrack, append, stop = self._sampled(
                    sequence, token, sample.logprobs
                )
                if backtrack or list(append[:1]) != [token]:
                    edits[sequence.sequence_id] = SampledEdit(
                        backtrack + 1, append, stop
                    )
                elif len(append) > 1 or stop:
                    edits[sequence.sequence_id] = SampledEdit(0, append[1:], stop)
            except Exception as error:
                edits[sequence.sequence_id] = error
        return edits

    def free(self, request_id: str) -> None:
        free = getattr(self._processor, "free", None)
        if free is not None:
            free(request_id)
