"""Plans for tensor parallelism, in transformers' terms, for architectures that transformers has no plan for.

Each process has all of the other weights. The bias of a "rowwise" layer is added once, after the results are added.
"""

from __future__ import annotations

from typing import Any

# By `model_type`.
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


def split_heads(model: Any, size: int) -> None:
    """Give each attention module of a model above the heads of one of `size` processes. (With transformers' own plans
    it reads them from the size of the projections.)"""
    for module in model.modules():
        if hasattr(module, "num_heads"):
            module.num_heads //= size
