"""Build `SamplingParams` from a request's fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from engine.sampling_params import SamplingParams
from engine.server.constraints import RequestedConstraint
from engine.server.context import ServerContext
from engine.server.protocol import GenerationRequest
from guided.constraint import KINDS
from guided.errors import InvalidRequest

_CONVERTED = {*KINDS, "backend", "whitespace_pattern", "strict_schema", "max_tokens", "logprobs"}
_SAME_NAME = sorted({each.name for each in fields(SamplingParams)} & GenerationRequest.model_fields.keys() - _CONVERTED)
"""Fields that mean the same in a request and in `SamplingParams`."""


def sampling_params(
    request: GenerationRequest,
    wanted: RequestedConstraint,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    context: ServerContext,
) -> SamplingParams:
    """Build and check the parameters. A null field takes the model's default, else OpenAI's."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    given = {name: value for name, value in given.items() if value is not None}
    if request.vllm_xargs and not context.engine.engine.sampler.processors.classes:
        raise InvalidRequest(
            "vllm_xargs needs a custom logits processor, and this server has none: see --logits-processors",
            param="vllm_xargs",
        )
    if request.stream and request.prompt_logprobs is not None and not getattr(request, "echo", False):
        raise InvalidRequest("prompt_logprobs are not available with stream: true", param="prompt_logprobs")
    if request.stream and (request.use_beam_search or (request.best_of or 1) > (request.n or 1)):
        name = "use_beam_search" if request.use_beam_search else "best_of"
        raise InvalidRequest(f"{name} compares whole outputs: it is not available with stream: true", param=name)
    return SamplingParams(
        **{**context.settings.sampling_defaults, **given},
        max_tokens=max_tokens,
        logprobs=logprobs,
        constraint=wanted.constraint,
        backend=wanted.backend,
        extra_args=request.vllm_xargs,
    )
