"""SamplingParams: the sampling parameters and the constraint of a request, checked at
construction."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.keywords import refuse_unknown
from guided.backends import candidates, resolve
from guided.constraint import KINDS, Constraint
from guided.errors import InvalidRequest, bounded
from guided.fields.output_types import constraint_for
from guided.fields.request import (
    GivenConstraint,
    GivenWhitespace,
    build,
    take_one,
    take_whitespace,
)
from guided.limits import Range

logger = logging.getLogger(__name__)
MAX_LOGPROBS = 20
"""Maximum number of alternatives per token (OpenAI's limit)."""
MAX_STOP_LENGTH = 1000
"""Maximum number of characters of a stop string."""
GREEDY_BELOW = 1e-5
"""Temperatures below this value are greedy, because dividing by them would overflow
float32."""


_RANGES: dict[str, tuple[type, Range]] = {
    "n": (int, Range(1)),
    "best_of": (int, Range(1)),
    "length_penalty": (float, Range(-10, 10)),
    "temperature": (float, Range(0, 100)),
    "top_p": (float, Range(0, 1)),
    "top_k": (int, Range(-1)),
    "min_p": (float, Range(0, 1)),
    "min_tokens": (int, Range(0)),
    "presence_penalty": (float, Range(-2, 2)),
    "frequency_penalty": (float, Range(-2, 2)),
    "repetition_penalty": (float, Range(0.01, 100)),
    "seed": (int, Range(-(2**63), 2**64 - 1)),
    "logprobs": (int, Range(0, MAX_LOGPROBS)),
    "prompt_logprobs": (int, Range(0, MAX_LOGPROBS)),
    "max_tokens": (int, Range(1)),
}
"""Parameter -> its type and range."""
_TRUNCATING = ("top_p", "top_k", "min_p")
"""Parameters that truncate the distribution. Their default values do not."""
_DISTORTING = (
    *(*_TRUNCATING, "temperature", "min_tokens", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Parameters that change the distribution of samples. Their default values do not."""
_MOST = {
    "stop": (64, "strings"),
    "bad_words": (256, "strings"),
    "stop_token_ids": (1024, "tokens"),
    "logit_bias": (1024, "entries"),
}
"""Parameter -> maximum number of its entries, because each stop string is searched in
every step."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Frozen, so that sequences can share them.

    One of `json_schema`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`
    and `output_type` constrains the output; several are accepted if they mean the same.
    The constructor checks them and sets `constraint`. With a constraint,
    `stop_token_ids` are rejected: they could end the output before it satisfies the
    constraint.

    Args:
        json_schema: a JSON schema, as an object or as JSON text.
        json_object: whether the output is a JSON object.
        regex: a regex that the whole output matches.
        choice: the texts, one of which is the output.
        grammar: a grammar in Lark, or in GBNF/EBNF.
        structural_tag: free text with constrained parts, in the format of vLLM and
            xgrammar, or as JSON text.
        output_type: a Python type: a pydantic model, a dataclass, a `TypedDict`, an
            `Enum`, a `Literal`, a term of outlines. `CompletionOutput.parsed` is the
            output as a value of this type.
        backend: the grammar library that enforces the constraint. `auto` picks one.
        complete: complete the constraint within `max_tokens`.
            `CompletionOutput.completed_early` tells whether this has forbidden tokens.
        whitespace_pattern: regex of the whitespace between JSON tokens ("" is none),
            for JSON constraints.
        open_objects: whether objects with named properties may have further properties
            where the schema does not say, as in JSON Schema (docs/coverage.md).
        strict_schema: refuse schemas with a `format` that is not in the specification,
            or with keywords that are only checked when the output ends.
        n: number of outputs.
        temperature: temperature of the distribution. 0 is greedy.
        top_p, top_k, min_p: truncation of the distribution, applied after temperature
            in the order min_p, top_k, top_p. `top_k` 0 or -1, `top_p` 1 and `min_p` 0
            are off. `top_p` 0 leaves the most likely token.
        seed: seed that makes the request repeatable. None: derived from the engine's
            seed and the request id.
        max_tokens: maximum number of output tokens. None: the rest of the context.
        min_tokens: number of output tokens before which stop tokens are suppressed,
            unless nothing else is allowed.
        stop: strings that end the output. They are not searched in constrained text:
            with a structural tag, they are searched only where the output may end, and
            with another constraint not at all. With `parser`, they are searched in the
            free text that the parser finds.
        stop_token_ids: tokens that end the output, besides the model's own stop tokens.
        include_stop_str_in_output: keep the stop string, or the stop token's text.
        ignore_eos: continue after the model's stop tokens. It has no effect with a
            constraint, which ends with one.
        presence_penalty, frequency_penalty: OpenAI's penalties over the output, in [-2,
            2].
        repetition_penalty: CTRL's penalty (arXiv:1909.05858) over prompt and output, in
            [0.01, 100]; 1 is off.
        logit_bias: token id -> number that is added to its logit, in [-100, 100].
        allowed_token_ids: the only tokens that the output may have, besides those that
            end it. None: all tokens. If no token is left, the request ends with the
            error `dead_end`, as with `bad_words` and constraints.
        bad_words: texts that no token may complete (`engine/step/restriction.py`).
        logprobs: number of alternatives to report per token (0: only the sampled
            token). None is off. Log-probabilities of beams include bias and penalties,
            as in the scores of the search.
        logprobs_mode: `raw` reports log-probabilities of the model's own distribution;
            `masked` reports those after bias, penalties and mask, without forbidden
            tokens.
        mask_details: report the allowed tokens, the kept mass and the time of each mask
            (`CompletionOutput.mask_details`). The model then scores forced tokens, too.
        prompt_logprobs: number of alternatives to report per prompt token. None is off.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: write a space between adjacent special tokens. It
            has no effect with a constraint, which the text has to satisfy.
        extra_args: arguments for custom logits processors.
        best_of: number of outputs, or beams, of which the `n` most likely are returned.
            None: `n`.
        resample: draw `n` of the `best_of` outputs, with replacement, instead of
            returning the most likely. The weight of an output is the product of the
            kept masses of its tokens. The outputs are then closer to the model's own
            distribution, conditioned on the constraint. Requires temperature 1, no
            truncation and no penalties.
        use_beam_search: keep the `best_of` most likely beginnings of the distribution
            at the temperature, as transformers' `generate(num_beams=best_of)`. The
            constraint may allow fewer than `n` outputs.
        length_penalty: exponent of the length by which the log-probability of a beam is
            divided, in [-10, 10].
        early_stopping: end the search once there are `best_of` outputs (True), when no
            beam is likely to become better (False), or when no beam can become better
            ("never").

    Raises:
        InvalidRequest: a parameter is invalid. `param` names it.
        InvalidConstraint: there are several constraints, or the constraint is invalid
            or not supported by `backend`.
    """

    json_schema: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    output_type: Any = None
    backend: str = "auto"
    complete: bool = False
    whitespace_pattern: str | None = None
    open_objects: bool = False
    strict_schema: bool = False
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    logprobs_mode: Literal["raw", "masked"] = "raw"
    mask_details: bool = False
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    extra_args: Mapping[str, Any] | None = None
    best_of: int | None = None
    resample: bool = False
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    constraint: Constraint | None = field(default=None, repr=False)
    """The constraint that the fields above define. A ready `Constraint` can be given
    instead of these fields."""
    parser: Callable[[], Any] | None = field(default=None, repr=False)
    """Makes the parser (`guided.tools.output_parser`) that finds the free text of an
    output, for `stop`."""

    def __new__(cls, *values: Any, **fields: Any) -> SamplingParams:
        refuse_unknown(cls.__name__, fields, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            object.__setattr__(
                self, name, (texts,) if isinstance(texts, str) else tuple(texts or ())
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_numbers()
        object.__setattr__(self, "top_k", max(0, self.top_k))  # -1 is off too
        self._check_names()
        self._check_lists()
        self._check_beams()
        object.__setattr__(self, "constraint", self._build_constraint())
        self._check_constraint()
        self._check_resample()

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is deterministic."""
        return self.use_beam_search or self.temperature < GREEDY_BELOW

    @property
    def width(self) -> int:
        """Number of outputs that are generated."""
        return self.best_of or self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether log-probabilities of sampled tokens are returned, or sort the
        outputs. (Beams have their own.)"""
        return not self.use_beam_search and (
            self.logprobs is not None or self.width > 1
        )

    @property
    def has_penalties(self) -> bool:
        """Whether at least one of the three penalties is on."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    def _check_numbers(self) -> None:
        for name, bounds in _RANGES.items():
            value = getattr(self, name)
            if (
                value is not None
                or type(self).__dataclass_fields__[name].default is not None
            ):
                _check_range(name, value, *bounds)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )

    def _check_lists(self) -> None:
        for name, (limit, what) in _MOST.items():
            values = getattr(self, name) or ()
            if len(values) > limit:
                raise InvalidRequest(
                    f"{name} has {len(values)} {what}; the limit is {limit}", param=name
                )
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                _check_text(name, text)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _check_range(name, token, int, Range(0))
        for token, bias in (self.logit_bias or {}).items():
            _check_range("logit_bias", token, int, Range(0))
            _check_range("logit_bias", bias, float, Range(-100, 100))

    def _check_names(self) -> None:
        for name, values in (
            ("logprobs_mode", ("raw", "masked")),
            ("early_stopping", (True, False, "never")),
        ):
            if getattr(self, name) not in values:
                raise InvalidRequest(
                    f"{name} is one of {json.dumps(values)}", param=name
                )

    def _check_beams(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(
                f"best_of is {self.best_of}; it must be at least n ({self.n})",
                param="best_of",
            )
        how = "needs"
        names = ["length_penalty", "early_stopping"]
        if self.use_beam_search:
            how = "does not work with"
            names = [*_TRUNCATING, "mask_details", "complete"]
        for name in filter(self._is_given, names):
            raise InvalidRequest(f"{name} {how} use_beam_search", param=name)

    def _is_given(self, name: str) -> bool:
        """Return whether a parameter differs from its default."""
        return getattr(self, name) not in (
            type(self).__dataclass_fields__[name].default,
            {},
        )

    def _check_resample(self) -> None:
        if not self.resample:
            return
        if self.constraint is None or self.use_beam_search or self.width == self.n:
            why = "resample draws n of best_of samples: it requires a constraint, and best_of above n, without beams"
            raise InvalidRequest(why, param="resample")
        for name in filter(self._is_given, _DISTORTING):
            default = type(self).__dataclass_fields__[name].default
            why = f"resample weighs samples of the model's own distribution: {name} must be {default}"
            raise InvalidRequest(why, param=name)

    def _build_constraint(self) -> Constraint | None:
        fields = {kind: getattr(self, kind) for kind in KINDS} | {
            "json_object": self.json_object or None
        }
        given = [
            GivenConstraint(kind, kind, value)
            for kind, value in fields.items()
            if value is not None
        ]
        if self.output_type is not None:
            typed = constraint_for(self.output_type, open_objects=False)
            given.append(GivenConstraint(typed.kind, "output_type", typed))
        chosen = take_one(given)
        pattern = self.whitespace_pattern
        spaces = take_whitespace(
            chosen,
            [] if pattern is None else [GivenWhitespace("whitespace_pattern", pattern)],
        )
        if chosen is not None and chosen.field == "output_type":
            built: Constraint | None = constraint_for(
                self.output_type, whitespace=pattern, open_objects=self.open_objects
            )
        else:
            options = {
                "open_objects": self.open_objects,
                "strict_schema": self.strict_schema,
            }
            if chosen is None:
                built = None
            else:
                built = build(chosen, spaces, **options)
        if self.constraint is None or chosen is None:
            return built or self.constraint
        ready = GivenConstraint(self.constraint.kind, "constraint", self.constraint)
        take_one([ready, GivenConstraint(chosen.kind, chosen.field, built)])
        return built

    def _check_constraint(self) -> None:
        resolve(self.backend)
        if self.constraint is None:
            if self.complete:
                raise InvalidRequest("complete requires a constraint", param="complete")
            return
        candidates(self.constraint.kind, self.backend)
        kind = self.constraint.kind
        if self.stop_token_ids:
            why = f"stop_token_ids could cut the {kind} constraint short: leave one of the two out"
            raise InvalidRequest(why, param="stop_token_ids")
        if (
            self.stop
            and self.parser is None
            and (kind != "structural_tag" or self.use_beam_search)
        ):
            logger.warning(
                "stop is ignored: it is not searched in the output of a %s constraint",
                kind,
            )
            object.__setattr__(self, "stop", ())


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(
            f"{name} is a non-empty string, or a list of them", param=name
        )
    if len(text) > MAX_STOP_LENGTH:
        why = f"a string of {name} has {len(text)} characters; the limit is {MAX_STOP_LENGTH}"
        raise InvalidRequest(why, param=name)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} is not valid Unicode: {bounded(error)}", param=name
        ) from None


def _check_range(name: str, value: object, kind: type, allowed: Range) -> None:
    if isinstance(value, bool) or not isinstance(
        value, int if kind is int else int | float
    ):
        if kind is int:
            wanted = "an integer"
        else:
            wanted = "a number"
        raise InvalidRequest(
            f"{name} is {wanted}, not {type(value).__name__}", param=name
        )
    if value not in allowed:
        raise InvalidRequest(f"{name} is {value}; it must be {allowed}", param=name)
