"""Training of a model like the embedded one: the corpus generator, the tokenizer and the training script.

Serving needs none of this. The embedded checkpoint was trained with more kinds of tasks (commit 37d5b88): this corpus
has extraction to JSON, single values, choices, repetition, small talk and function calls.
"""
