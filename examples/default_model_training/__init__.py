"""Training of the embedded default model: the corpus generator, the tokenizer and the training script.

Serving needs none of this. `engine/default_model/checkpoint/` is what `train` wrote.
"""
