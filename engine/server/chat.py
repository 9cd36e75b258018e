"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from engine.outputs import CompletionOutput
from engine.server.answers import Answer
from engine.server.constraints import requested_constraint
from engine.server.context import Context, ServerContext
from engine.server.endpoint import RESPONSES, GenerationRoute, field_names
from engine.server.generation import Job
from engine.server.logprobs import chat_logprobs
from engine.server.prompts import encode_chat
from engine.server.protocol import ChatRequest, ChatResponse
from engine.server.sampling import sampling_params, wants_usage
from guided.errors import InvalidRequest

router = APIRouter(tags=["generation"], route_class=GenerationRoute)

_FIELD_NAMES = {"prompt": "messages", "logprobs": "top_logprobs", "extra_args": "vllm_xargs"}


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=RESPONSES)
def create_chat_completion(body: ChatRequest, request: Request, context: Context) -> tuple[type[Answer], Job]:
    """Answer a chat, constrained or not. With `stream`, the status is sent once the constraint is compiled."""
    names = dict(_FIELD_NAMES)
    if body.max_completion_tokens is not None and body.max_tokens in (None, body.max_completion_tokens):
        names["max_tokens"] = "max_completion_tokens"
    with field_names(names):
        return _ChatAnswer, _build_job(body, context, request.state.request_id, names)


def _build_job(body: ChatRequest, context: ServerContext, http_id: str, names: Mapping[str, str]) -> Job:
    wanted = requested_constraint(
        body, context.settings.backend, context.limits, strict_formats=context.settings.strict_formats
    )
    params = sampling_params(body, wanted, max_tokens=_max_tokens(body), logprobs=_logprobs(body), context=context)
    prompt = encode_chat(
        context.engine.tokenizer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
        max_tokens=context.engine.max_model_len,
    )
    job = Job(
        f"chatcmpl-{uuid.uuid4().hex}",
        http_id,
        [prompt],
        params,
        wanted.param,
        body.stream,
        field_names=names,
        include_usage=wants_usage(body),
    )
    return job.admitted(context)


def _max_tokens(body: ChatRequest) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are given and differ: choose one", param="max_tokens"
        )
    return body.max_completion_tokens


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs requires logprobs: true", param="top_logprobs")
    return None


class _ChatAnswer(Answer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def message(self, index: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self, index: int) -> dict[str, Any]:
        chunk = self.chunk(index, {"delta": {"role": "assistant", "content": ""}})
        return chunk if self.guided is None else {**chunk, "guided": self.guided_info()}

    def content(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def logprobs(self, index: int, output: CompletionOutput, which: slice) -> dict[str, Any] | None:
        return chat_logprobs(output, self.context.texts, self.job.params.logprobs or 0, which)
