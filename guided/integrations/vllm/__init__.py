"""vLLM's structured outputs, enforced by our pool: `GUIDED_VLLM=1 vllm serve MODEL`."""
