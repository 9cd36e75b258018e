"""LLM: a model to call from a script. Many prompts in, all outputs back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from tqdm import tqdm

from engine.config import EngineConfig, with_processors
from engine.llm_engine import LLMEngine
from engine.model_loader import LoadedModel, load_model
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceGroup
from guided.errors import InvalidRequest
from guided.inline import InlinePool
from guided.pool import MaskPool
from guided.vocabulary import Vocabulary

__all__ = ["LLM", "PoolChoice", "open_pool", "set_threads"]

PoolChoice = Literal["inline", "ray"]

Prompt = str | Sequence[int]


def open_pool(
    choice: PoolChoice,
    vocabulary: Vocabulary,
    options: Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
) -> MaskPool:
    """A pool of the caller's own: shut it down.

    Args:
        options: keyword arguments of `InlinePool` or `actors.RayPool`.
        config: of the engine that it is for: its `mask_limit` is the pool's, unless `options` has another.
    """
    if choice == "inline":
        return InlinePool(vocabulary, **(options or {}))
    if choice == "ray":
        from actors import RayPool  # Ray is optional, and slow to import

        mask_limit = (config or EngineConfig()).mask_limit
        pool: MaskPool = RayPool(vocabulary, **{"mask_limit": mask_limit, **(options or {})})
        return pool
    raise ValueError(f"pool is {choice!r}; it must be inline, ray, or a MaskPool")


SMALL_MODEL = 50_000_000
"""Parameters below which a second CPU thread is not worth its barriers."""


def set_threads(model: LoadedModel, config: EngineConfig | None) -> None:
    """Limit torch's CPU threads, in this process, as the config says. Before the engine's thread starts."""
    threads = config.cpu_threads if config is not None else None
    if threads is None and sum(parameter.numel() for parameter in model.body.parameters()) < SMALL_MODEL:
        threads = 1
    if threads is not None and model.device.type == "cpu":
        torch.set_num_threads(threads)


class LLM:
    """An engine, its model and its pool, for offline use.

        llm = LLM("path/to/model")
        [output] = llm.generate("The answer, as JSON: ", SamplingParams(json_object=True))
        print(output.outputs[0].text)

    Args:
        model: a local directory or a hub name, or a model that was loaded already.
        pool: where masks are computed. `inline` is this process; `ray` is a pool of Ray actors; a `MaskPool` is
            used as it is, and not shut down.
        config: the engine's limits and sizes.
        pool_options: for the pool, where its kind is named.
        logits_processors: custom ones, after those of `config`.
        load_options: for `load_model`: dtype, device, tokenizer, revision.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        pool: PoolChoice | MaskPool = "inline",
        config: EngineConfig | None = None,
        *,
        pool_options: Mapping[str, Any] | None = None,
        logits_processors: Sequence[str | type] = (),
        **load_options: Any,
    ) -> None:
        config = with_processors(config, logits_processors)
        loaded = load_model(model, **load_options) if isinstance(model, str) else model
        loaded.context_length(config.max_model_len if config else None)  # before a pool is started in vain
        set_threads(loaded, config)
        self._own_pool = open_pool(pool, loaded.vocabulary, pool_options, config) if isinstance(pool, str) else None
        self.pool: MaskPool = self._own_pool or pool  # type: ignore[assignment]  # a MaskPool where it is no name
        try:
            self.engine = LLMEngine(loaded, config, self.pool)
        except BaseException:  # a logits processor can't be loaded, for one
            if self._own_pool is not None:
                self._own_pool.shutdown()
            raise
        self.tokenizer = loaded.tokenizer
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts to their ends.

        Args:
            prompts: one or many; each is text or token ids.
            sampling_params: one for all, or one for each.
            use_tqdm: show a progress bar.

        Returns:
            One `RequestOutput` a prompt, in order. What went wrong with one of them is in its `error`.

        Raises:
            InvalidRequest: a request can't be served as it is; none was run.
        """
        many = _as_many(prompts)
        params = _params_for(many, sampling_params)
        groups = [
            self.engine.admit(f"llm-{next(self._ids)}", prompt, one, stream=False)
            for prompt, one in zip(many, params, strict=True)
        ]
        try:
            for group in groups:
                self.engine.submit(group)
            finished = self._run(groups, use_tqdm)
        finally:
            for group in groups:
                self.engine.abort_request(group.request_id)
        return [finished[group.request_id] for group in groups]

    def _run(self, groups: list[SequenceGroup], use_tqdm: bool) -> dict[str, RequestOutput]:
        wanted = {group.request_id for group in groups}
        finished: dict[str, RequestOutput] = {}
        tokens = 0
        with tqdm(total=len(groups), desc="prompts", unit=" prompts", disable=not use_tqdm) as bar:
            while len(finished) < len(wanted):
                self.engine.awake.clear()
                if not self.engine.has_work:
                    self.engine.awake.wait()
                for output in self.engine.step():
                    if output.request_id not in wanted:
                        continue
                    finished[output.request_id] = output
                    tokens += sum(len(one.token_ids) for one in output.outputs)
                    if use_tqdm:
                        rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                        bar.update()
        return finished

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or many, through the tokenizer's chat template.

        Args:
            messages: a list of `{"role", "content"}`, or a list of such lists.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or what `generate` raises.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidRequest("this model's tokenizer has no chat template: use generate()", param="messages")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[list[int]] = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            prompts.append(self.tokenizer.encode(text, add_special_tokens=False))
        return self.generate(prompts, sampling_params, use_tqdm)

    def shutdown(self) -> None:
        """Stop the pool, if it is this object's own. Idempotent."""
        if self._own_pool is not None:
            self._own_pool.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling_params: give one, or one for each")
    return list(params)
