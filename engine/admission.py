"""Admission: turns a prompt and its parameters into a SequenceGroup, or rejects
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from typing import Any, cast

from engine.config import EngineConfig
from engine.detokenizer import Detokenizer, TokenTexts
from engine.keywords import accept
from engine.model.loader import LoadedModel
from engine.sampling_params import SamplingParams
from engine.step.restriction import Restriction
from engine.step.seeds import sequence_seed
from engine.step.sequence import Sequence, SequenceGroup, SequenceStatus
from guided.errors import ContextLengthExceeded, InvalidRequest

Prompt = str | Tokens[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`."""


class Admission:
    """Checks what `SamplingParams` cannot: the prompt, the context length, the
    vocabulary."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        max_model_len: int,
        num_blocks: int,
        validate: Callable[[SamplingParams], None],
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._validate = validate
        self._num_tokens = num_blocks * config.block_size
        self._tokenizer = model.tokenizer
        self._device = model.device
        self._vocab_size = model.vocabulary.padded_vocab_size
        self._eos = frozenset(model.vocabulary.stop_token_ids)
        self.texts = TokenTexts(model.vocabulary, model.tokenizer)

    def admit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stream: bool = True,
    ) -> SequenceGroup:
        """Build the group of a request with its n sequences. If the prompt is too long,
        they are `FINISHED_IGNORED`."""
        text, token_ids = _unwrapped(prompt)
        if token_ids is None:
            token_ids = self._tokenizer.encode(text)
        self._check_prompt(token_ids)
        self._check_params(params)
        too_long = self._context_error(token_ids, params)
        if (
            too_long is not None
            and params.max_tokens is not None
            and len(token_ids) < self._max_model_len
        ):
            raise too_long
        sequences = [
            self._sequence(index, request_id, token_ids, params)
            for index in range(params.width)
        ]
        if params.max_tokens is None:
            max_length = self._max_model_len
        else:
            max_length = len(token_ids) + params.max_tokens
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or params.constraint is not None:
            stop_ids |= self._eos
        restriction = None
        if params.allowed_token_ids is not None or params.bad_words:
            restriction = Restriction(params, self.texts, stop_ids, self._device)
        if params.use_beam_search:
            tokens = params.width * max_length
            most = self._num_tokens
            if tokens > most:
                why = f"{params.width} beams with {tokens} tokens don't fit in the KV cache of {most} tokens"
                raise InvalidRequest(
                    f"{why}: lower best_of or max_tokens", param="best_of"
                )
        streams = stream and params.width == params.n and not params.use_beam_search
        # beside those of the sequences
        seed = sequence_seed(self._config.seed, request_id, params.seed, params.width)
        group = SequenceGroup(
            request_id,
            sequences,
            params,
            text,
            streams,
            max_length,
            stop_ids,
            restriction,
            seed=seed,
        )
        if too_long is not None:
            group.error = too_long
            group.set_status(SequenceStatus.FINISHED_IGNORED)
        return group

    def _sequence(
        self, index: int, request_id: str, token_ids: list[int], params: SamplingParams
    ) -> Sequence:
        return Sequence(
            index,
            params,
            token_ids,
            seed=sequence_seed(self._config.seed, request_id, params.seed, index),
            detokenizer=Detokenizer(self.texts, params),
        )

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest(
                "the prompt is empty: give at least one token", param="prompt"
            )
        are_ints = {*map(type, token_ids)} <= {int, bool}
        if not are_ints or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise InvalidRequest(
                f"token ids must be between 0 and {self._vocab_size - 1}",
                param="prompt",
            )

    def _context_error(
        self, token_ids: list[int], params: SamplingParams
    ) -> InvalidRequest | None:
        """Return the error of every API for a request that is too long for the
        context."""
        have = len(token_ids)
        most = params.max_tokens or 1
        limit = self._max_model_len
        if have + most <= limit:
            return None
        param = "prompt"
        what = "messages"
        why = f"your messages resulted in {have} tokens, and the output needs at least one"
        if have < limit:
            param = "max_tokens"
            what = "messages or completion"
            why = f"you requested {have + most} tokens ({have} in the messages, {most} in the completion)"
        return ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, {why}."
            f" Please reduce the length of the {what}.",
            param=param,
        )

    def _check_params(self, params: SamplingParams) -> None:
        most = self._config.max_num_seqs
        if params.width > most:
            if params.best_of is None:
                name = "n"
            else:
                name = "best_of"
            raise InvalidRequest(
                f"{name} is {params.width}; the limit is {most}", param=name
            )
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            beyond = [
                token
                for token in getattr(params, name) or ()
                if token >= self._vocab_size
            ]
            if beyond:
                raise InvalidRequest(
                    f"{name} has token {beyond[0]}; the model has {self._vocab_size}",
                    param=name,
                )
        self._validate(params)


def _unwrapped(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Return a prompt's text and its token ids, at least one of them."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, list(prompt)
    accept("a prompt", prompt, ("prompt", "prompt_token_ids"))
    text = prompt.get("prompt")
    token_ids = prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise InvalidRequest("give prompt or prompt_token_ids", param="prompt")
    return cast(str | None, text), None if token_ids is None else list(token_ids)
