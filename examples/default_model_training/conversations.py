"""Conversations with functions: calls, their results, and answers in words; some are
long.

The conversations have the forms that clients send: results as JSON, as Python literals
or in words, system prompts of any length, a function for the final answer, and the
texts that smolagents' two agents keep of their calls.
"""

from __future__ import annotations

import json
import pydoc_data.topics  # English text in every Python
import random
from typing import Any

from examples.default_model_training.corpus import (
    Example,
    Request,
    call_task,
    choice_task,
    example,
    family,
    json_task,
    offered,
    request_of,
    talk_task,
    value_task,
    written,
)
from examples.default_model_training.records import known_record, shown, tell
from examples.default_model_training.values import DATA, Values

PROSE = "\n".join(pydoc_data.topics.topics.values())
RESULTS: dict[str, list[Any]] = {}
for name, (kinds, sentence) in DATA["results"].items():
    RESULTS.setdefault(name.strip(), []).append((kinds, sentence))


def outcome(v: Values, request: Request) -> tuple[str, str]:
    """Return the result of a function as the text of a message, and the model's answer
    to it."""
    rng = v.rng
    kind = rng.random()
    if kind < 0.12:
        return rng.choice(DATA["confirmations"]), "Done."
    if kind < 0.2:
        error = rng.choice(DATA["errors"]).format(w=v.word())
        return rng.choice(("Error: {}", "error: {}", '{{"error": "{}"}}')).format(
            error
        ), f"That failed: {error}."
    if kind < 0.3:
        text = v.phrase().rstrip(".")
        more = rng.choice(
            (
                "",
                "",
                ".",
                ".",
                f"\n{v.phrase()}",
                f".\n{filler(v, rng.randint(50, 1500))}",
            )
        )
        return text + more, f"{text[0].upper()}{text[1:]}."
    if kind < 0.34:
        things = [
            rng.choice((v.product, v.person, v.word, v.city))()
            for _ in range(rng.randint(2, 4))
        ]
        items = [{"name": thing, v.one_of("keys"): v.number()} for thing in things]
        result = rng.choice((things, items, {"results": things}, {"items": items}))
        return json.dumps(
            result, ensure_ascii=False
        ), f"I found {', '.join(things[:-1])} and {things[-1]}."
    known = RESULTS.get(family(request.tool)[0])
    if known and kind < 0.84:
        kinds, sentence = rng.choice(known)
        result = {key: v.draw(kind) for key, kind in kinds.items()}
        answer = sentence.format_map(
            {**dict.fromkeys(DATA["parameters"], "it"), **request.places, **result}
        )
    else:
        keys = [
            v.one_of("keys") if rng.random() < 0.7 else v.word()
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        result = {
            key: v.draw(
                rng.choice(("word", "number", "price", "iso_date", "code", "city"))
            )
            for key in keys
        }
        parts = [f"the {key} is {value}" for key, value in result.items()]
        answer = ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1]
        answer = answer[0].upper() + answer[1:] + "."
    if len(result) == 1 and rng.random() < 0.5:
        [value] = result.values()
        return str(
            value
        ), answer if known and kind < 0.84 else f"The result is {value}."
    if known and kind < 0.84 and rng.random() < 0.3:
        result = {**request.arguments, **result}
    if rng.random() < 0.2:
        lines = [f"{key}: {shown(value, rng)}" for key, value in result.items()]
        return rng.choice(("\n", ", ", "; ")).join(lines), answer
    whole = {"result": result} if rng.random() < 0.1 else result
    indent, compact = rng.choices(
        ((None, False), (2, False), (None, True)), (0.75, 0.1, 0.15)
    )[0]
    text = json.dumps(
        whole,
        ensure_ascii=False,
        indent=indent,
        separators=(",", ":") if compact else None,
    )
    return str(whole) if rng.random() < 0.15 else text, answer


def filler(v: Values, size: int) -> str:
    """Return about `size` characters of instructions, English text and examples of
    other tasks."""
    parts: list[str] = []
    while sum(map(len, parts)) < size:
        kind = v.rng.random()
        if kind < 0.4:
            parts.append(v.rng.choice(DATA["rules"]))
        elif kind < 0.7:
            tenth = len(PROSE) // 10
            start = (
                v.rng.randrange(tenth)
                if v.held_out
                else v.rng.randrange(tenth, len(PROSE))
            )
            parts.append(PROSE[start : start + v.rng.randint(50, 1500)])
        else:
            request = request_of(v)
            call, (result, _) = (
                json.dumps(
                    {"name": request.name, "arguments": request.arguments},
                    indent=v.rng.choice((None, 2)),
                ),
                outcome(v, request),
            )
            parts.append(
                f"Task: {request.ask}\n\nAction:\n{call}\nObservation: {result}\n\n---"
            )
    return "\n".join(parts)[: int(size * 1.2)]


def lengthened(v: Values, one: Example, size: int) -> Example:
    """Return the task with a long text before or after it, or in the system prompt."""
    place = v.rng.choice(("system", "before", "after")) if one.chat else "before"
    if place == "system" or not isinstance(one.turns[0], str):
        one.system = f"{filler(v, size)}\n{one.system or ''}".strip()
    elif place == "before":
        one.turns[0] = f"{filler(v, size)}\n\n{one.turns[0]}"
    else:
        one.turns[0] = f"{one.turns[0]}\n\n{filler(v, size)}"
    return one


