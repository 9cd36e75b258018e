"""Admission: a prompt and its parameters into a SequenceGroup, or a refusal that says what would work."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from functools import lru_cache

from engine.config import EngineConfig
from engine.detokenizer import Detokenizer, TokenTexts
from engine.model_loader import LoadedModel
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup, SequenceStatus, sequence_seed
from guided.constraint import Constraint
from guided.errors import InvalidRequest
from guided.limits import DEFAULT_LIMITS, Limits

__all__ = ["Admission"]


class Admission:
    """Checks what `SamplingParams` can't know: the prompt, the context, the vocabulary, the engine's limits.

    Args:
        validate: what the logits processors say to a request's parameters: raises `InvalidRequest`.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        max_model_len: int,
        validate: Callable[[SamplingParams], None],
    ) -> None:
        self._validate = validate
        self._tokenizer = model.tokenizer
        self._max_n = min(config.max_n or config.max_num_seqs, config.max_num_seqs)
        self._limits = config.limits
        self._max_model_len = max_model_len
        self._seed = config.seed
        self._vocab_size = model.vocabulary.padded_vocab_size
        self._eos = frozenset(model.vocabulary.stop_token_ids)
        self.texts = TokenTexts(model.vocabulary, model.tokenizer)

    def admit(
        self, request_id: str, prompt: str | Tokens[int], params: SamplingParams, *, stream: bool
    ) -> SequenceGroup:
        """The group of a request, with all its n sequences. Already `FINISHED_IGNORED` if the prompt is too long.

        Raises:
            InvalidRequest: `param` names what is wrong.
        """
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(token_ids)
        self._check_params(params)
        too_long = self._context_error(token_ids, params)
        if too_long is not None and params.max_tokens is not None and len(token_ids) < self._max_model_len:
            raise too_long
        group = SequenceGroup(
            request_id,
            params,
            [self._sequence(index, request_id, token_ids, params) for index in range(params.n)],
            prompt if isinstance(prompt, str) else None,
            stream,
        )
        if too_long is not None:
            for sequence in group.sequences:
                sequence.finish(SequenceStatus.FINISHED_IGNORED, too_long)
        return group

    def _sequence(self, index: int, request_id: str, token_ids: list[int], params: SamplingParams) -> Sequence:
        rest = self._max_model_len - len(token_ids)
        constrained = params.constraint is not None
        eos = self._eos if constrained or not params.ignore_eos else frozenset[int]()
        return Sequence(
            index,
            params,
            token_ids,
            max_length=len(token_ids) + (rest if params.max_tokens is None else params.max_tokens),
            stop_ids=eos.union(params.stop_token_ids),
            seed=sequence_seed(self._seed, request_id, params.seed, index),
            detokenizer=Detokenizer(
                self.texts,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                whole_characters=constrained,
            ),
        )

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
        if not all(isinstance(token, int) and 0 <= token < self._vocab_size for token in token_ids):
            raise InvalidRequest(
                f"the prompt holds something that is no token id between 0 and {self._vocab_size - 1}", param="prompt"
            )

    def _context_error(self, token_ids: list[int], params: SamplingParams) -> InvalidRequest | None:
        """What is too long for the context, if anything is."""
        have, limit = len(token_ids), self._max_model_len
        if have >= limit:
            return InvalidRequest(
                f"the prompt has {have} tokens; the context of {limit} must hold it and at least one more",
                param="prompt",
            )
        if params.max_tokens is not None and have + params.max_tokens > limit:
            return InvalidRequest(
                f"max_tokens is {params.max_tokens}, and the prompt has {have} tokens: together they go beyond the "
                f"context of {limit}; max_tokens can be {limit - have} at the most",
                param="max_tokens",
            )
        return None

    def _check_params(self, params: SamplingParams) -> None:
        if params.n > self._max_n:
            raise InvalidRequest(f"n is {params.n}; here it is {self._max_n} at the most", param="n")
        if params.constraint is not None and self._limits != DEFAULT_LIMITS:
            _check_constraint(params.constraint, self._limits)
        for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            beyond = [token for token in tokens if token >= self._vocab_size]
            if beyond:
                raise InvalidRequest(f"{name} names token {beyond[0]}; the model has {self._vocab_size}", param=name)
        self._validate(params)


@lru_cache(maxsize=1024)
def _check_constraint(constraint: Constraint, limits: Limits) -> None:
    """Most were built under these limits a moment ago, and many come again."""
    constraint.check(limits)
