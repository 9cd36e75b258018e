"""Measure the quality of the embedded default model: `python -m benchmarks.default_model`.

Held-out requests: generated prompts about people, orders, events and products. Their names, numbers, dates, codes and
addresses are not in the training data, and each has the JSON Schema of the expected answer. The benchmark counts
answers that end by themselves (`stop`), and answers with all values of the prompt.

Calls: generated requests with held-out values that offer two to four functions (`tool_choice: auto`). The benchmark
counts answers with exactly one call, calls of the right function, and calls with all arguments right.

Mixed requests: all kinds of constraints over prompts unlike the training text. The benchmark counts `stop`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paths import RESULTS
from benchmarks.report import machine, write_json
from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from examples.default_model_training.corpus import evaluation_call, evaluation_example
from examples.default_model_training.exchange import schema_of
from guided.backends import BACKENDS
from guided.errors import UnsupportedConstraint
from guided.tools.formats import TOOL_FORMATS, Calls, Function, answer_format
from guided.tools.parser import OutputParser


@dataclass(frozen=True)
class Request:
    """A chat prompt with its constraint. A held-out request has an expected value."""

    messages: list[dict[str, str]]
    kind: str
    source: Any
    expected: Any = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str
    tokens: int


def held_out_requests(count: int, seed: int) -> list[Request]:
    requests = []
    for index in range(count):
        one = evaluation_example(index, seed)
        requests.append(Request(one.messages(), "json_schema", schema_of(one.expected), one.expected))
    return requests


def call_requests(count: int, seed: int) -> list[Request]:
    requests = []
    for index in range(count):
        one = evaluation_call(index, seed)
        tools = one.tools or []
        functions = [Function(each["function"]["name"], each["function"]["parameters"]) for each in tools]
        form = answer_format(Calls(TOOL_FORMATS["hermes"], functions, required=False, parallel=True), None)
        tag = {"type": "structural_tag", "format": form}
        requests.append(Request(one.messages(), "structural_tag", tag, one.expected, tools))
    return requests


def object_schema(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or [*properties]}


def mixed_requests() -> list[Request]:
    """Return requests with every kind of constraint."""
    text = "Maria Lindqvist, 41, is a nurse from Uppsala. Write to maria@lindqvist.se or call 555-0142."
    string, integer = {"type": "string"}, {"type": "integer"}
    schemas: list[tuple[str, dict[str, Any]]] = [
        (text, object_schema({"name": string, "age": integer, "email": {"type": "string", "format": "email"}})),
        (text, object_schema({"person": object_schema({"name": string, "job": string}), "phone": string})),
        (text, object_schema({"name": string, "nickname": {"type": ["string", "null"]}}, ["name"])),
        ("Plan a trip to Lisbon.", object_schema({"city": string, "days": {"type": "array", "items": string}})),
        ("Rate the film Solaris.", object_schema({"film": string, "stars": {"enum": [1, 2, 3, 4, 5]}})),
        ("A recipe for pancakes", object_schema({"title": string, "ingredients": {"type": "array", "items": string}})),
        ("The server db-7 is down since 04:12.", object_schema({"host": string, "up": {"type": "boolean"}})),
        ("Ticket 8841: login fails, urgent", object_schema({"id": integer, "priority": {"enum": ["low", "high"]}})),
        ("Where is Berlin?", object_schema({"lat": {"type": "number"}, "lon": {"type": "number"}})),
        ("Two users: ann (admin), tom (guest)", {"type": "array", "items": object_schema({"u": string, "r": string})}),
    ]
    regexes = [
        ("When does it start? It starts on 2026-03-14.", r"\d{4}-\d{2}-\d{2}"),
        (text + " What is the phone number?", r"\d{3}-\d{4}"),
        (text + " Email?", r"[a-z0-9._]+@[a-z0-9.]+\.[a-z]{2,3}"),
        ("Order QX-4417 has shipped. Order number?", r"[A-Z]{2}-\d+"),
        ("What is the name? Her name is Olga Brandt.", r"[A-Z][a-z]+ [A-Z][a-z]+"),
        ("Say something nice.", r"[A-Za-z ,]+\."),
        ("How much is it? It is 49.99 dollars.", r"\$?\d+\.\d\d"),
        ("IP of the router?", r"(\d{1,3}\.){3}\d{1,3}"),
    ]
    choices = [
        ("I love this phone! Sentiment?", ["positive", "negative"]),
        ("The sky is clear and the sun is out. Weather?", ["sunny", "rainy", "snowy"]),
        ("Is Paris the capital of France?", ["yes", "no"]),
        ("Which color is the car? The car is green.", ["red", "green", "blue"]),
        ("Route this ticket: my invoice is wrong.", ["billing", "technical support", "sales"]),
    ]
    number = "NUMBER: /[0-9]+/\n"
    grammars = [
        ("3 plus 4 times 2", "start: NUMBER (OP NUMBER)*\nOP: /[-+*\\/]/\n" + number),
        ("Formula: (1 plus 2) times 5", 'start: term (("+" | "*") term)*\nterm: NUMBER | "(" start ")"\n' + number),
        ("List apple, plum and fig.", 'start: WORD (", " WORD)*\nWORD: /[a-z]+/\n'),
        ("Select name from users", 'start: "SELECT " COL (", " COL)* " FROM " COL\nCOL: /[a-z_]+/\n'),
        ("Greet Tom.", 'start: ("Hello" | "Hi") ", " NAME "!"\nNAME: /[A-Z][a-z]+/\n'),
    ]
    pairs: list[tuple[str, str, Any]] = [(p, "json_schema", s) for p, s in schemas]
    pairs += [(p, "json_object", True) for p in (text, "Give me a random event as JSON.", "What is the weather?")]
    pairs += [(p, "regex", r) for p, r in regexes]
    pairs += [(p, "choice", c) for p, c in choices]
    pairs += [(p, "grammar", g) for p, g in grammars]
    return [Request([{"role": "user", "content": p}], kind, source) for p, kind, source in pairs]


def params_of(request: Request, max_tokens: int, backend: str) -> SamplingParams:
    constraint = {request.kind: request.source}
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, backend=backend, **constraint)


def answers_of(llm: LLM, requests: list[Request], max_tokens: int, backend: str) -> list[Answer]:
    """Return greedy answers to all requests. Where the backend can't enforce the constraint, the finish reason is
    `refused`."""
    prompts = [
        llm.tokenizer.apply_chat_template(
            r.messages, tools=r.tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for r in requests
    ]
    answers = []
    for output in llm.generate(prompts, [params_of(r, max_tokens, backend) for r in requests]):
        [one] = output.outputs
        reason = "refused" if isinstance(one.error, UnsupportedConstraint) else one.finish_reason
        answers.append(Answer(one.text, reason or "none", len(one.token_ids)))
    return answers


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in a JSON document, without keys and structure."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def parsed(answer: Answer) -> Any:
    return parsed_text(answer.text)


def parsed_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def calls_of(answer: Answer, request: Request) -> list[Any]:
    """Return the calls in an answer. One that is not complete has no arguments."""
    names = [each["function"]["name"] for each in request.tools or []]
    pieces = OutputParser(tools=TOOL_FORMATS["hermes"], names=names).feed(answer.text, True)
    called = {piece.index: piece.text for piece in pieces if piece.kind == "call"}
    arguments = {
        index: "".join(p.text for p in pieces if p.kind == "arguments" and p.index == index) for index in called
    }
    return [{"name": name, "arguments": parsed_text(arguments[index])} for index, name in called.items()]


def call_figures(requests: list[Request], answers: list[Answer]) -> dict[str, Any]:
    """Return the shares of answers with one call, with the right function, and with all arguments right."""
    pairs = [(calls_of(answer, request), request.expected) for answer, request in zip(answers, requests, strict=True)]
    return {
        "one call": sum(len(calls) == 1 and calls[0]["arguments"] is not None for calls, _ in pairs) / len(pairs),
        "right function": sum([c["name"] for c in calls] == [expected["name"]] for calls, expected in pairs)
        / len(pairs),
        "right arguments": sum(calls == [expected] for calls, expected in pairs) / len(pairs),
    }


def right_leaves(got: Any, expected: Any) -> int:
    """Count the leaves of `expected` that are at the same place in `got`."""
    if isinstance(expected, dict):
        return sum(right_leaves(got.get(k), v) for k, v in expected.items()) if isinstance(got, dict) else 0
    if isinstance(expected, list):
        return sum(map(right_leaves, got, expected)) if isinstance(got, list) else 0
    return int(got == expected and type(got) is type(expected))


def figures_of(requests: list[Request], answers: list[Answer]) -> dict[str, Any]:
    """Return the shares of `stop` (without refused requests), of fully correct answers, and of correct single
    values."""
    run = [a for a in answers if a.finish_reason != "refused"]
    figures: dict[str, Any] = {
        "requests": len(requests),
        "refused": len(answers) - len(run),
        "failed": sum(a.finish_reason == "error" for a in run),
        "ends by itself": sum(a.finish_reason == "stop" for a in run) / len(run),
    }
    if requests[0].tools is not None:
        figures |= call_figures(requests, answers)
    elif requests[0].expected is not None:
        pairs = [(parsed(a), r.expected) for a, r in zip(answers, requests, strict=True)]
        figures["all values right"] = sum(got == expected for got, expected in pairs) / len(pairs)
        single = sum(len(list(leaves(expected))) for _, expected in pairs)
        figures["single values right"] = sum(right_leaves(got, expected) for got, expected in pairs) / single
    return figures


def show(requests: list[Request], answers: list[Answer], count: int) -> None:
    """Print some answers, wrong ones first."""
    pairs = sorted(zip(requests, answers, strict=True), key=lambda p: parsed(p[1]) == p[0].expected)
    for request, answer in pairs[:count]:
        print(f"\n{request.messages[-1]['content']}\n  {request.kind} -> [{answer.finish_reason}] {answer.text}")
        if request.expected is not None:
            print("  expected     ", json.dumps(request.expected, ensure_ascii=False))


def table(report: dict[str, dict[str, Any]]) -> str:
    """Return the table: a column per set of requests, a row per figure."""
    rows = [
        "requests",
        "refused",
        "failed",
        "ends by itself",
        "all values right",
        "single values right",
        "one call",
        "right function",
        "right arguments",
        "tokens",
        "seconds",
    ]
    lines = [f"{'':22}" + "".join(f"{name:>28}" for name in report)]
    for row in rows:
        cells = []
        for figures in report.values():
            value = figures.get(row, "")
            share = isinstance(value, float) and row != "seconds"
            cells.append(f"{value:.1%}" if share else f"{value}")
        lines.append(f"{row:22}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.default_model", description="The quality of the default model."
    )
    parser.add_argument("--model", type=Path, default=checkpoint_path(), help="checkpoint directory")
    parser.add_argument("--count", type=int, default=200, help="held-out requests")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--seed", type=int, default=1, help="seed of the held-out requests")
    parser.add_argument("--backends", nargs="+", default=[*BACKENDS], help="for the mixed requests")
    parser.add_argument("--show", type=int, default=0, help="print this many answers of each kind, wrong ones first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    runs = [
        ("held out", held_out_requests(args.count, args.seed), "llguidance"),
        ("calls", call_requests(args.count, args.seed), "llguidance"),
    ]
    for backend in args.backends:
        able = [r for r in mixed_requests() if r.kind in BACKENDS[backend].kinds]
        runs.append((f"mixed, {backend}", able, backend))
    started_on = machine()
    report: dict[str, dict[str, Any]] = {}
    with LLM(str(args.model), "inline", config=EngineConfig(max_num_seqs=32)) as llm:
        for name, requests, backend in runs:
            started = time.perf_counter()
            answers = answers_of(llm, requests, args.max_tokens, backend)
            report[name] = figures_of(requests, answers) | {
                "tokens": sum(a.tokens for a in answers),
                "seconds": round(time.perf_counter() - started, 1),
            }
            show(requests, answers, args.show)
    print(f"\n{table(report)}")
    write_json(args.out / "default_model.json", vars(args), report, started_on)


if __name__ == "__main__":
    main()
