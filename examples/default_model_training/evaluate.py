"""Measure a checkpoint with held-out values: `python -m
examples.default_model_training.evaluate [MODEL]`.

Texts count as right if all values of the JSON are right, calls if the function (one of
two to four) and all arguments are right. Both are asked with their constraints, alone
and in long prompts. A conversation counts as ended if each of the user's messages gets
an answer without a call within six turns, with the results of the calls.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from examples.default_model_training.conversations import (
    as_text,
    called,
    conversation,
    lengthened,
)
from examples.default_model_training.corpus import Example, call_task, schema_of
from examples.default_model_training.records import known_record, tell
from examples.default_model_training.values import DATA, Values
from guided.tools.formats import Calls, Function, answer_format, tool_format

TURNS = 6
TALK = (
    "hello",
    "Hi!",
    "Thank you!",
    "thanks",
    "2+2?",
    "What is 3 + 4?",
    "How are you?",
    "Who are you?",
    "ok",
    "bye",
)


def answers(llm: LLM, examples: list[Example]) -> list[str]:
    """Return the greedy answers, with the constraint of the tools or of the expected
    JSON."""
    prompts, params = [], []
    form = tool_format("hermes")
    assert form is not None
    for one in examples:
        constraint: dict[str, Any] = {}
        if one.tools:
            functions = [
                Function(tool["function"]["name"], tool["function"]["parameters"])
                for tool in one.tools
            ]
            calls = Calls(form, functions, required=False, parallel=False)
            constraint["structural_tag"] = {
                "type": "structural_tag",
                "format": answer_format(calls, None),
            }
        elif one.answer.startswith("{"):
            constraint["json_schema"] = schema_of(json.loads(one.answer))
        if one.chat:
            how = {
                "tools": one.tools,
                "add_generation_prompt": True,
                "return_dict": False,
            }
            prompts.append(llm.tokenizer.apply_chat_template(one.messages(), **how))
        else:
            prompts.append(llm.tokenizer.encode(one.turns[0]))
        params.append(SamplingParams(temperature=0, max_tokens=400, **constraint))
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def parsed(text: str) -> Any:
    """Return the JSON of an answer or of its call."""
    try:
        return json.loads(
            text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        )
    except ValueError:
        return None


def text_task(v: Values) -> Example:
    """Return a text about a person, order, event or product, and keys to extract."""
    told = tell(v, known_record(v))
    ask = v.rng.choice(DATA["ask for keys"]).format(k=", ".join(told.asked))
    return Example([f"{ask}\n{told.text}"], json.dumps(told.asked, ensure_ascii=False))


def held_out(
    make: Callable[[Values], Example], count: int, seed: int, size: int = 0
) -> list[Example]:
    """Return examples of one task with held-out values, alone or with `size` characters
    around them."""
    draws = [
        Values(random.Random(f"{seed}:{index}"), held_out=True)
        for index in range(count)
    ]
    examples = [make(v) for v in draws]
    return (
        [lengthened(v, one, size) for v, one in zip(draws, examples, strict=True)]
        if size
        else examples
    )


def shares_right(llm: LLM, examples: list[Example]) -> tuple[float, float]:
    """Return the shares of answers with everything right, and with the right
    function."""
    pairs = [
        (parsed(text), parsed(one.answer))
        for text, one in zip(answers(llm, examples), examples, strict=True)
    ]
    functions = sum(
        isinstance(got, dict) and got.get("name") == expected.get("name")
        for got, expected in pairs
    )
    return sum(got == expected for got, expected in pairs) / len(
        pairs
    ), functions / len(pairs)


@dataclass
class Dialog:
    """A conversation with the model: its prompt, the user's next messages, and the
    results of the functions."""

    prompt: Example
    users: list[dict[str, Any]]
    results: dict[str, str]
    turns: int = 0
    """Answers of the model since the user's last message."""

    def continues(self, text: str) -> bool:
        """Add an answer of the model and the next message. Returns False if the
        conversation has ended."""
        messages, self.turns = self.prompt.turns, self.turns + 1
        call = parsed(text) if "<tool_call>" in text else None
        if call is None or call["name"] in ("final_answer", "final_result"):
            messages.append({"role": "assistant", "content": text})
            messages += self.users[:1]
            self.turns = 0
            return bool(self.users and self.users.pop(0))
        added = [
            called(call["name"], call["arguments"], len(messages)),
            {"role": "tool", "content": self.results.get(call["name"], "ok")},
        ]
        messages += (
            map(as_text, added)
            if messages[0]["content"].startswith("New task:")
            else added
        )
        return self.turns < TURNS


def dialog_of(one: Example) -> Dialog:
    calls = {
        turn["tool_calls"][0]["id"]: turn["tool_calls"][0]["function"]["name"]
        for turn in one.turns
        if "tool_calls" in turn
    }
    results = {
        calls[turn["tool_call_id"]]: turn["content"]
        for turn in one.turns
        if turn["role"] == "tool"
    }
    users = [
        turn
        for turn in one.turns
        if turn["role"] == "user" and not turn["content"].startswith("Observation:")
    ]
    return Dialog(
        Example(users[:1], "", one.system, tools=one.tools), users[1:], results
    )


def share_ended(llm: LLM, examples: list[Example]) -> float:
    """Return the share of conversations in which each of the user's messages gets an
    answer without a call."""
    dialogs = [dialog_of(one) for one in examples]
    running = dialogs
    while running:
        texts = answers(llm, [dialog.prompt for dialog in running])
        running = [
            dialog
            for dialog, text in zip(running, texts, strict=True)
            if dialog.continues(text)
        ]
    return sum(dialog.turns == 0 for dialog in dialogs) / len(dialogs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default=checkpoint_path(), help="checkpoint"
    )
    parser.add_argument("--count", type=int, default=200, help="examples of each kind")
    parser.add_argument("--seed", type=int, default=1, help="seed of the examples")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="*",
        default=(3000, 6000),
        help="lengths of long prompts",
    )
    args = parser.parse_args()
    with LLM(str(args.model), "inline", config=EngineConfig(max_num_seqs=32)) as llm:
        offers = held_out(conversation, 2 * args.count, args.seed)
        print(
            f"conversations that end: {share_ended(llm, [one for one in offers if one.tools][: args.count]):.1%}"
        )
        right = shares_right(llm, held_out(call_task, args.count, args.seed))
        print(
            f"calls with the right arguments, and of the right function: {right[0]:.1%}, {right[1]:.1%}"
        )
        for tokens in (0, *args.tokens):
            right = shares_right(
                llm, held_out(text_task, args.count, args.seed, tokens * 3 // 2)
            )
            print(
                f"texts with all values right, {tokens} tokens before or after: {right[0]:.1%}",
                flush=True,
            )
        tools = held_out(call_task, 1, args.seed)[0].tools
        for ask, text in zip(
            TALK,
            answers(llm, [Example([ask], "", tools=tools) for ask in TALK]),
            strict=True,
        ):
            print(f"{ask} -> {text}")


if __name__ == "__main__":
    main()
