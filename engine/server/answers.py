"""Answer: what a generation endpoint sends back, as a whole or in chunks. Each endpoint has a subclass."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from engine.outputs import CompletionOutput, RequestOutput
from engine.server.context import ServerContext
from engine.server.generation import Job
from engine.server.protocol import GenerationRequest, GuidedInfo, Usage

Body = TypeVar("Body", bound=GenerationRequest)


class Answer(ABC, Generic[Body]):
    """Writes the bodies of one request's answer. `index` is the index of a choice, over all prompts.

    Args:
        guided: how the output is constrained. It stands in a whole answer and in the first chunk of a choice.
    """

    response_type: ClassVar[type[BaseModel]]
    chunk_object: ClassVar[str]
    """The `object` of a chunk."""

    def __init__(self, context: ServerContext, body: Body, job: Job, guided: GuidedInfo | None) -> None:
        self.context = context
        self.body = body
        self.job = job
        self.guided = guided
        self.include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._created = int(time.time())
        self._sent = [(0, 0, False)] * job.num_choices
        """What a stream's client has been sent of each choice: characters, tokens, and whether it has ended."""

    @abstractmethod
    def choice(self, index: int, output: CompletionOutput) -> BaseModel:
        """Build a choice of a whole answer."""

    @abstractmethod
    def content(self, text: str | None) -> dict[str, Any]:
        """Build the part of a chunk that carries new text. None: the choice has ended."""

    @abstractmethod
    def logprobs(self, index: int, output: CompletionOutput, start: int = 0) -> BaseModel | None:
        """Build the log-probabilities of the tokens from `start` on; None if the request asked for none."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Build a choice's first chunk, if there is something to say before the first token."""

    def whole(self, finished: Sequence[RequestOutput]) -> BaseModel:
        """Build the answer of a request without `stream`. `finished` has one output per prompt."""
        n = self.job.params.n
        choices = [
            self.choice(prompt * n + each.index, each)
            for prompt, output in enumerate(finished)
            for each in output.outputs
        ]
        return self.response_type(
            id=self.job.request_id,
            created=self._created,
            model=self.context.model_name,
            choices=choices,
            usage=_usage_of(finished),
            guided=self.guided,
        )

    def new_chunks(self, prompt: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Build the chunks for what is new in `output` since the last call."""
        for completion in output.outputs:
            index = prompt * self.job.params.n + completion.index
            characters, tokens, ended = self._sent[index]
            if ended:
                continue
            text = completion.text[characters:]
            if text or (completion.logprobs is not None and len(completion.token_ids) > tokens):
                logprobs = self.logprobs(index, completion, tokens)
                yield self.chunk(index, self.content(text), None if logprobs is None else logprobs.model_dump())
                characters, tokens = characters + len(text), len(completion.token_ids)
            self._sent[index] = characters, tokens, completion.finish_reason is not None
            if completion.finish_reason is not None:
                chunk = self.chunk(index, self.content(None), finish_reason=completion.finish_reason)
                chunk["choices"][0]["stop_reason"] = completion.stop_reason
                yield chunk

    def usage(self, finished: Sequence[RequestOutput]) -> dict[str, Any]:
        """Build the stream's last chunk, which has no choices."""
        return {**self._head(), "choices": [], "usage": _usage_of(finished).model_dump()}

    def chunk(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head(), "choices": [choice]}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.job.request_id,
            "object": self.chunk_object,
            "created": self._created,
            "model": self.context.model_name,
        }


def _usage_of(finished: Sequence[RequestOutput]) -> Usage:
    """Count tokens. A prompt counts once, whatever n is."""
    prompt = sum(len(output.prompt_token_ids) for output in finished)
    completion = sum(len(each.token_ids) for output in finished for each in output.outputs)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
