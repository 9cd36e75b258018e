"""Admission with `GuidedManager`: vLLM's `structured_outputs` are validated here, without native code.

`response_format`, tools and Python callers all end in `SamplingParams.structured_outputs`. The validated constraint is
sent to the engine with them, so that it is not validated twice.
"""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from guided.backends import candidates, resolve
from guided.errors import GuidedError, InvalidRequest
from guided.integrations.vllm import error_reports
from guided.integrations.vllm.request_params import FROM_EXTRA_ARGS, GuidedParams, is_ours, reject_overwriting
from guided.request import GivenConstraint, GivenWhitespace, build, take_whitespace

if TYPE_CHECKING:
    from vllm import SamplingParams

    from guided.constraint import ConstraintKind

_FIELDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_SERVING = "vllm.entrypoints.generate.base.serving"


def validate_structured_outputs(
    params: SamplingParams, model_config: Any, structured_outputs_config: Any, tokenizer: Any
) -> None:
    """Validate `params.structured_outputs`: replaces `SamplingParams._validate_structured_outputs`.

    Raises:
        VLLMValidationError: the constraint is invalid.
    """
    outputs = params.structured_outputs
    if outputs is None or outputs.all_constraints_none() or is_ours(outputs):
        return
    if model_config.is_diffusion:
        raise VLLMValidationError("structured_outputs are not yet supported for diffusion language models")
    if tokenizer is None:
        raise VLLMValidationError("structured_outputs need the tokenizer: start vLLM without --skip-tokenizer-init")
    _replace_errors()
    try:
        reject_overwriting(params, "structured_outputs")
        outputs._backend = _guided_params(outputs, structured_outputs_config).to_text()
    except GuidedError as error:
        raise VLLMValidationError(str(error)) from error


def enforce(params: SamplingParams, guided: GuidedParams | None) -> None:
    """Have `guided`, from `vllm_xargs`, enforced like vLLM's own `structured_outputs`."""
    if guided is not None:
        _replace_errors()
        params.structured_outputs = StructuredOutputsParams(json_object=True)  # any field: the engine reads the text
        params.structured_outputs._backend = guided.to_text()
        setattr(params.structured_outputs, FROM_EXTRA_ARGS, True)
    elif params.structured_outputs is not None and is_ours(params.structured_outputs):
        params.structured_outputs = None  # of an earlier request with the same object


def _guided_params(outputs: StructuredOutputsParams, config: Any) -> GuidedParams:
    if outputs.json_object is False:
        raise InvalidRequest("json_object takes true: leave it out for no constraint", param="structured_outputs")
    field = next(field for field in _FIELDS if getattr(outputs, field) is not None)
    kind = cast("ConstraintKind", "json_schema" if field == "json" else field)
    given = GivenConstraint(kind, f"structured_outputs.{field}", getattr(outputs, field))
    whitespace: list[GivenWhitespace] = []
    if outputs.whitespace_pattern is not None:
        whitespace.append(GivenWhitespace("structured_outputs.whitespace_pattern", outputs.whitespace_pattern))
    elif field in ("json", "json_object", "structural_tag") and (
        outputs.disable_any_whitespace or config.disable_any_whitespace
    ):
        whitespace.append(GivenWhitespace("structured_outputs.disable_any_whitespace", ""))
    open_objects = not (outputs.disable_additional_properties or config.disable_additional_properties)
    constraint = build(given, take_whitespace(given, whitespace), additional_properties=open_objects)
    backend = resolve(config.backend)
    candidates(constraint.kind, backend)
    return GuidedParams(constraint, backend)


def _replace_errors() -> None:
    """Have vLLM's routes answer a failed request with its error, instead of "Internal server error"."""
    serving = getattr(sys.modules.get(_SERVING), "GenerateBaseServing", None)
    if serving is not None:
        serving._raise_if_error = _raise_if_error


def _raise_if_error(serving: Any, finish_reason: str | None, request_id: str) -> None:
    """Raise the error of a failed request: replaces `GenerateBaseServing._raise_if_error`."""
    if finish_reason != "error":
        return
    error = error_reports.take(request_id)
    if error is None:
        raise GenerationError("Internal server error")
    if error.status < 500:
        raise VLLMValidationError(str(error))
    failure = GenerationError(f"{error} ({error.code})")
    failure.status_code = HTTPStatus(error.status)
    raise failure
