"""GET /v1/models, /v1/models/{name} and /version, POST /tokenize and /detokenize."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Request

from engine.server.api.routes import BodyRoute
from engine.server.context import Context
from engine.server.request.bodies import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from engine.server.request.prompts import encode, encode_body
from guided.errors import InvalidRequest

router = APIRouter(tags=["models"])
tokenization = APIRouter(tags=["tokenization"], route_class=BodyRoute)


@router.get("/v1/models")
async def list_models(context: Context) -> ModelList:
    """List the served model."""
    return ModelList(data=[await get_model(context.settings.model_name, context)])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: Context) -> ModelCard:
    context.check_model(name)
    length = context.llm.max_model_len
    return ModelCard(id=name, created=context.created, root=name, max_model_len=length)


@router.get("/version")
async def get_version() -> dict[str, str]:
    return {"version": version("guided")}


@tokenization.post("/tokenize")
def tokenize(
    body: TokenizeRequest, request: Request, context: Context
) -> TokenizeResponse:
    """Return the token ids of a prompt, or of chat messages in the chat template."""
    if body.messages is None:
        tokens = encode(
            context,
            body.prompt or "",
            add_special_tokens=body.add_special_tokens,
            param="prompt",
        )
    else:
        tokens = encode_body(context, body, body.messages)
    answer = TokenizeResponse(
        count=len(tokens), max_model_len=context.llm.max_model_len, tokens=tokens
    )
    if body.return_token_strs:
        answer.token_strs = list(map(context.texts.of, tokens))
    if request.state.ignored:
        answer.guided = {"ignored": request.state.ignored}
    return answer


@tokenization.post("/detokenize")
def detokenize(
    body: DetokenizeRequest, request: Request, context: Context
) -> DetokenizeResponse:
    """Return the text of token ids, special tokens included."""
    size = context.llm.model.vocabulary.padded_vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise InvalidRequest(f"{wrong} is not a token id of this model", param="tokens")
    return DetokenizeResponse(prompt=context.decode(body.tokens))
