"""Measure a checkpoint with held-out values: `python -m examples.default_model_training.evaluate [MODEL]`.

Texts: all values of the JSON are right. Calls: the function is the right one of two to four; all arguments are. Both
with their constraints, alone and in long prompts. Conversations: with the results of the calls, each of the user's
messages is answered without a call within six turns.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from examples.default_model_training.conversations import as_text, called, conversation, lengthened, returned
from examples.default_model_training.corpus import Example, Request, call_task, schema_of
from examples.default_model_training.records import known_record, tell
from examples.default_model_training.values import DATA, Values
from guided.tools.formats import Calls, Function, answer_format, tool_format

TURNS = 6
TALK = ("hello", "Hi!", "Thank you!", "thanks", "2+2?", "What is 3 + 4?", "How are you?", "Who are you?", "ok", "bye")


def answers(llm: LLM, examples: list[Example]) -> list[str]:
    """The greedy answers, with the constraint of the tools, or of the expected JSON."""
    prompts, params = [], []
    form = tool_format("hermes")
    assert form is not None
    for one in examples:
        constraint: dict[str, Any] = {}
        if one.tools:
            functions = [Function(tool["function"]["name"], tool["function"]["parameters"]) for tool in one.tools]
            calls = Calls(form, functions, required=False, parallel=False)
            constraint["structural_tag"] = {"type": "structural_tag", "format": answer_format(calls, None)}
        elif one.answer.startswith("{"):
            constraint["json_schema"] = schema_of(json.loads(one.answer))
        if one.chat:
            how = {"tools": one.tools, "add_generation_prompt": True, "return_dict": False}
            prompts.append(llm.tokenizer.apply_chat_template(one.messages(), **how))
        else:
            prompts.append(llm.tokenizer.encode(one.turns[0]))
        params.append(SamplingParams(temperature=0, max_tokens=400, **constraint))
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def parsed(text: str) -> Any:
    """The JSON of an answer or of its call."""
    try:
        return json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    except ValueError:
        return None


def text_task(v: Values) -> Example:
    """A text about a person, order, event or product, and keys to extract."""
    told = tell(v, known_record(v))
    ask = v.rng.choice(DATA["ask for keys"]).format(k=", ".join(told.asked))
    return Example([f"{ask}\n{told.text}"], json.dumps(told.asked, ensure_ascii=False))


def held_out(make: Any, count: int, seed: int, size: int = 0) -> list[Example]:
    """Examples of one task with held-out values, alone or with `size` characters around them."""
    examples = []
    for index in range(count):
        v = Values(random.Random(f"{seed}:{index}"), held_out=True)
        one = make(v)
        examples.append(lengthened(v, one, size) if size else one)
    return examples


def values_right(llm: LLM, examples: list[Example]) -> float:
    pairs = zip(answers(llm, examples), examples, strict=True)
    return sum(parsed(text) == parsed(one.answer) for text, one in pairs) / len(examples)


def calls_right(llm: LLM, examples: list[Example]) -> tuple[float, float]:
    """The shares of right functions, and of right functions with right arguments."""
    pairs = [(parsed(text), parsed(one.answer)) for text, one in zip(answers(llm, examples), examples, strict=True)]
    functions = sum(isinstance(call, dict) and call["name"] == expected["name"] for call, expected in pairs)
    return functions / len(pairs), sum(call == expected for call, expected in pairs) / len(pairs)


def conversations_end(llm: LLM, count: int, seed: int, show: int) -> tuple[float, float]:
    """The shares of conversations that end, and that end with the expected answer."""
    examples = [one for one in held_out(conversation, 2 * count, seed) if one.tools][:count]
    running = []
    for one in examples:
        named = {
            turn["tool_calls"][0]["id"]: turn["tool_calls"][0]["function"]["name"]
            for turn in one.turns
            if "tool_calls" in turn
        }
        results = {named[turn["tool_call_id"]]: turn["content"] for turn in one.turns if turn["role"] == "tool"}
        users = [turn for turn in one.turns if turn["role"] == "user" and "Observation:" not in turn["content"]]
        running.append((one, Example(users[:1], "", one.system, tools=one.tools), users[1:], results))
    ended = right = 0
    left = dict.fromkeys(range(len(running)), TURNS)
    while left:
        now = [*left]
        for number, text in zip(now, answers(llm, [running[number][1] for number in now]), strict=True):
            one, dialog, users, results = running[number]
            call = parsed(text) if "<tool_call>" in text else None
            if call is None or call["name"] in ("final_answer", "final_result"):
                dialog.turns.append({"role": "assistant", "content": text})
                if users:
                    dialog.turns.append(users.pop(0))
                    left[number] = TURNS
                    continue
                ended += "<tool_call>" not in text or call is not None
                right += text == one.answer
                show -= shown(one, dialog) if text != one.answer and show > 0 else 0
                del left[number]
                continue
            message = called(Request({"function": call}, "", call["arguments"], {}), len(dialog.turns))
            result = returned(results.get(call["name"], "ok"), len(dialog.turns))
            is_text = dialog.turns[0]["content"].startswith("New task:")
            dialog.turns += [as_text(turn, True) for turn in (message, result)] if is_text else [message, result]
            left[number] -= 1
            if not left[number]:
                shown(one, dialog)
                del left[number]
    return ended / len(examples), right / len(examples)


def shown(one: Example, dialog: Example) -> int:
    """Print a conversation."""
    names = [tool["function"]["name"] for tool in one.tools or ()]
    for turn in dialog.turns:
        print(f"  {turn['role']}: {turn.get('tool_calls') or turn['content']}"[:400])
    print(f"  expected: {one.answer} ({', '.join(names)})\n")
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=checkpoint_path(), help="checkpoint")
    parser.add_argument("--count", type=int, default=200, help="examples of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the examples")
    parser.add_argument("--tokens", type=int, nargs="*", default=(3000, 6000), help="lengths of long prompts")
    parser.add_argument("--show", type=int, default=0, help="conversations to print that end otherwise than expected")
    args = parser.parse_args()
    config = EngineConfig(max_num_seqs=32)
    with LLM(str(args.model), "inline", config=config) as llm:
        print(
            f"texts: {values_right(llm, held_out(text_task, args.count, args.seed)):.1%} with all values right",
            flush=True,
        )
        right = calls_right(llm, held_out(call_task, args.count, args.seed))
        print("calls: {:.1%} of the right function, {:.1%} with the right arguments".format(*right), flush=True)
        ends = conversations_end(llm, args.count, args.seed, args.show)
        print("conversations: {:.1%} end, {:.1%} as expected".format(*ends), flush=True)
        for tokens in args.tokens:
            examples = held_out(text_task, args.count // 4, args.seed, int(tokens / 0.65))
            print(f"texts in {tokens} tokens: {values_right(llm, examples):.1%} with all values right", flush=True)
        [tool, *_] = held_out(call_task, 1, args.seed)[0].tools or ()
        for ask, text in zip(TALK, answers(llm, [Example([ask], "", tools=[tool]) for ask in TALK]), strict=True):
            print(f"{ask} -> {text!r}")


if __name__ == "__main__":
    main()
