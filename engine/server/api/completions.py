"""POST /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request

from engine.outputs import CompletionOutput
from engine.server.api.answers import ChoicesAnswer, TokenPlaces, finite, ranked
from engine.server.api.routes import RESPONSES, BodyRoute, JobResponse
from engine.server.context import Context, ServerContext
from engine.server.request.bodies import CompletionRequest
from engine.server.request.constraints import requested_constraint
from engine.server.request.job import (
    Job,
    OutputForm,
    check_size,
    ignored_fields,
    sampling_params,
)
from engine.server.request.prompts import encode
from guided.errors import InvalidRequest
from guided.json_text import JsonObject
from guided.tools.output_parser import Piece

router = APIRouter(tags=["generation"], route_class=BodyRoute)


@router.post("/v1/completions", responses=RESPONSES)
def create_completion(
    body: CompletionRequest, request: Request, context: Context
) -> JobResponse:
    """Continue one or several prompts, constrained or not."""
    return JobResponse(
        _TextAnswer,
        _build_job(body, context, request.state.request_id),
        request,
        context,
    )


def _build_job(body: CompletionRequest, context: ServerContext, http_id: str) -> Job:
    requested = requested_constraint(body, context.settings)
    if not body.prompt and not isinstance(body.prompt, str):
        raise InvalidRequest("prompt is empty: give at least one", param="prompt")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo is not available with logprobs, which are those of the output only",
            param="echo",
        )
    sent: Sequence[Any] = body.prompt
    is_one = isinstance(sent, str) or isinstance(sent[0], int)
    if is_one:
        sent = [sent]
    max_tokens = body.max_tokens
    if max_tokens is None and requested.constraint is None:
        # OpenAI's default, but not with a constraint, where it would cut off most
        # answers.
        max_tokens = 16
    check_size(context, body, len(sent), max_tokens, body.logprobs)
    prompts = []
    for number, prompt in enumerate(sent):
        param = "prompt"
        if not is_one:
            param = f"prompt[{number}]"
        tokens = prompt  # the engine checks the ids
        if isinstance(prompt, str):
            tokens = encode(
                context, prompt, add_special_tokens=body.add_special_tokens, param=param
            )
        prompts.append(tokens)
    if body.max_tokens is None and max_tokens is not None:
        max_tokens = max(
            1, min(max_tokens, context.llm.max_model_len - max(map(len, prompts)))
        )
    form = OutputForm(requested.constraint)
    params = sampling_params(
        body,
        requested,
        form,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        context=context,
    )
    job = Job(
        *(
            f"cmpl-{uuid.uuid4().hex}",
            http_id,
            prompts,
            params,
            body.stream,
            body.reported,
        ),
        form=form,
        ignored=ignored_fields(body, requested, form),
    ).admitted(context)
    if not body.echo:
        return job
    echoed = []
    for prompt in sent:
        if isinstance(prompt, list):
            prompt = context.decode(prompt)  # the engine has checked the ids
        echoed.append(prompt)
    return replace(job, echoed=echoed)


class _TextAnswer(ChoicesAnswer):
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompts_in_choices = True
    last_part: ClassVar = {"text": ""}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._places = [TokenPlaces(self.pieces) for _ in range(self.job.num_choices)]
        """Places of the tokens that have their log-probabilities, by choice."""

    def message(self, index: int, pieces: Sequence[Piece]) -> JsonObject:
        return {"text": self._echoed(index) + "".join(piece.text for piece in pieces)}

    def opening(self, index: int) -> JsonObject | None:
        text = self._echoed(index)
        if text:
            return {"text": text}
        return None

    def part(self, piece: Piece) -> JsonObject:
        return {"text": piece.text}

    def logprobs(
        self, index: int, output: CompletionOutput, which: slice
    ) -> JsonObject | None:
        """Build OpenAI's older shape. `text_offset` is the place of a token in the
        text, in characters.

        A token that begins inside a character has the offset of that character. A token
        without text has the offset of the text after it.
        """
        if output.logprobs is None:
            return None
        rows = [row for row in output.logprobs[which] if row is not None]
        offsets = [self._places[index].add(token) for token in output.token_ids[which]]
        # stop strings and incomplete characters are not in the text
        if output.finish_reason is not None:
            offsets = [min(offset, len(output.text)) for offset in offsets]
        return {
            "tokens": [self.written(token) for token in output.token_ids[which]],
            "token_logprobs": [finite(row.own) for row in rows],
            "top_logprobs": [
                {self.written(token): logprob for token, logprob in ranked(row)}
                for row in rows
            ],
            "text_offset": offsets,
        }

    def _echoed(self, index: int) -> str:
        """Return the text of the choice's prompt if the request has `echo`, else an
        empty text."""
        if self.job.echoed:
            return self.job.echoed[index // self.job.params.n]
        return ""
