"""SamplingParams: how one request is sampled, and what its output has to satisfy. Checked when it is built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from guided.backends import candidates, resolve
from guided.constraint import KINDS, Constraint
from guided.errors import InvalidRequest, bounded
from guided.request import GivenConstraint, GivenWhitespace, build, refuse_stops, take_one, take_whitespace

__all__ = ["MAX_LOGPROBS", "SamplingParams"]

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for at each token (OpenAI's limit)."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Frozen, so that sequences may share it.

    At most one of `json_schema`, `json_object`, `regex`, `choice` and `grammar` constrains the output; the constraint
    is checked here and is `constraint` from then on. With a constraint, `stop` and `stop_token_ids` are refused: they
    would cut it short, and what ends with `stop` satisfies its constraint.

    Args:
        json_schema: a JSON schema, as an object or as JSON text.
        json_object: any JSON object.
        regex: the whole output matches.
        choice: the output is one of these.
        grammar: Lark, or GBNF/EBNF.
        backend: which grammar library enforces the constraint; `auto` picks one that can.
        whitespace_pattern: JSON kinds only: regex of what may stand between JSON tokens ("" is nothing).
        n: how many outputs.
        temperature: 0 is greedy.
        top_p, top_k, min_p: truncation of the distribution, applied after temperature in the order min_p, top_k,
            top_p. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off.
        seed: makes the request repeatable; None derives one from the engine's seed and the request id.
        max_tokens: None is what remains of the context.
        min_tokens: until so many, stop tokens are suppressed (unless nothing else is legal).
        stop: strings that end the output.
        stop_token_ids: tokens that end the output, beside the model's own stop tokens.
        include_stop_str_in_output: keep the stop string, or the stop token's text, at the end of the text.
        ignore_eos: suppress the model's stop tokens (unless nothing else is legal).
        presence_penalty, frequency_penalty: OpenAI's, over the output, in [-2, 2].
        repetition_penalty: CTRL's (arXiv:1909.05858), over prompt and output, > 0; 1 is off.
        logit_bias: token id to a number added to its logit, in [-100, 100].
        logprobs: alternatives to report at each token (0: the sampled token's only); None is off.
        prompt_logprobs: not there yet; refused.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: taken for compatibility; it concerns tokenizers without bytes of their own,
            and every tokenizer served here has them, so text is the concatenation of its tokens either way.
        extra_args: for embedders; handed through untouched.
        best_of, use_beam_search: not there yet; refused by name.

    Raises:
        InvalidRequest: `param` names the field.
        InvalidConstraint: more than one constraint, or one that is not well formed, or not one for `backend`.
    """

    json_schema: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    backend: str = "auto"
    whitespace_pattern: str | None = None
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    extra_args: Mapping[str, Any] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    constraint: Constraint | None = field(default=None, repr=False)
    """Normally None: it is built from the fields above. A ready `Constraint` may be handed in instead of them."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_numbers()
        self._check_stops()
        self._check_bias()
        self._refuse_absent()
        object.__setattr__(self, "constraint", self._build_constraint())
        self._check_constraint()

    @property
    def is_greedy(self) -> bool:
        """No randomness: the best token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """At least one of the three penalties is on."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_numbers(self) -> None:
        _integer("n", self.n, least=1)
        _number("temperature", self.temperature, least=0.0, most=100.0)
        _number("top_p", self.top_p, least=0.0, most=1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is greater than 0 and at most 1 (temperature 0 is greedy)", param="top_p")
        _integer("top_k", self.top_k, least=-1)
        _number("min_p", self.min_p, least=0.0, most=1.0)
        _integer("min_tokens", self.min_tokens, least=0)
        _number("presence_penalty", self.presence_penalty, least=-2.0, most=2.0)
        _number("frequency_penalty", self.frequency_penalty, least=-2.0, most=2.0)
        _number("repetition_penalty", self.repetition_penalty, least=0.0, most=100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty is greater than 0 (1 is off)", param="repetition_penalty")
        if self.seed is not None:
            _integer("seed", self.seed, least=-(2**63), most=2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, least=0, most=MAX_LOGPROBS)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})", param="min_tokens"
                )

    def _check_stops(self) -> None:
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest("stop is a non-empty string, or a list of them", param="stop")
        for text in self.stop:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InvalidRequest(f"stop is not valid Unicode: {bounded(error)}", param="stop") from None
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, least=0)

    def _check_bias(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, least=0)
            _number("logit_bias", bias, least=-100.0, most=100.0)

    def _refuse_absent(self) -> None:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of is not supported: ask for n outputs and choose", param="best_of")
        if self.use_beam_search:
            raise InvalidRequest("beam search is not supported yet", param="use_beam_search")
        if self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs is not supported yet", param="prompt_logprobs")

    def _build_constraint(self) -> Constraint | None:
        one = take_one([GivenConstraint(kind, kind, getattr(self, kind)) for kind in KINDS if self._is_given(kind)])
        pattern = self.whitespace_pattern
        spaces = take_whitespace(one, [] if pattern is None else [GivenWhitespace("whitespace_pattern", pattern)])
        built = None if one is None else build(one, spaces)
        if self.constraint is None or one is None:
            return built or self.constraint
        if self.constraint != built:
            take_one([GivenConstraint(self.constraint.kind, "constraint", self.constraint), one])
        return built

    def _is_given(self, kind: str) -> bool:
        value = getattr(self, kind)
        return value is True if kind == "json_object" else value is not None

    def _check_constraint(self) -> None:
        resolve(self.backend)
        if self.constraint is None:
            return
        candidates(self.constraint.kind, self.backend)
        refuse_stops(self.constraint, stop=self.stop, stop_token_ids=self.stop_token_ids)


def _integer(name: str, value: object, *, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is an integer, not {type(value).__name__}", param=name)
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise InvalidRequest(f"{name} is {value}; it must be {bounds}", param=name)


def _number(name: str, value: object, *, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} is a number, not {type(value).__name__}", param=name)
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidRequest(f"{name} is {value}; it must be between {least:g} and {most:g}", param=name)
