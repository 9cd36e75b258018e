"""Admission: `structured_outputs` are validated by our rules, and sent to the engine's
process as text.

`response_format`, tools and Python callers all end in
`SamplingParams.structured_outputs`. The constraint is validated once, in the process
that admits requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from guided.backends import AUTO, candidates, resolve
from guided.constraint import KINDS, Constraint, ConstraintKind
from guided.errors import GuidedError, InternalError, InvalidRequest, bounded
from guided.fields.request import (
    GivenConstraint,
    GivenWhitespace,
    build,
    take_whitespace,
)
from guided.integrations.vllm import metrics

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import StructuredOutputsConfig
    from vllm.sampling_params import StructuredOutputsParams

BACKEND = "guided_backend"
"""The parameter in `SamplingParams.extra_args` (HTTP: `vllm_xargs`) that names a
request's backend."""
OPEN_OBJECTS = "open_objects"
"""The parameter beside it that keeps objects open: see `Constraint.open_objects`."""
_FIELDS: Mapping[str, ConstraintKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields of `structured_outputs` -> our kinds. vLLM has checked that one is given."""
_UNENFORCED = frozenset(
    {*KINDS, "json", "backend", "response_format", "structured_outputs"}
)
"""Names in `vllm_xargs` that are meant as a constraint. vLLM would ignore them."""
_PREFIX = "guided:"


@dataclass(frozen=True)
class GuidedParams:
    """The validated constraint of one request, and its backend."""

    constraint: Constraint
    backend: str = AUTO

    def to_text(self) -> str:
        """Return these parameters as text, for the engine's process."""
        constraint = self.constraint
        values = [
            constraint.kind,
            constraint.source,
            constraint.whitespace,
            constraint.open_objects,
            self.backend,
        ]
        return _PREFIX + json.dumps(values)

    @classmethod
    def from_text(cls, text: str | None) -> GuidedParams:
        """Read what `to_text` wrote, without validating it again. Raises
        `InternalError` if it is something else."""
        if text is None or not text.startswith(_PREFIX):
            raise InternalError(
                "this request was admitted by a process without guided's structured outputs"
            )
        kind, source, whitespace, open_objects, backend = json.loads(
            text.removeprefix(_PREFIX)
        )
        return cls(
            Constraint(kind, source, whitespace, open_objects=open_objects), backend
        )


def validate_structured_outputs(
    params: SamplingParams,
    model_config: Any,
    structured_outputs_config: Any,
    tokenizer: Any,
) -> None:
    """Validate the constraint of a request: replaces
    `SamplingParams._validate_structured_outputs`.

    The validated constraint is written where vLLM has the name of its backend, which is
    sent to the engine. An engine without our manager refuses it. Raises
    `VLLMValidationError` if the constraint is invalid.
    """
    from vllm.exceptions import VLLMValidationError

    if structured_outputs_config is None:  # not a model that generates text
        return
    try:
        guided = guided_params(params, structured_outputs_config)
    except GuidedError as error:
        raise VLLMValidationError(str(error)) from error
    if guided is None:
        return
    if model_config.is_diffusion:
        raise VLLMValidationError(
            "structured_outputs are not yet supported for diffusion language models"
        )
    if tokenizer is None:
        raise VLLMValidationError(
            "structured_outputs need the tokenizer: start vLLM without --skip-tokenizer-init"
        )
    params.structured_outputs._backend = guided.to_text()
    metrics.REQUESTS.labels(guided.constraint.kind).inc()


def guided_params(
    params: SamplingParams, config: StructuredOutputsConfig
) -> GuidedParams | None:
    """Validate the constraint of a request. None: it has none.

    Args:
        config: vLLM's `--structured-outputs-config`.

    Raises:
        InvalidRequest: the constraint is invalid, or another parameter does not go with
            it.
    """
    extra = params.extra_args or {}
    for name in extra:
        if name in _UNENFORCED or (name.startswith("guided_") and name != BACKEND):
            message = f"{bounded(name, 60)} is not enforced in vllm_xargs: use structured_outputs or response_format"
            raise InvalidRequest(
                f"{message} (and {BACKEND} in vllm_xargs for the backend)", param=name
            )
    outputs = params.structured_outputs
    if outputs is None or outputs.all_constraints_none():
        if extra.get(BACKEND) is not None:
            raise InvalidRequest(
                f"{BACKEND} needs a constraint beside it", param=BACKEND
            )
        return None
    overwriting = {
        "ignore_eos": params.ignore_eos,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "trace_decode_token_ids": bool(params.trace_decode_token_ids),
    }
    # they overwrite masks, or change where an output ends
    for name, given in overwriting.items():
        if given:
            raise InvalidRequest(
                f"{name} can't be kept beside a constraint: leave one of the two out",
                param=name,
            )
    is_open = extra.get(OPEN_OBJECTS, False)
    if not isinstance(is_open, bool):
        raise InvalidRequest(f"{OPEN_OBJECTS} is true or false", param=OPEN_OBJECTS)
    constraint = _constraint(outputs, config, is_open)
    backend = extra.get(BACKEND, config.backend)
    if not isinstance(backend, str):
        raise InvalidRequest(
            f"{BACKEND} is a string, not {type(backend).__name__}", param=BACKEND
        )
    backend = resolve(backend, param=BACKEND)
    candidates(constraint.kind, backend, param=BACKEND)
    return GuidedParams(constraint, backend)


def _constraint(
    outputs: StructuredOutputsParams, config: StructuredOutputsConfig, is_open: bool
) -> Constraint:
    if outputs.json_object is False:
        raise InvalidRequest(
            "json_object takes true: leave it out for no constraint",
            param="structured_outputs",
        )
    field, kind = next(
        pair for pair in _FIELDS.items() if getattr(outputs, pair[0]) is not None
    )
    given = GivenConstraint(
        kind, f"structured_outputs.{field}", getattr(outputs, field)
    )
    whitespace: list[GivenWhitespace] = []
    if outputs.whitespace_pattern is not None:
        whitespace.append(
            GivenWhitespace(
                "structured_outputs.whitespace_pattern", outputs.whitespace_pattern
            )
        )
    elif field in ("json", "json_object", "structural_tag") and (
        outputs.disable_any_whitespace or config.disable_any_whitespace
    ):
        whitespace.append(
            GivenWhitespace("structured_outputs.disable_any_whitespace", "")
        )
    closed = (
        outputs.disable_additional_properties or config.disable_additional_properties
    )
    return build(
        given, take_whitespace(given, whitespace), open_objects=is_open and not closed
    )
