"""POST /v1/responses: a chat in the shape of OpenAI's newer API, without state on the server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from fastapi import APIRouter, Request

from engine.outputs import CompletionOutput, RequestOutput
from engine.server.answers import Answer, to_json, usage_of
from engine.server.chat import build_job
from engine.server.context import Context, ServerContext
from engine.server.endpoint import RESPONSES, GenerationRoute, Prepared
from engine.server.generation import Job
from engine.server.protocol import GuidedInfo
from engine.server.responses_protocol import CHAT_FIELDS, ResponsesRequest
from guided.error_body import error_body
from guided.errors import GuidedError
from guided.tools.parser import Piece

router = APIRouter(tags=["generation"], route_class=GenerationRoute)


@router.post("/v1/responses", response_model=None, responses=RESPONSES)
def create_response(body: ResponsesRequest, request: Request, context: Context) -> Prepared:
    """Answer a chat in the shape of OpenAI's Responses API. The server stores nothing."""
    names = request.state.field_names
    names |= CHAT_FIELDS
    for index in range(len(body.tools or ())):
        for name in ("name", "parameters"):
            names[f"tools[{index}].function.{name}"] = f"tools[{index}].{name}"
    job = build_job(body.as_chat(), context, f"resp_{uuid.uuid4().hex}", request.state.request_id)
    places = {place: (names.get(field, field), pointer) for place, (field, pointer) in job.form.places.items()}
    return partial(_ResponseAnswer, _settings(body, job)), replace(job, form=replace(job.form, places=places))


