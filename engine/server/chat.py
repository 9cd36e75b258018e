"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.outputs import CompletionOutput, RequestOutput
from engine.server.constraints import asked
from engine.server.context import Context, ServerContext
from engine.server.generation import ClientGone, Job, Outputs, guided_headers, running, to_nobody, unless_gone, usage_of
from engine.server.logprobs import chat_logprobs
from engine.server.prompts import encode_chat
from engine.server.protocol import ChatChoice, ChatRequest, ChatResponse, GuidedInfo, ResponseMessage, Usage
from engine.server.sampling import check_length, sampling_params
from engine.server.streaming import EventStream, events
from guided.errors import InvalidRequest

__all__ = ["router"]

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses={200: {"description": "An answer, or with `stream` its chunks.", "content": {"text/event-stream": {}}}},
)
async def create_chat_completion(body: ChatRequest, request: Request, context: Context) -> Any:
    """Answer a chat, constrained or not. With `stream`, the status is sent once the constraint is compiled."""
    context.check_model(body.model)
    job = await asyncio.to_thread(_job, body, context, request.state.request_id)
    async with AsyncExitStack() as stack:
        try:
            outputs = await unless_gone(request, stack.enter_async_context(running(context, job)))
            chunks = _ChatChunks(context, body, job, outputs.guided, int(time.time()))
            if body.stream:
                include_usage = body.stream_options is not None and body.stream_options.include_usage
                content = events(outputs, job, chunks, context.metrics, include_usage)
                return EventStream(content, stack.pop_all(), guided_headers(outputs.guided), context, job)
            finished = await unless_gone(request, _last(outputs))
        except ClientGone:
            return to_nobody(context, job)
        answer = chunks.whole(finished)
        return Response(answer.model_dump_json(), media_type="application/json", headers=guided_headers(outputs.guided))


def _job(body: ChatRequest, context: ServerContext, http_id: str) -> Job:
    """Everything that can be refused before the engine hears of it. CPU-bound: tokenizing, checking a schema."""
    wanted = asked(body, context.settings.backend, context.limits)
    max_tokens, max_tokens_param = _max_tokens(body)
    try:
        params = sampling_params(body, wanted, max_tokens=max_tokens, logprobs=_logprobs(body), context=context)
    except InvalidRequest as error:
        error.param = {"max_tokens": max_tokens_param, "logprobs": "top_logprobs"}.get(error.param or "", error.param)
        raise
    prompt = encode_chat(
        context.engine.tokenizer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    check_length(
        len(prompt),
        max_tokens,
        context.engine.max_model_len,
        prompt_param="messages",
        max_tokens_param=max_tokens_param,
    )
    return Job(f"chatcmpl-{uuid.uuid4().hex}", http_id, [prompt], params, wanted, body.stream)


def _max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are given and differ: choose one", param="max_tokens"
        )
    return body.max_completion_tokens, "max_completion_tokens"


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs goes with logprobs: true", param="top_logprobs")
    return None


async def _last(outputs: Outputs) -> RequestOutput:
    last = None
    async for _, output in outputs.stream:
        last = output
    assert last is not None
    return last


@dataclass
class _ChatChunks:
    """Writes the answer, whole or in chunks."""

    context: ServerContext
    body: ChatRequest
    job: Job
    guided: GuidedInfo | None
    created: int

    def whole(self, output: RequestOutput) -> ChatResponse:
        return ChatResponse(
            id=self.job.request_id,
            created=self.created,
            model=self.context.model_name,
            choices=[
                ChatChoice(
                    index=each.index,
                    message=ResponseMessage(content=each.text),
                    logprobs=chat_logprobs(each, self.context.texts, self.body.top_logprobs or 0),
                    finish_reason=each.finish_reason or "stop",
                    stop_reason=each.stop_reason,
                )
                for each in output.outputs
            ],
            usage=usage_of([output]),
            guided=self.guided,
        )

    def opening(self, index: int) -> dict[str, Any]:
        chunk = self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        if self.guided is not None:
            chunk["guided"] = self.guided.model_dump()
        return chunk

    def delta(self, index: int, text: str, output: CompletionOutput, start: int) -> dict[str, Any]:
        logprobs = chat_logprobs(output, self.context.texts, self.body.top_logprobs or 0, start)
        return self._chunk(index, {"content": text}, logprobs.model_dump() if logprobs else None, None)

    def finish(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        chunk = self._chunk(index, {}, None, output.finish_reason)
        chunk["choices"][0]["stop_reason"] = output.stop_reason
        return chunk

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage.model_dump()}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head(), "choices": [choice]}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.job.request_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.context.model_name,
        }
