"""POST /v1/check: runs the admission and the compilation of a chat request, and generates nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from engine.server.answers import Answer
from engine.server.chat import create_chat_completion
from engine.server.context import Context, ServerContext
from engine.server.endpoint import GenerationRoute, Prepared
from engine.server.generation import Outputs
from engine.server.protocol import ChatRequest, GuidedInfo
from engine.server.streaming import pieces


class CheckRoute(GenerationRoute):
    """A route that ends a request once it is admitted. A rejected request is answered with its error."""

    async def content(self, outputs: Outputs, answer: Answer, context: ServerContext) -> AsyncIterator[bytes]:
        """Return what is known at the admission. The end of the answer aborts the request."""
        _, first = await anext(outputs.stream)
        checked = CheckedRequest(
            guided=answer.guided, compile_seconds=first.compile_seconds, prompt_tokens=len(first.prompt_token_ids)
        )
        return pieces(checked.model_dump_json(exclude_none=True).encode())


router = APIRouter(tags=["generation"], route_class=CheckRoute)


class CheckedRequest(BaseModel):
    """A request that is accepted: its constraint is compiled."""

    guided: GuidedInfo | None = None
    compile_seconds: float = Field(description="The time that compiling the grammar took; 0 if it was compiled before.")
    prompt_tokens: int


@router.post("/v1/check", response_model=CheckedRequest)
def check_request(body: ChatRequest, request: Request, context: Context) -> Prepared:
    """Take a chat request through admission and compilation only. A request that is refused gets its error."""
    body.stream, body.stream_options = False, None
    answer, job = create_chat_completion(body, request, context)
    for group in job.groups:
        group.stream = True  # the first output comes at the admission
    return answer, job
