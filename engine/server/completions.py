"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.outputs import CompletionOutput, RequestOutput
from engine.server.constraints import asked
from engine.server.context import Context, ServerContext
from engine.server.generation import ClientGone, Job, Outputs, guided_headers, running, to_nobody, unless_gone, usage_of
from engine.server.logprobs import TextOffsets, completion_logprobs
from engine.server.prompts import text_prompts
from engine.server.protocol import Completion, CompletionChoice, CompletionRequest, GuidedInfo, Usage
from engine.server.sampling import check_length, sampling_params
from engine.server.streaming import EventStream, events
from guided.errors import InvalidRequest

__all__ = ["router"]

router = APIRouter(tags=["generation"])

OPENAI_MAX_TOKENS = 16
"""OpenAI's default for this endpoint. Where a constraint is to be satisfied it would cut nearly every answer."""


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={200: {"description": "An answer, or with `stream` its chunks.", "content": {"text/event-stream": {}}}},
)
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Any:
    """Continue one or several prompts, constrained or not."""
    context.check_model(body.model)
    job = await asyncio.to_thread(_job, body, context, request.state.request_id)
    async with AsyncExitStack() as stack:
        try:
            outputs = await unless_gone(request, stack.enter_async_context(running(context, job)))
            chunks = _TextChunks(context, body, job, outputs.guided, int(time.time()))
            if body.stream:
                include_usage = body.stream_options is not None and body.stream_options.include_usage
                content = events(outputs, job, chunks, context.metrics, include_usage)
                return EventStream(content, stack.pop_all(), guided_headers(outputs.guided), context, job)
            finished = await unless_gone(request, _last(outputs))
        except ClientGone:
            return to_nobody(context, job)
        return Response(
            chunks.whole(finished).model_dump_json(),
            media_type="application/json",
            headers=guided_headers(outputs.guided),
        )


def _job(body: CompletionRequest, context: ServerContext, http_id: str) -> Job:
    """Everything that can be refused before the engine hears of it. CPU-bound: tokenizing, checking a schema."""
    engine = context.engine
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported: prompts are not scored", param="echo")
    wanted = asked(body, context.settings.backend, context.limits)
    prompts = text_prompts(
        engine.tokenizer,
        body.prompt,
        add_special_tokens=body.add_special_tokens,
        vocab_size=context.vocabulary.padded_vocab_size,
    )
    if len(prompts) > context.settings.max_requests:
        raise InvalidRequest(
            f"there are {len(prompts)} prompts; the limit is {context.settings.max_requests}", param="prompt"
        )
    longest = max(map(len, prompts))
    max_tokens = body.max_tokens
    if max_tokens is None and wanted.constraint is None:
        max_tokens = max(1, min(OPENAI_MAX_TOKENS, engine.max_model_len - longest))
    params = sampling_params(body, wanted, max_tokens=max_tokens, logprobs=body.logprobs, context=context)
    check_length(longest, max_tokens, engine.max_model_len, prompt_param="prompt", max_tokens_param="max_tokens")
    return Job(f"cmpl-{uuid.uuid4().hex}", http_id, prompts, params, wanted, body.stream)


async def _last(outputs: Outputs) -> list[RequestOutput]:
    last: dict[int, RequestOutput] = {}
    async for number, output in outputs.stream:
        last[number] = output
    return [last[number] for number in sorted(last)]


@dataclass
class _TextChunks:
    """Writes the answer, whole or in chunks."""

    context: ServerContext
    body: CompletionRequest
    job: Job
    guided: GuidedInfo | None
    created: int
    offsets: dict[int, TextOffsets] = field(default_factory=dict)
    """Of the choices that are being streamed."""

    def whole(self, finished: list[RequestOutput]) -> Completion:
        return Completion(
            id=self.job.request_id,
            created=self.created,
            model=self.context.model_name,
            choices=[
                CompletionChoice(
                    index=prompt * self.job.params.n + each.index,
                    text=self._echoed(prompt) + each.text,
                    logprobs=completion_logprobs(each, self.context.texts, self._offsets()),
                    finish_reason=each.finish_reason,
                    stop_reason=each.stop_reason,
                )
                for prompt, output in enumerate(finished)
                for each in output.outputs
            ],
            usage=usage_of(finished),
            guided=self.guided,
        )

    def opening(self, index: int) -> dict[str, Any] | None:
        text = self._echoed(index // self.job.params.n)
        return self._chunk(index, text, None, None) if text or self.guided is not None else None

    def delta(self, index: int, text: str, output: CompletionOutput, start: int) -> dict[str, Any]:
        place = self.offsets.setdefault(index, self._offsets())
        logprobs = completion_logprobs(output, self.context.texts, place, start)
        return self._chunk(index, text, logprobs.model_dump() if logprobs else None, None)

    def finish(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        chunk = self._chunk(index, "", None, output.finish_reason)
        chunk["choices"][0]["stop_reason"] = output.stop_reason
        return chunk

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage.model_dump()}

    def _offsets(self) -> TextOffsets:
        return TextOffsets(self.context.texts, self.job.params.skip_special_tokens)

    def _echoed(self, prompt: int) -> str:
        if not self.body.echo:
            return ""
        given = self.body.prompt
        if isinstance(given, str):
            return given
        if isinstance(given[0], str):
            return str(given[prompt])
        tokens = self.job.prompts[prompt]
        texts = self.context.texts
        return b"".join(map(texts.bytes_of, tokens)).decode("utf-8", "replace")

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head(), "choices": [choice]}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self) -> dict[str, Any]:
        head = {
            "id": self.job.request_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.context.model_name,
        }
        return head if self.guided is None else {**head, "guided": self.guided.model_dump()}
