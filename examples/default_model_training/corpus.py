"""The training text: generated descriptions, questions about them, and answers.

`example(index, seed)` is a pure function of its arguments, so that a training run can
be repeated and resumed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.default_model_training.records import (
    known_record,
    made_up_record,
    shown,
    styled,
    tell,
)
from examples.default_model_training.values import DATA, Values


@dataclass
class Example:
    """An exchange. `turns` are messages, or texts of user and assistant in turn, and
    end before the answer."""

    turns: list[Any]
    answer: str
    system: str | None = None
    chat: bool = True
    tools: list[dict[str, Any]] | None = None
    """The functions that the request offers."""

    def messages(self) -> list[dict[str, Any]]:
        """Return the prompt as chat messages."""
        roles = ("user", "assistant")
        messages: list[dict[str, Any]] = []
        for index, turn in enumerate(self.turns):
            messages.append(
                turn
                if isinstance(turn, dict)
                else {"role": roles[index % 2], "content": turn}
            )
        return (
            [{"role": "system", "content": self.system}, *messages]
            if self.system
            else messages
        )


def json_task(v: Values) -> Example:
    """Return a text, and an object with its facts, perhaps grouped, compact or
    indented."""
    rng = v.rng
    told = tell(v, known_record(v) if rng.random() < 0.7 else made_up_record(v))
    names_keys = rng.random() < 0.5
    value: Any = told.asked if names_keys or rng.random() < 0.7 else told.all
    if not names_keys and rng.random() < 0.1:
        value = rng.choice(([value], {"result": value}, {told.record.domain: value}))
    indent, separators = rng.choices(
        ((None, None), (None, (",", ":")), (2, None)), (0.86, 0.08, 0.06)
    )[0]
    answer = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
    if not names_keys and rng.random() < 0.3:
        label = rng.choice(
            (("Text", "JSON"), ("Input", "Output"), ("Description", "JSON"), ("Q", "A"))
        )
        return Example(
            [f"{label[0]}: {told.text}\n{label[1]}:{rng.choice(('', ' '))}"],
            answer,
            chat=False,
        )
    if names_keys:
        ask = rng.choice(DATA["ask for keys"]).format(
            k=rng.choice((", ", ", ", " and ")).join(told.asked)
        )
        if rng.random() < 0.1:
            ask = f"{rng.choice(('Schema', 'JSON schema', 'Follow this schema'))}: {json.dumps(schema_of(told.asked))}"
    elif rng.random() < 0.3:
        return Example([told.text], answer)
    else:
        ask = rng.choice(DATA["ask for JSON"]).format(d=told.record.domain)
    ask += " No spaces." if separators else " Indent it." if indent else ""
    return Example([_joined(ask, told.text, rng)], answer)


def _joined(ask: str, text: str, rng: random.Random) -> str:
    parts = [ask, rng.choice(("", "", "", "Text: ", "Input: ", "Description: ")) + text]
    rng.shuffle(parts)
    return rng.choice((" ", "\n", "\n\n")).join(parts)


def value_task(v: Values) -> Example:
    """Return a task with one value as its answer, as for a regex or a type."""
    rng = v.rng
    told = tell(v, known_record(v) if rng.random() < 0.8 else made_up_record(v), 4)
    key, value = rng.choice(list(told.asked.items()))
    name = key.replace("_", " ").replace("-", " ").lower()
    ask = rng.choice(
        (
            f"What is the {name}?",
            f"{name}?",
            f"Give only the {name}.",
            f"Extract the {name}.",
        )
    )
    if isinstance(value, bool):
        return Example(
            [_joined(f"{ask} Answer yes or no.", told.text, rng)],
            "yes" if value else "no",
        )
    answer = (
        json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)
    )
    ask += " As a JSON array." if isinstance(value, list) else ""
    return Example([_joined(ask, told.text, rng)], answer, chat=rng.random() < 0.8)


def choice_task(v: Values) -> Example:
    """Return a task with a choice of words: one is in the text, or describes it."""
    rng = v.rng
    if rng.random() < 0.4:
        label = rng.choice(("positive", "negative"))
        text = f"The {v.one_of('things')} is {v.one_of('good' if label == 'positive' else 'bad')}."
        options, head = (
            ["positive", "negative"],
            rng.choice(("Classify the sentiment", "What is the sentiment")),
        )
    else:
        options = [
            rng.choice((v.word, v.brand, v.product))() for _ in range(rng.randint(2, 5))
        ]
        label = rng.choice(options)
        text = rng.choice(("It is {}.", "The answer is {}.", "I saw a {}.")).format(
            label
        )
        head = rng.choice(("Pick one", "Choose", "Which one is it"))
    rng.shuffle(options)
    order = rng.choice(("{h}: {o}. {t}", "{t}\n{h}: {o}?", "{t} {h}? Options: {o}."))
    return Example(
        [order.format(h=head, o=", ".join(options), t=text)],
        label,
        chat=rng.random() < 0.8,
    )


def repeat_task(v: Values) -> Example:
    """Return a task that copies a text."""
    draws = (
        v.word,
        v.word,
        v.letters,
        v.letters,
        v.first,
        v.code,
        v.product,
        v.person,
        v.email,
        v.phone,
        v.iso_date,
    )
    text = " ".join(v.rng.choice(draws)() for _ in range(v.rng.randint(2, 10)))
    if v.rng.random() < 0.6:
        return Example([f"Repeat: {text}"], text)
    return Example([f"Quote this text: {text}"], json.dumps(text, ensure_ascii=False))


def talk_task(v: Values) -> Example:
    """Return small talk, a sum of small numbers, or a question that the text does not
    answer."""
    rng = v.rng
    kind = rng.random()
    if kind < 0.5:
        asks, answer = rng.choice(list(DATA["small talk"].items()))
        ask = rng.choice(asks.split("|"))
        ask = rng.choice(
            (ask, ask, ask.lower(), ask.rstrip(".!?") + rng.choice(("", "!", ".", "?")))
        )
        return Example([ask], answer)
    if kind < 0.65:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        sign, word, value = rng.choice(
            (("+", "plus", a + b), ("-", "minus", a - b), ("*", "times", a * b))
        )
        if rng.random() < 0.4:
            return Example(
                [f"Write {a} {word} {b} as an expression."], f"{a} {sign} {b}"
            )
        asked = rng.choice(("{0}{1}{2}", "{0} {1} {2}", "{0} {3} {2}")).format(
            a, sign, b, word
        )
        return Example(
            [rng.choice(DATA["sums"]).format(asked)], f"{a} {sign} {b} is {value}."
        )
    ask = rng.choice(DATA["questions"])
    return Example(
        [ask.format(w=v.word(), c=v.country())],
        "I do not know. I only turn short texts into JSON.",
    )


FAMILIES = [each["names"].split("|") for each in DATA["functions"]]
SINGLE = ("word", "number", "price", "iso_date", "code", "first", "city", "flag")
"""Kinds of the arguments of made-up functions."""


def schema_of(value: Any) -> dict[str, Any]:
    """Return the JSON Schema of a value, with every key required."""
    if isinstance(value, dict):
        properties = {key: schema_of(each) for key, each in value.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": [*value],
            "additionalProperties": False,
        }
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    return {
        "type": {int: "integer", float: "number", str: "string", bool: "boolean"}[
            type(value)
        ]
    }


@dataclass
class Request:
    """A request of a user, its function, and the arguments, also by their places in the
    request."""

    tool: dict[str, Any]
    ask: str
    arguments: dict[str, Any]
    places: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def request_of(v: Values, like: str = "") -> Request:
    """Return a request and its function in the form of `tools`. `like` is a verb or
    noun of the function's name."""
    rng = v.rng
    arguments: dict[str, Any] = {}
    places: dict[str, Any] = {}
    kind = rng.random()
    style = rng.choice(("snake", "snake", "camel", "kebab"))
    if not like and kind < 0.5:
        known = rng.choice(DATA["functions"])
        names, description = (
            known["names"].split("|"),
            rng.choice(known["description"].split("|")),
        )
        ask = rng.choice(known["requests"].split("|"))
        for place in (each.partition("}")[0] for each in ask.split("{")[1:]):
            parameter = DATA["parameters"][place]
            name = styled(rng.choice(parameter["names"].split("|")), "snake")
            places[place] = arguments[f"{name}_2" if name in arguments else name] = (
                v.draw(parameter["value"])
            )
        ask = ask.format(**places)
    elif not like and kind < 0.6:  # a text, and a function that takes its facts
        told = tell(v, known_record(v) if rng.random() < 0.8 else made_up_record(v))
        domain, ask, arguments = told.record.domain, told.text, told.asked
        style = rng.choice(("snake", "camel", "pascal"))
        names, description = (
            DATA["record functions"].format(d=domain).split("|"),
            f"A {domain}.",
        )
        if rng.random() < 0.5:
            description = rng.choice(DATA["record descriptions"]).format(d=domain)
        if rng.random() < 0.2:
            arguments = {domain: arguments}
    else:
        known_verb = rng.random() < 0.7
        verb = rng.choice([*DATA["verbs"]]) if known_verb else v.word()
        noun = v.one_of("nouns") if rng.random() < 0.5 else v.word()
        if like in DATA["verbs"]:
            verb, known_verb = like, True
        elif like:
            noun = like
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 3))):
            arguments[v.one_of("keys") if rng.random() < 0.7 else v.word()] = v.draw(
                rng.choice(SINGLE)
            )
        names, description = [f"{verb} {noun}"], f"{verb.capitalize()} a {noun}."
        given = [
            f"{key}{rng.choice((' ', ': ', ' = '))}{shown(value, rng)}"
            for key, value in arguments.items()
        ]
        listed = rng.choice((" and ", ", ")).join(
            rng.choice(("", "", "the ")) + each for each in given
        )
        asked = (
            rng.choice(DATA["verbs"][verb].split("|"))
            if known_verb
            else verb.capitalize()
        )
        ask = f"{asked} {rng.choice(('the ', 'a ', ''))}{noun}"
        ask += rng.choice((" with ", " for ", ": ", ", ")) + listed if listed else ""
        ask += rng.choice((".", "", " please."))
    function = {"name": styled(rng.choice(names), style)}
    if rng.random() < 0.8:
        function["description"] = description
        if rng.random() < 0.15:
            function["description"] += "\n\nArgs:" + "".join(
                f"\n    {key}: the {key}" for key in arguments
            )
    parameters = schema_of(arguments)
    if rng.random() < 0.2:
        parameters["properties"].setdefault(v.one_of("keys"), {"type": "string"})
    tool = {"type": "function", "function": {**function, "parameters": parameters}}
    return Request(tool, rng.choice(DATA["greetings"]) + ask, arguments, places)


