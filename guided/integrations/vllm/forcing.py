"""Rows that must become one token, and rows in which nothing was left of what may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["allow_only", "free_what_is_allowed", "one_token_masks"]


def allow_only(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> None:
    """Allow `tokens[i]` and nothing else in `logits[rows[i]]`, in place, whatever was forbidden there before."""
    logits[list(rows)] = float("-inf")
    logits[list(rows), list(tokens)] = 0.0


def one_token_masks(tokens: Sequence[int], size: int) -> NDArray[np.int32]:
    """int32 `[len(tokens), size]`: mask i allows `tokens[i]`."""
    masks = np.zeros((len(tokens), size), np.uint32)
    for mask, token in zip(masks, tokens, strict=True):
        mask[token // 32] = 1 << token % 32
    return masks.view(np.int32)


def free_what_is_allowed(
    logits: torch.Tensor, bitmask: NDArray[np.int32], rows: Sequence[int], contested: Sequence[bool]
) -> None:
    """Where nothing of what a mask allows has a finite logit, give all of it one: the mask wins. Before it is applied.

    Args:
        bitmask: int32 `[len(rows), words]`, for `logits[rows[i]]`.
        contested: rows in which the engine may have written -inf itself. The others are looked at only where one token
            is allowed, which then is sampled whatever its logit was.
    """
    allowed = np.unpackbits(bitmask.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    single = allowed.sum(1) == 1
    if single.any():
        places = np.flatnonzero(single)
        logits[[rows[place] for place in places.tolist()], allowed[places].argmax(1).tolist()] = 0.0
    for place in np.flatnonzero(~single & np.asarray(contested)).tolist():
        tokens = np.flatnonzero(allowed[place]).tolist()
        if bool(logits[rows[place], tokens].isneginf().all()):
            logits[rows[place], tokens] = 0.0