def _settings(body: ResponsesRequest, job: Job) -> dict[str, Any]:
    """Return the settings of the request that the answer repeats."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": job.params.temperature,
        "text": {"format": {"type": "text"}}
        if body.text is None or body.text.format is None
        else body.text.model_dump(by_alias=True, exclude_unset=True),
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": job.params.top_p,
        "truncation": "disabled",
        "metadata": {},
    }


class _ResponseAnswer(Answer):
    """`settings` are those of the request, which the answer repeats."""

    end = b""

    def __init__(self, settings: dict[str, Any], context: ServerContext, job: Job, guided: GuidedInfo | None) -> None:
        super().__init__(context, job, guided)
        self._settings = settings
        self._parser = job.form.parser()
        self._items = _OutputItems(job.new_call_id)
        self._thoughts = ""
        self._numbers = count()

    def whole(self, finished: Sequence[RequestOutput]) -> bytes:
        for _ in self.new_events(0, finished[0]):
            pass
        return to_json(self._ended(finished))

    def first_events(self) -> Iterator[dict[str, Any]]:
        for status in ("created", "in_progress"):
            yield {"type": f"response.{status}", "response": self._response("in_progress")}

    def new_events(self, prompt: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        [completion] = output.outputs
        pieces = self._parser.feed(completion.text, completion.finish_reason is not None)
        self._thoughts += "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        yield from self._items.add(pieces)
        if completion.finish_reason is not None:
            if not self._items.items:
                yield from self._items.add([Piece("text", "")])
            yield from self._items.close(_status(completion))

    def last_events(self, finished: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        response = self._ended(finished)
        yield {"type": f"response.{response['status']}", "response": response}

    def failure(self, error: GuidedError) -> dict[str, Any]:
        response = self._response("failed", error=error_body(error)["error"])
        return {"type": "response.failed", "response": response}

    def event(self, data: dict[str, Any]) -> bytes:
        kind: str = data["type"]
        written = to_json({**data, "sequence_number": next(self._numbers)})
        return b"event: " + kind.encode() + b"\ndata: " + written + b"\n\n"

    def _ended(self, finished: Sequence[RequestOutput]) -> dict[str, Any]:
        [completion] = finished[0].outputs
        status, counted = _status(completion), usage_of(finished)
        usage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thinking_tokens(completion)},
            "total_tokens": counted["total_tokens"],
        }
        return self._response(
            status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage=usage,
            guided=self.guided_info(finished, [completion]),
        )

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        head = {"id": self.job.request_id, "created_at": self.created, "model": self.context.settings.model_name}
        empty = {"object": "response", "error": None, "incomplete_details": None, "usage": None}
        known = {"status": status, "output": self._items.items, "guided": self.guided_info()}
        return {**head, **empty, **known, **fields, **self._settings}

    def _num_thinking_tokens(self, completion: CompletionOutput) -> int:
        """Count the tokens up to the end of the thoughts."""
        rest = len(self._thoughts.encode()) + completion.text.find(self._thoughts)
        for number, token in enumerate(completion.token_ids):
            if rest <= 0 or not self._thoughts:
                return number
            rest -= len(self.context.texts.bytes_of(token))
        return len(completion.token_ids)


def _status(completion: CompletionOutput) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


class _Kind(NamedTuple):
    """How an item of one kind is written."""

    item: dict[str, Any]
    """Its constant fields."""
    prefix: str
    """Prefix of its id."""
    part: dict[str, Any] | None
    """The constant fields of its only content part. None: the text is a field of the item."""
    events: str
    """First part of the names of the events about its text."""
    field: str
    """Field of its text, in the item or its part, and in the event that ends it."""
    fields: dict[str, Any] = {}  # noqa: RUF012
    """Constant fields of the events about its text."""


_CALL = _Kind({"type": "function_call"}, "fc", None, "response.function_call_arguments", "arguments")
_KINDS = {
    "text": _Kind(
        {"type": "message", "role": "assistant"},
        "msg",
        {"type": "output_text", "annotations": []},
        "response.output_text",
        "text",
        {"logprobs": []},
    ),
    "reasoning": _Kind(
        {"type": "reasoning", "summary": []}, "rs", {"type": "reasoning_text"}, "response.reasoning_text", "text"
    ),
    "call": _CALL,
}
"""By the kind of the piece that begins the item."""


class _OutputItems:
    """Builds the items of one response."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._new_call_id = new_call_id
        self._open: _Kind | None = None
        self._text = ""

    def add(self, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        """Add new pieces, and yield the events."""
        for piece in pieces:
            if piece.kind == "call":
                yield from self.close()
                yield from self._begin(_CALL, {"call_id": self._new_call_id(), "name": piece.text})
                continue
            kind = _KINDS.get(piece.kind, _CALL)
            if kind is not self._open:
                yield from self.close()
                yield from self._begin(kind)
            self._text += piece.text
            yield self._event(f"{kind.events}.delta", delta=piece.text, **kind.fields)

    def _begin(self, kind: _Kind, fields: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        self._open, self._text = kind, ""
        item = {"id": f"{kind.prefix}_{uuid.uuid4().hex}", **kind.item, **(fields or {}), "status": "in_progress"}
        self.items.append({**item, **({"content": []} if kind.part is not None else {kind.field: ""})})
        yield self._event("response.output_item.added", item=self.items[-1])
        if kind.part is not None:
            yield self._event("response.content_part.added", part={**kind.part, kind.field: ""})

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Complete the last item, if it is not complete, and yield the events."""
        kind = self._open
        if kind is None:
            return
        text = {kind.field: self._text}
        self.items[-1] |= {"status": status, **(text if kind.part is None else {"content": [{**kind.part, **text}]})}
        yield self._event(f"{kind.events}.done", **text, **kind.fields)
        if kind.part is not None:
            yield self._event("response.content_part.done", part={**kind.part, **text})
        yield self._event("response.output_item.done", item=self.items[-1])
        self._open = None

    def _event(self, event: str, **fields: Any) -> dict[str, Any]:
        """Build an event about the last item."""
        data = {"type": event, "output_index": len(self.items) - 1, **fields}
        if "item" in fields:
            return data
        return {**data, "item_id": self.items[-1]["id"], **({} if self._open is _CALL else {"content_index": 0})}
