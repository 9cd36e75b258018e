"""Former import paths, for existing `vllm serve` command lines."""
