"""The vLLM plugin: `vllm serve MODEL --logits-processors guided.integrations.vllm.processor:GuidedLogitsProcessor`."""
