"""Conversations with functions: calls, their results, and answers in words; some are long.

They look as the clients send them: results as JSON, as Python writes it or in words, system prompts of any length, a
function for the final answer, and the texts that smolagents' two agents keep of their calls.
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
    """What a function returns, as the text of a message, and the answer of a model that has read it."""
    rng = v.rng
    kind = rng.random()
    if kind < 0.12:
        return rng.choice(DATA["confirmations"]), "Done."
    if kind < 0.2:
        error = rng.choice(DATA["errors"]).format(w=v.word())
        return rng.choice(("Error: {}", "error: {}", '{{"error": "{}"}}')).format(error), f"That failed: {error}."
    if kind < 0.3:
        text = v.phrase().rstrip(".")
        more = rng.choice(("", "", ".", ".", f"\n{v.phrase()}", f".\n{filler(v, rng.randint(50, 1500))}"))
        return text + more, f"{text[0].upper()}{text[1:]}."
    if kind < 0.34:
        things = [rng.choice((v.product, v.person, v.word, v.city))() for _ in range(rng.randint(2, 4))]
        items = [{"name": thing, v.one_of("keys"): v.number()} for thing in things]
        result = rng.choice((things, items, {"results": things}, {"items": items}))
        return json.dumps(result, ensure_ascii=False), f"I found {', '.join(things[:-1])} and {things[-1]}."
    known = RESULTS.get(family(request.tool)[0])
    if known and kind < 0.84:
        kinds, sentence = rng.choice(known)
        result = {key: v.draw(kind) for key, kind in kinds.items()}
        answer = sentence.format_map({**dict.fromkeys(DATA["parameters"], "it"), **request.places, **result})
    else:
        keys = [v.one_of("keys") if rng.random() < 0.7 else v.word() for _ in range(rng.choice((1, 1, 2, 3)))]
        result = {key: v.draw(rng.choice(("word", "number", "price", "iso_date", "code", "city"))) for key in keys}
        parts = [f"the {key} is {value}" for key, value in result.items()]
        answer = ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1]
        answer = answer[0].upper() + answer[1:] + "."
    if len(result) == 1 and rng.random() < 0.5:
        [value] = result.values()
        return str(value), answer if known and kind < 0.84 else f"The result is {value}."
    if known and kind < 0.84 and rng.random() < 0.3:
        result = {**request.arguments, **result}
    if rng.random() < 0.2:
        lines = [f"{key}: {shown(value, rng)}" for key, value in result.items()]
        return rng.choice(("\n", ", ", "; ")).join(lines), answer
    whole = {"result": result} if rng.random() < 0.1 else result
    indent, compact = rng.choices(((None, False), (2, False), (None, True)), (0.75, 0.1, 0.15))[0]
    text = json.dumps(whole, ensure_ascii=False, indent=indent, separators=(",", ":") if compact else None)
    return str(whole) if rng.random() < 0.15 else text, answer


def filler(v: Values, size: int) -> str:
    """About `size` characters of instructions, of English text, and of examples of other tasks."""
    parts: list[str] = []
    while sum(map(len, parts)) < size:
        kind = v.rng.random()
        if kind < 0.4:
            parts.append(v.rng.choice(DATA["rules"]))
        elif kind < 0.7:
            tenth = len(PROSE) // 10
            start = v.rng.randrange(tenth) if v.held_out else v.rng.randrange(tenth, len(PROSE))
            parts.append(PROSE[start : start + v.rng.randint(50, 1500)])
        else:
            request = request_of(v)
            call, (result, _) = json.dumps(request.call, indent=v.rng.choice((None, 2))), outcome(v, request)
            parts.append(f"Task: {request.ask}\n\nAction:\n{call}\nObservation: {result}\n\n---")
    return "\n".join(parts)[: int(size * 1.2)]


def lengthened(v: Values, one: Example, size: int) -> Example:
    """The same task with long text before or after it, or in the system prompt."""
    place = v.rng.choice(("system", "before", "after")) if one.chat else "before"
    if place == "system" or not isinstance(one.turns[0], str):
        one.system = f"{filler(v, size)}\n{one.system or ''}".strip()
    elif place == "before":
        one.turns[0] = f"{filler(v, size)}\n\n{one.turns[0]}"
    else:
        one.turns[0] = f"{one.turns[0]}\n\n{filler(v, size)}"
    return one


def called(request: Request, number: int) -> dict[str, Any]:
    """The message of a call."""
    function = {**request.call, "arguments": json.dumps(request.arguments, ensure_ascii=False)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def returned(result: str, number: int) -> dict[str, Any]:
    """The message of a result."""
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": result}


def conversation(v: Values) -> Example:
    """One to three rounds: small talk, a text, or a request with one or two calls. All offer the same functions."""
    rng = v.rng
    turns: list[Any] = []
    requests: list[Request] = []
    for _ in range(rng.choices((1, 2, 3), (0.5, 0.3, 0.2))[0]):
        kind = rng.choices(("call", "two calls", "talk", "text"), (0.6, 0.08, 0.24, 0.08))[0]
        if kind == "talk":
            talk = talk_task(v)
            turns += [{"role": "user", "content": talk.turns[0]}, {"role": "assistant", "content": talk.answer}]
        elif kind == "text":
            told = tell(v, known_record(v))
            answer = json.dumps(told.all if rng.random() < 0.5 else told.asked, ensure_ascii=False)
            turns.append({"role": "user", "content": told.text})
            if rng.random() < 0.4:  # a client has forced a call of whatever there is
                requests.append(request_of(v))
                number = len(turns)
                turns.append({**called(requests[-1], number), "trained": False})
                turns.append(returned(outcome(v, requests[-1])[0], number))
            turns.append({"role": "assistant", "content": answer})
        else:
            now = [request_of(v) for _ in range(1 + (kind == "two calls"))]
            turns.append({"role": "user", "content": " ".join(request.ask for request in now)})
            answers = []
            for number, request in enumerate(now, len(turns)):
                result, answer = outcome(v, request)
                answers.append(answer)
                turns += [called(request, number), returned(result, number)]
            turns.append({"role": "assistant", "content": " ".join(answers)})
            requests += now
    system = rng.choice((None, rng.choice(DATA["agents"]), rng.choice(DATA["agents"])))
    asked = {request.tool["function"]["name"] for request in requests}
    tools = [
        tool
        for tool in offered(v, requests, 1, 6)
        if tool["function"]["name"] in asked or family(tool)[0] != "calculate"  # small talk has sums
    ]
    how = rng.random()
    if how < 0.1:
        tools, requests = [], []
        if rng.random() < 0.5:  # nothing was ever offered
            request = request_of(v)
            while not request.places:
                request = request_of(v)
            turns = [{"role": "user", "content": request.ask}, {"role": "assistant", "content": DATA["no function"]}]
        for turn in turns:
            turn["trained"] = not turn.get("tool_calls")
    elif how < 0.3:
        turns, tools, system = with_final_answer(v, turns, tools)
    elif how < 0.35:
        turns, tools, system = with_code(v, turns, tools)
    one = Example(turns[:-1], turns[-1]["content"] or written_call(turns[-1]), system, tools=tools or None)
    return lengthened(v, one, rng.randint(100, 2500)) if rng.random() < 0.25 else one


def written_call(message: dict[str, Any]) -> str:
    """The text of a message with a call."""
    function = message["tool_calls"][0]["function"]
    return written({"name": function["name"], "arguments": json.loads(function["arguments"])})


def with_final_answer(v: Values, turns: list[Any], tools: list[Any]) -> tuple[list[Any], list[Any], str]:
    """The conversation where answers are calls, too, and perhaps as smolagents' agent of calls sends it."""
    name, key = v.rng.choice((("final_answer", "answer"), ("final_result", "response"), ("final_answer", "answer")))
    parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    function = {"name": name, "description": v.rng.choice(DATA["final"]), "parameters": parameters}
    final = {"type": "function", "function": function}
    turns = [turn for turn in turns if turn["role"] != "system"]
    end = 1 + next(i for i, turn in enumerate(turns) if turn["role"] == "assistant" and turn["content"])
    turns = turns[:end]
    request = Request(final, "", {key: turns[-1]["content"]}, {})
    turns[-1] = called(request, 9)
    if v.rng.random() < 0.6:
        turns[0]["content"] = f"New task:\n{turns[0]['content']}"
        end = v.rng.choice([i for i, turn in enumerate(turns) if turn["role"] == "assistant"])
        turns = [as_text(turn, index < end) for index, turn in enumerate(turns[: end + 1])]
    return turns, [*tools, final], filler(v, v.rng.randint(100, 3000))


