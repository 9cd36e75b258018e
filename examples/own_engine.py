"""Guided decoding in an engine of your own, a plain PyTorch loop: `python
examples/own_engine.py [MODEL] [--ray]`.

With `--ray`, actors compute the masks during the forward pass. Otherwise this process
computes them, after it.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.default_model import checkpoint_path
from guided import (
    Constraint,
    Grammar,
    GuidedError,
    GuidedProcessor,
    GuidedSequence,
    InlinePool,
    MaskPool,
    Vocabulary,
    decode_step,
)

DEADLINE = 0.002
"""Seconds that a step waits for masks after the forward pass."""


@dataclass
class Request:
    prompt: list[int]
    constraint: Constraint | None = None
    output: list[int] = field(default_factory=list)
    error: GuidedError | None = None


@torch.inference_mode()
def decode(
    model: Any,
    processor: GuidedProcessor,
    requests: list[Request],
    max_tokens: int = 100,
) -> None:
    """Run all requests greedily to their ends. Sets `output`, and `error` of requests
    that fail."""
    sequences = {
        index: GuidedSequence(str(index), index, request.output)
        for index, request in enumerate(requests)
        if request.constraint is not None
    }
    compiling: dict[int, Future[Grammar]] = {}
    running: list[int] = []
    late: set[int] = set()

    def end(index: int, error: GuidedError | None = None) -> None:
        requests[index].error = error
        processor.free(str(index))
        late.discard(index)
        if index in running:
            running.remove(index)

    for index, request in enumerate(requests):  # once per request: compile its grammar
        if request.constraint is None:
            running.append(index)
            continue
        try:
            compiling[index] = processor.initialize(str(index), request.constraint)
        except GuidedError as error:
            end(index, error)

    while compiling or running or late:
        if not running and not late:
            wait(compiling.values(), return_when="FIRST_COMPLETED")
        for index in [index for index, future in compiling.items() if future.done()]:
            try:
                compiling.pop(index).result()
                running.append(index)
            except GuidedError as error:
                end(index, error)
        # late rows with a mask by now
        for index in processor.decided(late) if running else list(late):
            late.remove(index)
            running.append(index)
        if not running:
            continue

        guided = [index for index in running if index in sequences]
        texts = [requests[index].prompt + requests[index].output for index in running]
        step = decode_step(
            processor,
            [sequences[index] for index in guided],
            forward=partial(forward, model, texts),
            sample=lambda logits: logits.argmax(dim=-1).tolist(),
            logits_rows=[running.index(index) for index in guided],
            deadline=DEADLINE,
        )
        for index, token in zip(list(running), step.tokens, strict=True):
            if index in step.report.failed:
                end(index, step.report.failed[index])
            elif index in step.report.late:  # not sampled; the other rows continue
                running.remove(index)
                late.add(index)
            elif token in processor.vocabulary.stop_token_ids:
                end(index)
            else:
                if index not in sequences:
                    requests[index].output.append(token)
                if len(requests[index].output) >= max_tokens:
                    end(index)


def forward(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """Return the logits after each text's last token, `[texts, tokens]`. A real engine
    has a KV cache."""
    longest = max(map(len, texts))
    tokens = torch.tensor(
        [text + [0] * (longest - len(text)) for text in texts], device=model.device
    )
    lengths = torch.tensor([len(text) for text in texts], device=model.device)
    mask = torch.arange(longest, device=model.device) < lengths[:, None]
    hidden: torch.Tensor = model.model(
        tokens, attention_mask=mask.long(), use_cache=False
    ).last_hidden_state
    logits: torch.Tensor = model.lm_head(
        hidden[torch.arange(len(texts)), lengths - 1]
    ).float()
    return logits


def open_pool(vocabulary: Vocabulary, ray: bool) -> MaskPool:
    if not ray:
        return InlinePool(vocabulary)
    from actors import RayPool

    return RayPool(vocabulary)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTIONS = [
    (
        "Extract name and age as JSON. Anna Weber is 47 years old.",
        Constraint.json_schema(PERSON),
    ),
    (
        "The meeting takes place on 2031-05-17 in Oslo. Extract the date.",
        Constraint.regex(r"\d{4}-\d{2}-\d{2}"),
    ),
    ("The hotel is wonderful. Is that good?", Constraint.choice(["yes", "no"])),
    ("Say something.", None),
    ("Something that no backend has.", Constraint.regex(r"a(?=b)")),
]


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--ray"]
    path = arguments[0] if arguments else checkpoint_path()
    model = AutoModelForCausalLM.from_pretrained(path).eval()  # once per model
    tokenizer = AutoTokenizer.from_pretrained(path)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, model.config.vocab_size)
    pool = open_pool(vocabulary, "--ray" in sys.argv)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for text, _ in QUESTIONS
    ]
    requests = [
        Request(tokenizer.encode(prompt, add_special_tokens=False), constraint)
        for prompt, (_, constraint) in zip(prompts, QUESTIONS, strict=True)
    ]
    decode(model, GuidedProcessor(pool), requests)
    for request in requests:
        print(request.error or vocabulary.decode(request.output).decode())
    pool.shutdown()


if __name__ == "__main__":
    main()
