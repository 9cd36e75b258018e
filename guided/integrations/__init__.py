"""Guided decoding inside other engines: vLLM's logits processors, and transformers' `generate()`.

Nothing else in `guided` imports this package. Only `guided.integrations.vllm.processor` imports vLLM.
"""
