"""POST /v1/completions."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request

from engine.outputs import CompletionOutput
from engine.server.answers import Answer
from engine.server.constraints import requested_constraint
from engine.server.context import Context, ServerContext
from engine.server.endpoint import RESPONSES, respond
from engine.server.generation import Job
from engine.server.logprobs import TextOffsets, completion_logprobs
from engine.server.prompts import text_prompts
from engine.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, GuidedInfo
from engine.server.sampling import sampling_params
from guided.errors import InvalidRequest

router = APIRouter(tags=["generation"])

OPENAI_MAX_TOKENS = 16
"""OpenAI's default for this endpoint. A request with a constraint does not get it: most answers would be cut off."""


@router.post("/v1/completions", response_model=Completion, responses=RESPONSES)
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Any:
    """Continue one or several prompts, constrained or not."""
    return await respond(body, request, context, _build_job, _TextAnswer, {"extra_args": "vllm_xargs"})


def _build_job(body: CompletionRequest, context: ServerContext, http_id: str) -> Job:
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported: prompts are not scored", param="echo")
    wanted = requested_constraint(body, context.settings.backend, context.limits)
    prompts = text_prompts(context.engine.tokenizer, body.prompt, add_special_tokens=body.add_special_tokens)
    if len(prompts) > context.settings.max_requests:
        raise InvalidRequest(
            f"there are {len(prompts)} prompts; the limit is {context.settings.max_requests}", param="prompt"
        )
    max_tokens = body.max_tokens
    if max_tokens is None and wanted.constraint is None:
        longest = max(map(len, prompts))
        max_tokens = max(1, min(OPENAI_MAX_TOKENS, context.engine.max_model_len - longest))
    params = sampling_params(body, wanted, max_tokens=max_tokens, logprobs=body.logprobs, context=context)
    return Job(f"cmpl-{uuid.uuid4().hex}", http_id, prompts, params, wanted.param, body.stream)


class _TextAnswer(Answer[CompletionRequest]):
    response_type = Completion
    chunk_object = "text_completion"

    def __init__(self, context: ServerContext, body: CompletionRequest, job: Job, guided: GuidedInfo | None) -> None:
        super().__init__(context, body, job, guided)
        special = job.params.skip_special_tokens
        self._offsets = [TextOffsets(context.texts, special) for _ in range(job.num_choices)]

    def choice(self, index: int, output: CompletionOutput) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._echoed(index) + output.text,
            logprobs=self.logprobs(index, output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def opening(self, index: int) -> dict[str, Any] | None:
        text = self._echoed(index)
        chunk = self.chunk(index, self.content(text))
        if self.guided is not None:
            return {**chunk, "guided": self.guided.model_dump()}
        return chunk if text else None

    def content(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def logprobs(self, index: int, output: CompletionOutput, start: int = 0) -> CompletionLogprobs | None:
        return completion_logprobs(output, self.context.texts, self._offsets[index], start)

    def _echoed(self, index: int) -> str:
        """The text of the choice's prompt, if the request asks for it back."""
        if not self.body.echo:
            return ""
        prompt = index // self.job.params.n
        given = self.body.prompt
        if isinstance(given, str):
            return given
        if isinstance(given[0], str):
            return str(given[prompt])
        return b"".join(map(self.context.texts.bytes_of, self.job.prompts[prompt])).decode("utf-8", "replace")
