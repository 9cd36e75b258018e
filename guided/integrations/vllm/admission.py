"""Admission in vLLM: `structured_outputs` are validated by our rules, in the process that receives requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

from guided.errors import GuidedError
from guided.integrations.vllm import metrics
from guided.integrations.vllm.request_params import guided_params

if TYPE_CHECKING:
    from vllm import SamplingParams


def validate_structured_outputs(
    params: SamplingParams, model_config: Any, structured_outputs_config: Any, tokenizer: Any
) -> None:
    """Validate the constraint of a request: replaces `SamplingParams._validate_structured_outputs`.

    The validated constraint is written where vLLM has the name of its backend, which is sent to the engine. An engine
    without our manager refuses it.

    Raises:
        VLLMValidationError: the constraint is invalid.
    """
    if structured_outputs_config is None:  # not a model that generates text
        return
    try:
        guided = guided_params(params, structured_outputs_config)
    except GuidedError as error:
        raise VLLMValidationError(str(error)) from error
    if guided is None:
        return
    if model_config.is_diffusion:
        raise VLLMValidationError("structured_outputs are not yet supported for diffusion language models")
    if tokenizer is None:
        raise VLLMValidationError("structured_outputs need the tokenizer: start vLLM without --skip-tokenizer-init")
    params.structured_outputs._backend = guided.to_text()
    metrics.REQUESTS.labels(guided.constraint.kind).inc()
