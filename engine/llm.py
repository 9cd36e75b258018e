"""LLM: offline generation from a script, which returns the outputs of all prompts at
once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tqdm import tqdm

from engine.admission import Prompt
from engine.base_llm import BaseLLM
from engine.keywords import accept
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.step.sequence import SequenceGroup
from guided.errors import InvalidRequest


class LLM(BaseLLM):
    """Generate from a script, without a server.

        llm = LLM("path/to/model")
        [output] = llm.generate("The answer, as JSON: ", SamplingParams(json_object=True))
        print(output.outputs[0].text)

    The arguments are those of `BaseLLM`.
    """

    _ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate the outputs of all prompts. Returns one `RequestOutput` per prompt,
        in order. A request that failed has an `error`.

        Args:
            prompts: one or many prompts, each as text or token ids.
            sampling_params: parameters for all prompts, or a list with the parameters
                of each prompt.
            use_tqdm: show a progress bar.
            others: not accepted. For a keyword of vLLM, the error says what to use
                instead.

        Raises:
            InvalidRequest: a request is invalid. No request was run.
        """
        accept("generate()", others, ("prompts", "sampling_params", "use_tqdm"))
        if isinstance(prompts, str | Mapping) or (
            prompts and isinstance(prompts[0], int)
        ):
            prompts = [cast(Prompt, prompts)]
        given = sampling_params or SamplingParams()
        many = [given] * len(prompts) if isinstance(given, SamplingParams) else given
        if len(many) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts and {len(many)} sampling_params: give one, or one per prompt"
            )
        groups = [
            self.engine.admit(
                f"llm-{next(self._ids)}", cast(Prompt, prompt), params, stream=False
            )
            for prompt, params in zip(prompts, many, strict=True)
        ]
        for group in groups:
            if (too_long := group.sequences[0].error) is not None:
                raise too_long
        try:
            for group in groups:
                self.engine.submit(group)
            finished = self._run(groups, use_tqdm)
        finally:
            for group in groups:
                self.engine.abort_request(group.request_id)
        return [finished[group.request_id] for group in groups]

    def _run(
        self, groups: list[SequenceGroup], use_tqdm: bool
    ) -> dict[str, RequestOutput]:
        wanted = {group.request_id for group in groups}
        finished: dict[str, RequestOutput] = {}
        tokens = 0
        with tqdm(
            total=len(groups), desc="prompts", unit=" prompts", disable=not use_tqdm
        ) as bar:
            while len(finished) < len(wanted):
                self.engine.awake.clear()
                if not self.engine.has_work:
                    self.engine.awake.wait()
                for output in self.engine.step():
                    if output.request_id in wanted:
                        finished[output.request_id] = output
                        tokens += sum(
                            len(completion.token_ids) for completion in output.outputs
                        )
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
        """Generate answers to one or many conversations, as `generate` does for
        prompts.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or a request is invalid.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidRequest(
                "this model's tokenizer has no chat template: use generate()",
                param="messages",
            )
        prompts = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return self.generate(prompts, sampling_params, use_tqdm)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