def called(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the message of a call."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{number}", "type": "function", "function": function}
        ],
    }


def conversation(v: Values) -> Example:
    """Return one to three rounds: small talk, a text, or a request with one or two
    calls, with the same functions."""
    rng = v.rng
    turns: list[Any] = []
    requests: list[Request] = []
    for _ in range(rng.choices((1, 2, 3), (0.5, 0.3, 0.2))[0]):
        kind = rng.choices(
            ("call", "two calls", "talk", "text"), (0.6, 0.08, 0.24, 0.08)
        )[0]
        talk = talk_task(v)
        ask, answer, now, is_trained = talk.turns[0], talk.answer, [], True
        if kind == "text":
            told = tell(v, known_record(v))
            ask = told.text
            answer = json.dumps(
                told.all if rng.random() < 0.5 else told.asked, ensure_ascii=False
            )
            # a client has forced a call
            now = [request_of(v)] if rng.random() < 0.4 else []
            is_trained = False
        elif kind != "talk":
            now = [request_of(v) for _ in range(1 + (kind == "two calls"))]
            ask = " ".join(request.ask for request in now)
        turns.append({"role": "user", "content": ask})
        outcomes = [outcome(v, request) for request in now]
        for number, (request, (result, _)) in enumerate(
            zip(now, outcomes, strict=True), len(turns)
        ):
            turns.append(
                {
                    **called(request.name, request.arguments, number),
                    "trained": is_trained,
                }
            )
            turns.append(
                {"role": "tool", "tool_call_id": f"call_{number}", "content": result}
            )
        if kind.endswith(("call", "calls")):
            answer = " ".join(words for _, words in outcomes)
        turns.append({"role": "assistant", "content": answer})
        requests += now
    system = rng.choice((None, rng.choice(DATA["agents"]), rng.choice(DATA["agents"])))
    names = {request.name for request in requests}
    tools = offered(v, requests, 1, 6)
    # small talk has sums
    tools = [
        t
        for t in tools
        if t["function"]["name"] in names or family(t)[0] != "calculate"
    ]
    how = rng.random()
    if how < 0.1:
        tools = []
        request = request_of(v)
        if rng.random() < 0.5 and request.places:  # no function was offered
            turns = [
                {"role": "user", "content": request.ask},
                {"role": "assistant", "content": DATA["no function"]},
            ]
        turns = [{**turn, "trained": not turn.get("tool_calls")} for turn in turns]
    elif how < 0.3:
        turns, tools, system = with_final_answer(v, turns, tools)
    answer = turns[-1]["content"]
    if not answer:
        function = turns[-1]["tool_calls"][0]["function"]
        answer = written(
            {"name": function["name"], "arguments": json.loads(function["arguments"])}
        )
    one = Example(turns[:-1], answer, system, tools=tools or None)
    return lengthened(v, one, rng.randint(100, 2500)) if rng.random() < 0.25 else one


def with_final_answer(
    v: Values, turns: list[Any], tools: list[Any]
) -> tuple[list[Any], list[Any], str]:
    """Return the first round with a call as the answer, perhaps in the form of
    smolagents' agent."""
    name, key = v.rng.choice(
        (
            ("final_answer", "answer"),
            ("final_result", "response"),
            ("final_answer", "answer"),
        )
    )
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string"}},
        "required": [key],
    }
    function = {
        "name": name,
        "description": v.rng.choice(DATA["final"]),
        "parameters": parameters,
    }
    tool = {"type": "function", "function": function}
    models = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    end = next(i for i in models if turns[i]["content"])
    turns = [*turns[:end], called(name, {key: turns[end]["content"]}, end)]
    if v.rng.random() < 0.6:
        turns[0]["content"] = f"New task:\n{turns[0]['content']}"
        end = v.rng.choice([i for i in models if i <= end])
        turns = [as_text(turn) for turn in turns[:end]] + [turns[end]]
    return turns, [*tools, tool], filler(v, v.rng.randint(100, 3000))


def as_text(turn: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier message in the form that smolagents keeps."""
    if turn["role"] == "tool":
        return {"role": "user", "content": f"Observation:\n{turn['content']}"}
    if not turn.get("tool_calls"):
        return turn
    [call] = turn["tool_calls"]
    call = {
        **call,
        "function": {
            **call["function"],
            "arguments": json.loads(call["function"]["arguments"]),
        },
    }
    return {
        "role": "assistant",
        "content": f"Calling tools:\n{[call]}",
        "trained": False,
    }


def long_task(v: Values) -> Example:
    """Return a task of the corpus or a conversation, of up to 8,000 tokens."""
    task = v.rng.choice(
        (json_task, json_task, value_task, choice_task, call_task, conversation)
    )
    return lengthened(v, task(v), int(10 ** v.rng.uniform(2.8, 4.05)))


def training_example(
    index: int, seed: int, chats: float, long: float, tool_share: float
) -> Example:
    """Return an example by its index. `chats` and `long` are the shares of
    conversations and of long examples."""
    rng = random.Random(f"{seed}:{index}")
    v = Values(rng)
    kind = rng.random()
    if kind < chats + long:
        return conversation(v) if kind < chats else long_task(v)
    return example(index, seed, tool_share=tool_share)
