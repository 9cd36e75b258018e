"""Sampling: from the model's logits to tokens and log-probabilities."""
