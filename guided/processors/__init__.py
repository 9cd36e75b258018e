"""Post-processors: they prepare the masks of a batch and apply them to its logits."""
