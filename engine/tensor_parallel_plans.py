"""Plans for tensor parallelism, for architectures that transformers has no plan for.

A plan says how each linear layer and embedding is split, in transformers' terms. Each process has all of the other
weights: norms, learned positions. The bias of a "rowwise" layer is added once, after the processes' results are added.
"""

from __future__ import annotations

from typing import Any

PLANS: dict[str, dict[str, str]] = {
    "opt": {
        "model.decoder.embed_tokens": "embedding_rowwise",
        "model.decoder.layers.*.self_attn.q_proj": "colwise",
        "model.decoder.layers.*.self_attn.k_proj": "colwise",
        "model.decoder.layers.*.self_attn.v_proj": "colwise",
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
        "lm_head": "colwise_gather_output",
    }
}
"""By `model_type`."""


def split_heads(model: Any, size: int) -> None:
    """Set the number of heads in each attention module of a model above to that of one of `size` processes.

    Models with a plan in transformers get this number from the size of the projections' output.
    """
    for module in model.modules():
        if hasattr(module, "num_heads"):
            module.num_heads //= size
