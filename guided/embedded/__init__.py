"""Guided decoding inside somebody else's engine: vLLM's logits processors, and what they need around them.

Nothing else in `guided` imports this; only `guided.embedded.vllm` imports vLLM.
"""
