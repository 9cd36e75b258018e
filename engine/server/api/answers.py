"""Answer: writes the answer of a generation endpoint, as a whole or as events. Each
endpoint has a subclass.

`ChoicesAnswer` is the base of chat and text completions, which have choices and stream
chunks of choices. `PartsAnswer` is the base of responses, messages and Ollama's
answers, which divide one output into parts.
"""

from __future__ import annotations

import codecs
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from engine.outputs import CompletionOutput, RequestOutput
from engine.server.context import ServerContext
from engine.server.request.bodies import GuidedInfo, MaskTimes
from engine.server.request.job import Job
from engine.step.logprobs import TokenLogprobs
from guided.errors import GuidedError, error_body
from guided.json_text import JsonObject
from guided.tools.output_parser import Piece

Finished = Sequence[RequestOutput]
"""The last output of each prompt."""
_NO_PIECE = Piece("", "")
_NO_TEXT = Piece("text", "")
Events = Iterator[JsonObject]
"""Events of a stream, before they are written."""


@dataclass
class Answer(ABC):
    """Writes the body of one request's answer, or the events of its stream.

    `guided` describes how the output is constrained. Whole answers and the first events
    of a stream contain it.
    """

    stream_type: ClassVar[str] = "text/event-stream"
    """The media type of a stream."""
    end: ClassVar[bytes] = b"data: [DONE]\n\n"
    """The bytes after the last event of a stream."""

    context: ServerContext
    job: Job
    guided: GuidedInfo | None

    def __post_init__(self) -> None:
        self.created = int(time.time())

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes that each token id adds to an output."""
        return self.context.texts.pieces(self.job.params.skip_special_tokens)

    @abstractmethod
    def whole(self, finished: Finished) -> bytes:
        """Write the answer of a request without `stream`, from one output per prompt.
        Runs in a worker thread."""

    @abstractmethod
    def first_events(self) -> Events:
        """Build the events before the first token."""

    @abstractmethod
    def new_events(self, prompt: int, output: RequestOutput) -> Events:
        """Build the events for the text and tokens of `output` that are new since the
        last call."""

    @abstractmethod
    def last_events(self, finished: Finished) -> Events:
        """Build the events after the last token."""

    def failure(self, error: GuidedError) -> JsonObject:
        """Build the event that ends a stream with an error."""
        return error_body(error)

    def event(self, data: JsonObject) -> bytes:
        """Write an event."""
        return b"data: " + to_json(data) + b"\n\n"

    def token_logprobs(
        self, output: CompletionOutput, places: Iterable[int]
    ) -> list[JsonObject]:
        """Describe the tokens at `places` of an output with log-probabilities, and
        their most likely alternatives."""
        top = self.job.params.logprobs or 0
        described = []
        for place in places:
            row = (output.logprobs or ())[place]
            if row is not None:
                others = [
                    self._token(*alternative) for alternative in ranked(row)[:top]
                ]
                described.append(
                    {
                        **self._token(output.token_ids[place], row.own),
                        "top_logprobs": others,
                    }
                )
        return described

    def _token(self, token: int, logprob: float) -> JsonObject:
        """Describe a token. The field `bytes` may contain only a part of a
        character."""
        code = list(self.context.texts.bytes_of(token))
        return {"token": self.written(token), "logprob": finite(logprob), "bytes": code}

    def written(self, token: int) -> str:
        """Return the text of a token for log-probabilities."""
        if self.job.reported.tokens_as_ids:
            return f"token_id:{token}"
        return self.context.texts.of(token)

    def guided_info(
        self,
        requests: Sequence[RequestOutput] = (),
        outputs: Sequence[CompletionOutput] = (),
    ) -> JsonObject | None:
        """Build the field `guided`, with the figures that `outputs` of `requests` have
        at their end."""
        if self.guided is None:
            return None
        info = self.guided.model_copy()
        if self.job.params.complete and outputs:
            info.completed_early = any(output.completed_early for output in outputs)
        sizes = [
            request.effective_samples
            for request in requests
            if request.effective_samples is not None
        ]
        info.effective_samples = min(sizes, default=None)
        vetoes = Counter[str]()
        for output in outputs:
            vetoes.update(output.vetoes)
        info.vetoes = vetoes or None
        details = [
            output.mask_details for output in outputs if output.mask_details is not None
        ]
        if details and info.backend is not None:
            times = [
                request.metrics for request in requests if request.metrics is not None
            ]
            info.masks = MaskTimes(
                compile=sum(request.compile_seconds for request in requests),
                computed=sum(detail.mask_seconds for detail in details),
                exposed=sum(detail.exposed_seconds for detail in details),
                total=sum(
                    (span.finished_time or time.monotonic())
                    - (span.compiled_time or 0.0)
                    for span in times
                ),
            )
            kept = [
                mass
                for detail in details
                for mass in detail.kept_mass
                if mass is not None
            ]
            if kept:
                info.kept_mass = fmean(kept)
        return info.model_dump(exclude_none=True)


class ChoicesAnswer(Answer):
    """An answer with choices. The argument `index` numbers the choices of all
    prompts."""

    whole_object: ClassVar[str]
    """The `object` of a whole answer."""
    chunk_object: ClassVar[str]
    """The `object` of a chunk."""
    prompts_in_choices: ClassVar[bool] = False
    """Whether reports on a prompt stand in its choices, and not beside them."""
    last_part: ClassVar[JsonObject]
    """The part of a choice's last chunk that would carry text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parsers = [self.job.form.parser() for _ in range(self.job.num_choices)]
        self._sent = [(0, False)] * self.job.num_choices
        """Choice of a stream -> number of tokens that were sent, and whether the choice
        has ended."""

    @abstractmethod
    def message(self, index: int, pieces: Sequence[Piece]) -> JsonObject:
        """Build the part of a whole answer's choice that carries the text."""

    @abstractmethod
    def part(self, piece: Piece) -> JsonObject:
        """Build the part of a chunk that carries a piece of the output."""

    def finish_reason(self, index: int, output: CompletionOutput) -> str | None:
        """Return why the choice ended. Called after the text of the choice was
        built."""
        return output.finish_reason

    @abstractmethod
    def logprobs(
        self, index: int, output: CompletionOutput, which: slice
    ) -> JsonObject | None:
        """Build the log-probabilities of the tokens `which`, or None if not requested.
        Called in token order."""

    @abstractmethod
    def opening(self, index: int) -> JsonObject | None:
        """Build the part of the chunk before a choice's first token, or None for no
        such chunk."""

    def _pieces_of(self, index: int, output: CompletionOutput) -> list[Piece]:
        return self.parsers[index].feed(output.text, output.has_stopped)

    def _of_tokens(
        self, index: int, output: CompletionOutput, which: slice
    ) -> JsonObject:
        """Build the fields that report on the tokens `which`: `logprobs`, `token_ids`,
        `masks`."""
        # as OpenAI: without the end token
        in_text = which.indices(len(output.token_ids) - output.ends_with_stop_token)
        fields: JsonObject = {"logprobs": self.logprobs(index, output, slice(*in_text))}
        if self.job.reported.token_ids:
            fields["token_ids"] = output.token_ids[which]
        if (details := output.mask_details) is not None:
            texts = [self.context.texts.of(token) for token in output.token_ids[which]]
            masks = {
                "tokens": texts,
                "allowed": details.allowed[which],
                "forced": details.forced[which],
            }
            fields["masks"] = {**masks, "kept_mass": details.kept_mass[which]}
        return fields

    def _of_prompt(
        self, prompt: int, output: RequestOutput | None = None
    ) -> JsonObject:
        """Build the fields that report on a prompt. `output` has its
        log-probabilities."""
        fields: JsonObject = {}
        if self.job.reported.token_ids:
            fields["prompt_token_ids"] = self.job.prompts[prompt]
        if output is not None and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [
                token and self._alternatives(token) for token in output.prompt_logprobs
            ]
        return fields

    def _alternatives(self, alternatives: TokenLogprobs) -> dict[int, JsonObject]:
        """Describe a token of a prompt and its alternatives, as vLLM does."""
        return {
            token: {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self.written(token),
            }
            for token, logprob, rank in alternatives.rows()
        }

    def whole(self, finished: Finished) -> bytes:
        answer = {
            **self._head(self.whole_object),
            "choices": [],
            "usage": usage_of(finished),
            "system_fingerprint": None,
        }
        completions = []
        for prompt, output in enumerate(finished):
            of_prompt = self._of_prompt(prompt, output)
            completions += output.outputs
            for completion in output.outputs:
                index = prompt * self.job.params.n + completion.index
                choice = {
                    "index": index,
                    **self.message(index, self._pieces_of(index, completion)),
                    "finish_reason": self.finish_reason(index, completion),
                    "stop_reason": completion.stop_reason,
                    **self._of_tokens(index, completion, slice(None)),
                }
                answer["choices"].append(choice)
                if self.prompts_in_choices:
                    choice |= of_prompt
                else:
                    answer |= of_prompt
        answer["guided"] = self.guided_info(finished, completions)
        return to_json(answer)

    def new_events(self, prompt: int, output: RequestOutput) -> Events:
        for completion in output.outputs:
            index = prompt * self.job.params.n + completion.index
            tokens, ended = self._sent[index]
            if ended:
                continue
            count = tokens
            if (
                completion.logprobs is not None
                or completion.mask_details is not None
                or self.job.reported.token_ids
            ):
                count = len(completion.token_ids)
            pieces = self._pieces_of(index, completion)
            if not pieces and tokens < count:
                pieces = [_NO_TEXT]
            for piece in pieces:  # the first chunk has the reports on the tokens
                fields = {
                    **self.part(piece),
                    **self._of_tokens(index, completion, slice(tokens, count)),
                }
                yield self._chunk(index, fields, len(completion.token_ids))
                tokens = count
            self._sent[index] = count, completion.finish_reason is not None
            if completion.finish_reason is not None:
                reasons = {
                    "finish_reason": self.finish_reason(index, completion),
                    "stop_reason": completion.stop_reason,
                }
                chunk = self._chunk(
                    index, {**self.last_part, **reasons}, len(completion.token_ids)
                )
                if self.job.params.complete or (
                    completion.mask_details is not None and self.guided is not None
                ):
                    chunk["guided"] = self.guided_info([output], [completion])
                yield chunk

    def first_events(self) -> Events:
        guided: JsonObject = {}
        if self.guided is not None:
            guided["guided"] = self.guided_info()
        for index in range(self.job.num_choices):
            opening = self.opening(index)
            of_prompt = self._of_prompt(index // self.job.params.n)
            if guided or of_prompt or opening is not None:
                choice = opening or self.part(_NO_TEXT)
                chunk = self._chunk(index, choice) | guided
                if self.prompts_in_choices:
                    chunk["choices"][0] |= of_prompt
                else:
                    chunk |= of_prompt
                yield chunk

    def last_events(self, finished: Finished) -> Events:
        if self.job.reported.usage:
            yield {
                **self._head(self.chunk_object),
                "choices": [],
                "usage": usage_of(finished),
            }

    def _chunk(self, index: int, fields: JsonObject, num_tokens: int = 0) -> JsonObject:
        """Build a chunk. `num_tokens`: number of output tokens of the choice so far."""
        choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if self.job.reported.usage:
            chunk["usage"] = None
        if self.job.reported.usage_in_chunks:
            chunk["usage"] = usage(
                len(self.job.prompts[index // self.job.params.n]), num_tokens
            )
        return chunk

    def _head(self, kind: str) -> JsonObject:
        return {
            "id": self.job.request_id,
            "object": kind,
            "created": self.created,
            "model": self.context.settings.model_name,
        }


class PartsAnswer(Answer):
    """An answer with one output as a list of parts: texts, thoughts and calls. Only the
    last part may still grow."""

    end = b""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parser = self.job.form.parser()
        self.parts: list[JsonObject] = []
        self.open = _NO_PIECE
        """The piece that began the part that still grows."""
        self.text = ""
        """The text of the open part."""
        self._text_tokens = TokenPlaces(self.pieces)

    def begin(self, piece: Piece) -> Events:
        """Append the part that `piece` begins, and yield the events. The text of a
        call's piece is the called name."""
        yield from ()

    @abstractmethod
    def grow(self, text: str, logprobs: list[JsonObject]) -> Events:
        """Yield the events about new text of the open part. `logprobs` has the
        log-probabilities of its tokens, if the part is text and the request asks for
        them."""

    @abstractmethod
    def close(self, completion: CompletionOutput | None) -> Events:
        """Complete the open part with its text, and yield the events. `completion`: the
        output, if it has ended."""

    @abstractmethod
    def ended(self, finished: Finished) -> JsonObject:
        """Build the body of a whole answer. Called when the last part is complete."""

    def whole(self, finished: Finished) -> bytes:
        for _ in self.new_events(0, finished[0]):
            pass
        return to_json(self.ended(finished))

    def new_events(self, prompt: int, output: RequestOutput) -> Events:
        [completion] = output.outputs
        has_ended = completion.finish_reason is not None
        pieces = self.parser.feed(completion.text, completion.has_stopped)
        if has_ended and not pieces and not self.parts:
            pieces = [_NO_TEXT]
        for piece in pieces:
            is_call = piece.kind in ("call", "custom")
            continues = (
                piece.kind in (self.open.kind, "arguments", "input") and not is_call
            )
            if not continues:
                yield from self._close()
                self.open = piece
                self.text = ""
                yield from self.begin(piece)
            if not is_call:
                self.text += piece.text
                yield from self.grow(piece.text, self._logprobs_of(piece, completion))
        if has_ended:
            yield from self._close(completion)

    def _logprobs_of(
        self, piece: Piece, completion: CompletionOutput
    ) -> list[JsonObject]:
        if completion.logprobs is None or piece.kind != "text":
            return []
        places = self._text_tokens.between(
            piece.end - len(piece.text), piece.end, completion.token_ids
        )
        return self.token_logprobs(completion, places)

    def event(self, data: JsonObject) -> bytes:
        kind: str = data["type"]
        return b"event: " + kind.encode() + b"\n" + super().event(data)

    def _close(self, completion: CompletionOutput | None = None) -> Events:
        if self.open is not _NO_PIECE:
            yield from self.close(completion)
            self.open = _NO_PIECE


class TokenPlaces:
    """Finds the places of tokens in the text of an output. The tokens are added in
    order.

    Args:
        pieces: the bytes that each token id adds to the output.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_tokens = 0
        self._end = 0
        """Number of characters of the tokens that were added."""

    def add(self, token: int) -> int:
        """Add the next token, and return the number of characters before it."""
        start = self._end
        self._end += len(self._decoder.decode(self._pieces[token]))
        self._num_tokens += 1
        return start

    def between(self, begin: int, end: int, token_ids: Sequence[int]) -> Iterator[int]:
        """Add the tokens up to the character `end`, and yield the indices of those that
        spell characters from `begin` on. `token_ids` are all tokens of the output."""
        while self._num_tokens < len(token_ids) and self._end < end:
            token = token_ids[self._num_tokens]
            start = self.add(token)
            # A token may have only the first bytes of a character, and a special token
            # may have no bytes.
            if self._pieces[token] and (start >= begin or self._end > begin):
                yield self._num_tokens - 1


def finite(logprob: float) -> float:
    """Replace -inf, which JSON cannot express, by -9999.0."""
    return max(logprob, -9999.0)


def ranked(alternatives: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the token ids and log-probabilities of the alternatives to a token, the
    most likely first."""
    rows = sorted(alternatives.rows(), key=lambda row: row[2])
    return [(token, finite(logprob)) for token, logprob, _ in rows]


def to_json(data: Any) -> bytes:
    """Write compact JSON in UTF-8. Lone surrogates, which UTF-8 cannot encode, become
    JSON escapes."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )


def usage_of(finished: Finished) -> JsonObject:
    """Count the tokens of an answer. A prompt counts once, for any n."""
    prompt = sum(len(output.prompt_token_ids) for output in finished)
    cached = sum(output.num_cached_tokens or 0 for output in finished)
    generated = 0
    for output in finished:
        generated += sum(len(completion.token_ids) for completion in output.outputs)
    return {
        **usage(prompt, generated),
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage(prompt: int, completion: int) -> JsonObject:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