def family(tool: dict[str, Any]) -> list[str]:
    """Return the names of the functions with the same purpose."""
    name = re.sub(
        "[A-Z]",
        lambda found: " " + found[0].lower(),
        re.sub("[-_]", " ", tool["function"]["name"]),
    )
    return next((names for names in FAMILIES if name in names), [name])


def offered(
    v: Values, requests: list[Request], least: int, most: int
) -> list[dict[str, Any]]:
    """Return the functions of the requests, and functions with other purposes, in any
    order."""
    tools = {request.tool["function"]["name"]: request.tool for request in requests}
    like = (
        v.rng.choice(family(requests[0].tool)[0].split(" "))
        if requests and v.rng.random() < 0.3
        else ""
    )
    while len(tools) < least or (len(tools) < most and v.rng.random() < 0.6):
        other = request_of(v, like if len(tools) == 1 else "").tool
        if not {*family(other)} & {
            each for tool in tools.values() for each in family(tool)
        }:
            tools[other["function"]["name"]] = other
    return v.rng.sample([*tools.values()], len(tools))


def written(call: dict[str, Any]) -> str:
    """Return a call in the model's format."""
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def call_task(v: Values) -> Example:
    """Return a request that needs one of two to four functions."""
    request = request_of(v)
    return Example(
        [request.ask],
        written({"name": request.name, "arguments": request.arguments}),
        tools=offered(v, [request], 2, 4),
    )


TASKS: tuple[tuple[Callable[[Values], Example], float], ...] = (
    (json_task, 0.60),
    (value_task, 0.13),
    (choice_task, 0.10),
    (repeat_task, 0.13),
    (talk_task, 0.04),
)


def example(
    index: int, seed: int = 0, held_out: bool = False, tool_share: float = 0.3
) -> Example:
    """Return an example of the corpus by its index. The same arguments always give the
    same example.

    Args:
        held_out: whether names, numbers, dates, codes and addresses are those that
            training never sees.
        tool_share: the share of examples with functions. 0 gives the corpus of the
            tokenizer.
    """
    rng = random.Random(f"{seed}:{index}:{held_out}")
    v = Values(rng, held_out)
    if tool_share and rng.random() < tool_share:
        return call_task(v)
    one = rng.choices([task for task, _ in TASKS], [weight for _, weight in TASKS])[0](
        v
    )
    if one.chat and rng.random() < 0.25:
        one.system = rng.choice(DATA["systems"])
    return one
