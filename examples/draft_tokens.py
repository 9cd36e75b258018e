"""Speculative decoding with a constraint, in a plain PyTorch loop: `python
examples/draft_tokens.py [MODEL]`.

Drafts are tokens that the constraint forces, then those that follow the newest token in
the prompt, as far as the constraint accepts them. Each position after a draft has a
mask of its own. Prints the output and the number of steps.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.default_model import checkpoint_path
from guided import Constraint, GuidedProcessor, GuidedSequence, InlinePool, Vocabulary
from guided.backends import Backends, candidates
from guided.backends.base import Matcher
from guided.masks.compilation import compile_constraint

MAX_DRAFTS = 4


@torch.inference_mode()
def generate(
    model: Any,
    processor: GuidedProcessor,
    constraint: Constraint,
    prompt: list[int],
    max_tokens: int = 100,
) -> tuple[list[int], int]:
    """Return the greedy output, which is the output without drafts, and the number of
    forward passes."""
    vocabulary = processor.vocabulary
    compiled = compile_constraint(
        Backends(vocabulary), constraint, candidates(constraint.kind)
    )
    matcher = compiled.grammar.matcher()  # in this process: only to propose drafts
    processor.initialize("request", constraint, compiled.backend).result()
    output: list[int] = []
    rows = [GuidedSequence("request", count, output) for count in range(MAX_DRAFTS + 1)]
    committed = [0] * len(rows)
    for steps in range(1, max_tokens + 1):
        drafts = propose(matcher, prompt + output)
        for count in range(1, len(drafts) + 1):  # row i comes after i drafts
            # its last drafts may have been rejected
            processor.rollback(count, committed[count])
            rows[count].output_token_ids = output + drafts[:count]
            committed[count] = len(output)
        processor.prepare(rows[: len(drafts) + 1])
        logits = (
            model(torch.tensor([prompt + output + drafts]))
            .logits[0, -len(drafts) - 1 :]
            .float()
        )
        report = processor.apply(logits)
        for error in report.failed.values():
            raise error
        for token, draft in zip(
            logits.argmax(dim=-1).tolist(), [*drafts, None], strict=True
        ):
            if token in vocabulary.stop_token_ids or len(output) == max_tokens:
                processor.free("request")
                return output, steps
            output.append(token)
            matcher.accept_tokens([token])
            if token != draft:
                break  # the rows behind a rejected draft are not sampled
    processor.free("request")
    return output, steps


def propose(matcher: Matcher, tokens: list[int]) -> list[int]:
    """Return draft tokens that the constraint accepts."""
    drafts = matcher.forced_tokens()[:MAX_DRAFTS]
    newest = [*tokens, *drafts][-1]
    places = [place for place, token in enumerate(tokens[:-1]) if token == newest]
    if places:
        drafts = [*drafts, *tokens[places[-1] + 1 :]][:MAX_DRAFTS]
    return drafts[: matcher.accepts(drafts)]


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else checkpoint_path()
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, model.config.vocab_size)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    messages = [
        {
            "role": "user",
            "content": "Extract name and age as JSON. Anna Weber is 47 years old.",
        }
    ]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    output, steps = generate(
        model,
        GuidedProcessor(InlinePool(vocabulary)),
        Constraint.json_schema(schema),
        tokenizer.encode(prompt, add_special_tokens=False),
    )
    print(vocabulary.decode(output).decode())
    print(f"{len(output)} tokens, {steps} forward passes")


if __name__ == "__main__":
    main()
