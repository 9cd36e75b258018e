"""Training of a model like the embedded one: the corpus generator, the tokenizer and
the training script.

Serving does not need this package. The corpus has extraction to JSON, single values,
choices, repetition, small talk and function calls. The embedded checkpoint was trained
with further kinds of tasks, too (commit 37d5b88).
"""
