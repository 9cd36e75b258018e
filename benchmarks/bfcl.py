"""Check functions as users write them: are they accepted, are the right calls allowed,
are there unknown arguments?

    pip download --no-deps bfcl-eval && unzip bfcl_eval-*.whl 'bfcl_eval/data/*'
    python -m benchmarks.bfcl --data bfcl_eval/data

The Berkeley Function Calling Leaderboard (BFCL v4) has questions with functions, and
the right calls. The functions are converted as BFCL's OpenAI handler does
(`convert_to_tool`; without the hints that make all arguments of Java and JavaScript
strings, because the right calls have other values). Each document with functions of
conversations counts as one question. For each question, the constraint of the calls is
built and compiled as the server does for `tool_choice: "required"`, and each right
call, as JSON with its arguments in the schema's order, is replayed token by token. Then
a server with the embedded model answers some of the questions with a call, and the
arguments that the function does not name are counted. Prints a table. Writes bfcl.json.
Exit status 1 if a question is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks import report
from benchmarks.maskbench import accepts
from benchmarks.property_order import in_schema_order
from benchmarks.servers import guided_server
from benchmarks.workload import read_rows
from engine.default_model import checkpoint_path
from engine.server.request.bodies import ChatRequest
from engine.server.request.constraints import RequestedConstraint
from engine.server.request.tools import requested_calls
from guided.backends import AUTO, Backends, candidates
from guided.check.check import vocabulary_of
from guided.check.process import BackendProcess, set_time_limit
from guided.constraint import Constraint
from guided.errors import GuidedError, InvalidConstraint
from guided.masks.compilation import compile_constraint
from guided.schema.validation import Validator
from guided.tools.formats import TOOL_FORMATS, answer_format

SKIPPED = "there is no BFCL data: `pip download --no-deps bfcl-eval`, unzip it, and give its bfcl_eval/data as --data"
_TYPES = {
    **dict.fromkeys(("integer", "byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(
        ("array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array"
    ),
    **dict.fromkeys(("dict", "object", "HashMap", "Hashtable"), "object"),
}
"""Types of BFCL's functions, as the handler converts them. All other types become
strings."""
_SERVER = SimpleNamespace(
    tool_format=TOOL_FORMATS["hermes"], settings=SimpleNamespace(tool_strict="on")
)
_LIMIT_SECONDS = 60.0


def questions(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the questions with functions: `id`, `messages`, `tools` as they are sent,
    and the right `calls`."""
    for path in sorted(folder.glob("BFCL_v4_*.json")):
        answers = folder / "possible_answer" / path.name
        calls = (
            {row["id"]: row["ground_truth"] for row in read_rows(answers)}
            if answers.exists()
            else {}
        )
        rows = [] if path.stem.endswith("format_sensitivity") else read_rows(path)
        for row in rows:
            if row.get("function"):
                tools = [_tool(function) for function in row["function"]]
                yield {
                    **row,
                    "messages": row["question"][0],
                    "tools": tools,
                    "calls": calls.get(row["id"], []),
                }
    for path in sorted((folder / "multi_turn_func_doc").glob("*.json")):
        tools = [_tool(function) for function in read_rows(path)]
        yield {
            "id": path.stem,
            "messages": [{"role": "user", "content": "Go on."}],
            "tools": tools,
            "calls": [],
        }


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    function = json.loads(json.dumps(function))
    parameters = function["parameters"]
    parameters["type"] = "object"
    _convert(parameters["properties"])
    return {
        "type": "function",
        "function": {**function, "name": function["name"].replace(".", "_")},
    }


def _convert(properties: dict[str, Any]) -> None:
    """Convert the types of properties, to the depth to which the handler does."""
    for part in properties.values():
        if part.get("type") == "float":
            part["format"] = "float"
        part["type"] = _TYPES.get(part.get("type", ""), "string")
        if part["type"] not in ("array", "object"):
            continue
        if "properties" in part:
            _convert(part["properties"])
        elif "items" in part:
            items = part["items"]
            items["type"] = _TYPES.get(items["type"], "string")
            if items["type"] == "array" and "items" in items:
                items["items"]["type"] = _TYPES.get(items["items"]["type"], "string")
            elif items["type"] == "object" and "properties" in items:
                _convert(items["properties"])


def _arguments(options: Any) -> Any:
    """Return the first of the right values, also within objects. An argument with an
    empty string is left out."""
    if isinstance(options, dict):
        chosen = {
            name: next((value for value in values if value != ""), None)
            for name, values in options.items()
        }
        present = {
            name: value
            for name, value in chosen.items()
            if "" not in options[name] or value is not None
        }
        return {name: _value(value) for name, value in present.items()}
    return options


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    nested = isinstance(value, dict) and all(
        isinstance(part, list) for part in value.values()
    )
    return _arguments(value) if nested else value


