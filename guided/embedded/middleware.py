from guided.integrations.vllm.middleware import GuidedErrors as GuidedErrors
