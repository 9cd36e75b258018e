"""POST /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from engine.outputs import CompletionOutput, RequestOutput
from engine.server.answers import ChoicesAnswer
from engine.server.bodies import num_prompts
from engine.server.constraints import requested_constraint
from engine.server.context import Context, ServerContext
from engine.server.endpoint import RESPONSES, GenerationRoute, Prepared
from engine.server.generation import Job
from engine.server.logprobs import TextOffsets, completion_logprobs
from engine.server.prompts import text_prompts
from engine.server.protocol import CompletionRequest, GuidedInfo
from engine.server.sampling import sampling_params

router = APIRouter(tags=["generation"], route_class=GenerationRoute)


@router.post("/v1/completions", response_model=None, responses=RESPONSES)
def create_completion(body: CompletionRequest, request: Request, context: Context) -> Prepared:
    """Continue one or several prompts, constrained or not."""
    return _TextAnswer, _build_job(body, context, request.state.request_id)


def _build_job(body: CompletionRequest, context: ServerContext, http_id: str) -> Job:
    wanted = requested_constraint(body, context.settings.backend, context.limits)
    length, max_tokens = context.engine.max_model_len, body.max_tokens
    if max_tokens is None and wanted.constraint is None:
        # OpenAI's default. A request with a constraint does not get it: most answers would be cut off.
        max_tokens = 16
    choices = num_prompts(body.prompt) * (body.n or 1)
    context.check_logprobs(choices, choices * (max_tokens or length), body.logprobs, "logprobs")
    special, limit = body.add_special_tokens, context.text_limit
    prompts = text_prompts(context.engine.tokenizer, body.prompt, add_special_tokens=special, limit=limit)
    if body.max_tokens is None and max_tokens is not None:
        max_tokens = max(1, min(max_tokens, length - max(map(len, prompts))))
    if body.echo and body.logprobs is not None:
        body.prompt_logprobs = body.logprobs
    params = sampling_params(body, wanted, max_tokens=max_tokens, logprobs=body.logprobs, context=context)
    job = Job(
        f"cmpl-{uuid.uuid4().hex}", http_id, prompts, params, wanted.param, body.stream, include_usage=body.wants_usage
    ).admitted(context)  # which checks the token ids
    return replace(job, echoed=_texts(body.prompt, prompts, context)) if body.echo else job


def _texts(given: Any, prompts: Sequence[Sequence[int]], context: ServerContext) -> list[str]:
    """Return the text of each prompt: as the request gives it, or of its tokens."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], str):
        return list(given)
    return [b"".join(map(context.texts.bytes_of, prompt)).decode("utf-8", "replace") for prompt in prompts]


class _TextAnswer(ChoicesAnswer):
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, context: ServerContext, job: Job, guided: GuidedInfo | None) -> None:
        super().__init__(context, job, guided)
        special = job.params.skip_special_tokens
        self._offsets = [TextOffsets(context.texts, special) for _ in range(job.num_choices)]

    def message(self, index: int, text: str) -> dict[str, Any]:
        return {"text": self._echoed(index) + text}

    def opening(self, index: int) -> dict[str, Any] | None:
        text = self._echoed(index)
        return self.content(text) if text else None

    def content(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def logprobs(self, index: int, output: CompletionOutput, which: slice) -> dict[str, Any] | None:
        return completion_logprobs(output, self.context.texts, self._offsets[index], which)

    def scored(self, index: int, output: RequestOutput, completion: CompletionOutput) -> CompletionOutput:
        if not self.job.echoes_logprobs or not completion.token_ids:
            return completion
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        return replace(
            completion,
            text=self._echoed(index) + completion.text,
            token_ids=output.prompt_token_ids + completion.token_ids,
            logprobs=[*output.prompt_logprobs, *completion.logprobs],
        )

    def _echoed(self, index: int) -> str:
        """Return the text of the choice's prompt if the request has `echo`, else an empty text."""
        return self.job.echoed[index // self.job.params.n] if self.job.echoed else ""
