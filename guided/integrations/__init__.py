"""Guided decoding inside other engines: vLLM's structured outputs, and transformers' `generate()`.

Nothing else in `guided` imports this package.
"""