def as_text(turn: dict[str, Any], history: bool) -> dict[str, Any]:
    """A message as smolagents keeps it."""
    if turn["role"] == "tool":
        return {"role": "user", "content": f"Observation:\n{turn['content']}"}
    if history and turn.get("tool_calls"):
        [call] = turn["tool_calls"]
        call = {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        return {"role": "assistant", "content": f"Calling tools:\n{[call]}", "trained": False}
    return turn


def with_code(v: Values, turns: list[Any], tools: list[Any]) -> tuple[list[Any], list[Any], str]:
    """The conversation as smolagents' agent of code sends it: functions are described and called in Python."""
    rng = v.rng
    turns = turns[: 1 + next(i for i, turn in enumerate(turns) if turn["role"] == "assistant" and turn["content"])]
    told = [{"role": "user", "content": f"New task:\n{turns[0]['content']}"}]
    for turn in turns[1:]:
        if turn["role"] == "tool":
            text = f"Observation:\nExecution logs:\n{turn['content']}\nLast output from code snippet:\nNone"
            told.append({"role": "user", "content": text})
            continue
        thought, code = "I know the answer.", f"final_answer({turn['content']!r})"
        if turn.get("tool_calls"):
            function = turn["tool_calls"][0]["function"]
            name = identifier(function["name"])
            arguments = json.loads(function["arguments"]).items()
            given = ", ".join(f"{identifier(key)}={value!r}" for key, value in arguments)
            thought, code = f"I will use `{name}`.", f"result = {name}({given})\nprint(result)"
        text = f"Thought: {thought}\n<code>\n{code}\n</code>"
        told.append({"role": "assistant", "content": text, "code": code})
    end = rng.choice([i for i, turn in enumerate(told) if turn["role"] == "assistant"])
    for number, turn in enumerate(told[:end]):
        if "code" in turn:
            function = {"name": "python_interpreter", "arguments": turn["code"]}
            history = [{"id": f"call_{number}", "type": "function", "function": function}]
            turn |= {"content": f"{turn['content']}\nCalling tools:\n{history}", "trained": False}
    described = []
    for tool in (each["function"] for each in tools):
        properties = tool["parameters"]["properties"].items()
        places = ", ".join(f"{identifier(key)}: {value['type']}" for key, value in properties)
        docstring = f'    """{tool.get("description", "")}"""'
        described.append(f"def {identifier(tool['name'])}({places}) -> string:\n{docstring}")
    system = f"{filler(v, rng.randint(100, 4000))}\nWrite code between <code> and </code>."
    return told[: end + 1], [], "\n\n".join([system, *described, rng.choice(DATA["rules"])])


def identifier(name: str) -> str:
    return name.replace("-", "_").replace(" ", "_")


def long_task(v: Values) -> Example:
    """A task of the corpus, or a conversation, in up to 8,000 tokens."""
    task = v.rng.choice((json_task, json_task, value_task, choice_task, call_task, conversation))
    return lengthened(v, task(v), int(10 ** v.rng.uniform(2.8, 4.05)))


def training_example(index: int, seed: int, chats: float, long: float, tool_share: float) -> Example:
    """The `index`-th example: `chats` of all are conversations, `long` of all are long, the others `example`'s."""
    rng = random.Random(f"{seed}:{index}")
    v = Values(rng)
    kind = rng.random()
    if kind < chats + long:
        return conversation(v) if kind < chats else long_task(v)
    return example(index, seed, tool_share=tool_share)