def judge(backends: Backends, question: Mapping[str, Any]) -> dict[str, Any]:
    """Build and compile the calls of a question, and replay the right ones."""
    set_time_limit(_LIMIT_SECONDS)
    fields = {
        "messages": question["messages"],
        "tools": question["tools"],
        "tool_choice": "required",
    }
    body = ChatRequest.model_validate(fields, context={"ignored": []})
    refused: dict[str, list[str]] = {}
    with suppress(InvalidConstraint):
        found = requested_calls(body, _SERVER, RequestedConstraint(), refused)  # type: ignore[arg-type]
        # older versions returned a tuple
        calls = found[0] if isinstance(found, tuple) else found
        assert calls is not None
        document = {
            "type": "structural_tag",
            "format": answer_format(calls, None, "no", None),
        }
        constraint = Constraint.structural_tag(document)
        compile_constraint(backends, constraint, candidates("structural_tag", AUTO))
        schemas = {
            function.name: function.parameters.value for function in calls.functions
        }
        right = [call for call in question["calls"] if isinstance(call, dict)]
        outcomes = [
            _replay(backends, schemas[name.replace(".", "_")], _arguments(options))
            for call in right
            for name, options in call.items()
        ]
        return {"status": 200, "calls": outcomes, "free": len(constraint.not_enforced)}
    return {"status": 400, "calls": ["refused"] * len(question["calls"]), "free": 0}


def _replay(backends: Backends, schema: Any, arguments: Any) -> str:
    grammar = compile_constraint(
        backends, Constraint.json_schema(schema), candidates("json_schema", AUTO)
    ).grammar
    if accepts(
        grammar.matcher(), in_schema_order(arguments, schema), backends.vocabulary, []
    ):
        return "allowed"
    return (
        "violates its schema"
        if any(True for _ in Validator(schema).errors(arguments))
        else "not allowed"
    )


def answer(http: httpx.Client, question: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the status of a question, and the arguments in the answer that the
    function does not name."""
    fields = {
        "messages": question["messages"],
        "tools": question["tools"],
        "tool_choice": "required",
    }
    response = http.post(
        "/v1/chat/completions", json={**fields, "max_tokens": 150, "temperature": 0}
    )
    if response.status_code != 200:
        return response.status_code, []
    schemas = {
        tool["function"]["name"]: tool["function"]["parameters"]
        for tool in question["tools"]
    }
    unknown: list[str] = []
    for call in response.json()["choices"][0]["message"].get("tool_calls", []):
        with suppress(ValueError):  # cut
            arguments = json.loads(call["function"]["arguments"])
            unknown += (
                arguments.keys()
                - schemas[call["function"]["name"]]["properties"].keys()
            )
    return 200, unknown


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.start(__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("bfcl_eval/data"),
        help="BFCL's data (default: %(default)s)",
    )
    parser.add_argument(
        "--every", type=int, default=1, help="use only every Nth question"
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=250,
        help="number of questions that the server answers",
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="print the questions with a right call that is not allowed",
    )
    options = parser.parse_args(argv)
    if not options.data.is_dir():
        print(SKIPPED)
        return
    if options.quick:
        options.every, options.answers = 20, 20
    started_on = report.machine()
    asked = list(questions(options.data))[:: options.every]
    process = BackendProcess(vocabulary_of(checkpoint_path()))
    statuses: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    refused: list[str] = []
    for question in tqdm(asked, disable=None, mininterval=1):
        try:
            result = process.call(judge, question)
        except GuidedError as error:
            result = {
                "status": error.status,
                "calls": ["error"] * len(question["calls"]),
                "free": 0,
            }
        statuses[f"status {result['status']}"] += 1
        statuses["questions with free parts"] += bool(result["free"])
        outcomes.update(result["calls"])
        for call in result["calls"]:
            if call != "allowed" and options.lines:
                tqdm.write(f"{question['id']}: {call}")
        if result["status"] != 200:
            refused.append(f"{question['id']} has status {result['status']}")
    process.stop()
    small = [
        question for question in asked if len(json.dumps(question["tools"])) < 2_500
    ]
    chosen = small[:: max(1, len(small) // max(1, options.answers))][: options.answers]
    with (
        guided_server() as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        ThreadPoolExecutor(4) as threads,
    ):
        answers = list(
            tqdm(
                threads.map(lambda question: answer(http, question), chosen),
                total=len(chosen),
            )
        )
    results = {
        "questions": len(asked),
        **statuses,
        "right calls": outcomes.total(),
        **{
            f"right calls: {outcome}": count
            for outcome, count in sorted(outcomes.items())
        },
        "answers": sum(status == 200 for status, _ in answers),
        "answers with unknown arguments": sum(bool(unknown) for _, unknown in answers),
    }
    report.print_table(
        [{"figure": name, "value": value} for name, value in results.items()],
        {"figure": "", "value": ""},
    )
    report.write_json(options.out / "bfcl.json", vars(options), results, started_on)
    report.exit_with(refused)


if __name__ == "__main__":
    main()
