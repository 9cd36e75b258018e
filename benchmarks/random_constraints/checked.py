"""Count the ends of answers under keywords that are checked: `python -m
benchmarks.random_outputs --checked`.

A model answers one prompt with each schema of a file, greedily and at temperature 1,
through `LLM`. Counted are the ends of the answers, and the vetoes by keyword. Answers
that end `stop` are validated by another library.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

import jsonschema

from benchmarks import report
from benchmarks.workload import read_rows
from engine import LLM, SamplingParams
from engine.default_model import checkpoint_path
from engine.outputs import RequestOutput
from guided.errors import InvalidConstraint

PROMPT = "Maria Keller, 34, lives in Lisbon and ordered 3 items at 12.50 on 2024-05-17. Describe as JSON."
MAX_TOKENS = 300
COLUMNS = {
    "temperature": "temperature",
    "stop": "stop",
    "invalid": "INVALID stop",
    "length": "length",
    "constraint_not_met": "constraint not met",
    "other": "other errors",
    "refused": "refused",
    "vetoed": "vetoed answers",
    "vetoes": "vetoes",
    "seconds": "seconds",
}


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each temperature, and the invalid answers."""
    schemas = [row["schema"] for row in read_rows(options.schemas)][: options.cases]
    rows: list[dict[str, Any]] = []
    violations: list[str] = []
    with LLM(options.model or str(checkpoint_path()), pool="inline") as llm:
        for temperature in (0.0, 1.0):
            row, invalid = _answers(llm, schemas, temperature, options)
            rows.append(row)
            violations += invalid
    return rows, violations


def _answers(
    llm: LLM, schemas: list[Any], temperature: float, options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    counts: Counter[str] = Counter()
    keywords: Counter[str] = Counter()
    taken: list[Any] = []
    params: list[SamplingParams] = []
    for schema in schemas:
        try:
            made = SamplingParams(
                json_schema=schema,
                temperature=temperature,
                max_tokens=MAX_TOKENS,
                seed=options.seed,
                backend=options.way,
            )
        except InvalidConstraint:
            counts["refused"] += 1
        else:
            taken.append(schema)
            params.append(made)
    conversation = [{"role": "user", "content": PROMPT}]
    started = time.perf_counter()
    outputs = llm.chat([conversation] * len(params), params, use_tqdm=options.verbose)
    seconds = time.perf_counter() - started
    violations: list[str] = []
    for schema, one, output in zip(taken, params, outputs, strict=True):
        end = _end(output)
        assert one.constraint is not None
        if end == "stop" and not _is_valid(
            one.constraint.value, output.outputs[0].text
        ):
            end = "invalid"
            violations.append(f"{json.dumps(schema)[:300]}: {output.outputs[0].text!r}")
        counts[end] += 1
        vetoes = output.outputs[0].vetoes
        counts["vetoed"] += bool(vetoes)
        keywords.update(vetoes)
        if options.verbose:
            print(
                temperature,
                end,
                output.error or "",
                vetoes,
                json.dumps(schema)[:160],
                output.outputs[0].text[-200:],
            )
    print(
        f"temperature {temperature:g}, vetoes by keyword: {dict(keywords.most_common())}"
    )
    counts["vetoes"] = keywords.total()
    return {
        "temperature": temperature,
        **counts,
        "seconds": round(seconds, 1),
        "keywords": keywords,
    }, violations


def _end(output: RequestOutput) -> str:
    """Return the end of an answer."""
    if output.error is None:
        return str(output.outputs[0].finish_reason)
    if output.error.status == 400:
        return "refused"
    return (
        "constraint_not_met" if output.error.code == "constraint_not_met" else "other"
    )


def _is_valid(schema: Any, text: str) -> bool:
    validator = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft202012Validator
    )
    try:
        return bool(validator(schema).is_valid(json.loads(text)))
    except jsonschema.SchemaError:  # for example a pattern that Python does not read
        return True


def main(options: argparse.Namespace) -> None:
    """Print and write the counts. The exit status is 1 after an invalid answer."""
    started_on = report.machine()
    rows, violations = measure(options)
    report.print_table(rows, COLUMNS)
    report.write_json(
        options.out / "checked.json",
        {"seed": options.seed},
        {"answers": rows},
        started_on,
    )
    report.exit_with(violations)
