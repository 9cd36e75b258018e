"""Compare the effect of a fault in one request's masks in vLLM's engine, with our plugin there, and in our engine.

    python -m benchmarks.vllm_faults --vllm-python PATH

One request (the victim) runs beside eight others: four with a JSON Schema, two with a regex, two without a constraint.
They run first without the fault and then with it in the same engine. Then two more requests are sent.

- `raise`, `segfault`, `slow`, `endless` are injected into the computation of the victim's masks after its 24th token:
  raise an exception; read from address 0; take 0.2 s per mask; never return and hold the GIL. Both engines use
  llguidance and get the fault from the same wrapper around `llguidance.LLMatcher`
  (benchmarks/faults/faulty_matcher.py). It is installed when the library is imported, in vLLM's engine process and in
  each of our mask actors.
- `error state`: nothing is injected. At some position of the victim's grammar llguidance exceeds its own limits and
  stays in its error state: it then allows only the end of the text, at any position.
- `costly grammar`: nothing is injected. The victim's grammar is ambiguous: each mask takes longer than the one
  before.
- `slow compile`: nothing is injected. outlines needs more than 10 s for the victim's regex. (vLLM has one backend for
  all requests, so there the others use outlines too.)
- `killed actor`: one of our mask actors is killed (-9) half a second after the requests have begun.

Before all that, one guided request runs beside two unguided ones: the longest gap between two of their tokens shows
what the first guided request costs the others.

All engines serve the embedded default model through their `AsyncLLM`, greedily, with one thread and default options.
vLLM runs with its guidance backend, and with `GUIDED_VLLM=1` if the interpreter has this package (`make test-vllm`
makes such an environment). Our engine runs with two mask actors, with and without replays. Each engine and fault has
its own processes, which are killed after `--limit` seconds. A request that takes longer than 60 s counts as hung.
Writes benchmarks/out/vllm_faults.{json,png}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.child_process import SINGLE_THREADED, VLLM_ON_CPU, log_tail
from benchmarks.comparison import vllm_candidate
from benchmarks.faults.faulty_matcher import FAULT_VARIABLE, FAULTS
from benchmarks.faults.requests import Answer, bystanders, is_valid, next_requests, victim
from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import canvas, machine, print_table, write_json

ALL_FAULTS = (*FAULTS, "error state", "costly grammar", "slow compile", "killed actor")
MODEL = ROOT / "engine" / "default_model" / "checkpoint"
WAYS = {"own": ("vLLM", "vllm"), "switch": ("vLLM, GUIDED_VLLM=1", "vllm:switch")}
"""Way in vLLM -> label, name of the engine in `benchmarks.faults.host`."""
STAGES = ("first", "warm-up", "without", "with", "next")
COLUMNS = {
    "fault": "fault",
    "system": "system",
    "victim": "victim",
    "victim_seconds": "after s",
    "valid": "others valid",
    "others": "others not valid",
    "ratio": "their time, with/without",
    "longest_gap": "longest gap s",
    "unguided_gap": "of unguided",
    "first_gap": "at first request",
    "engine": "engine",
    "next": "next requests",
}
OUTCOMES = {
    "valid": "#4c9f70",
    "ended with an error": "#e0a030",
    "wrong, reported as complete": "#c0392b",
    "hung": "#555555",
}


def systems(options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return label -> (name of the engine in `benchmarks.faults.host`, Python interpreter)."""
    found: dict[str, tuple[str, str]] = {}
    vllm = vllm_candidate(options.vllm_python)
    if vllm is not None:
        ways = options.vllm if has_plugin(vllm.python) else {"own"}.intersection(options.vllm)
        found = {label: (engine, vllm.python) for way, (label, engine) in WAYS.items() if way in ways}
    for replays in options.max_replays:
        found[f"ours, max_replays={replays}"] = (f"ours:{replays}", sys.executable)
    return found


def has_plugin(python: str) -> bool:
    """Return whether an interpreter has this package with Ray."""
    code = (
        "import importlib.metadata as m; import ray, guided.integrations.vllm.metrics; "
        "assert m.entry_points(group='guided.pools')"
    )
    return subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 0


def observe(engine: str, python: str, fault: str, limit: float) -> dict[str, Any]:
    """Run one engine with one fault.

    Returns:
        The stages that `benchmarks.faults.host` writes, by name; `ended` ("by itself", "killed after 180 s", "with
        status -11"); and `log`, the end of its output.
    """
    with tempfile.TemporaryFile() as log, _hosted(engine, python, fault, log) as process:
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            _kill_tree(process.pid)

        timer = threading.Timer(limit, kill)
        timer.start()
        assert process.stdout is not None
        stages = {stage.pop("stage"): stage for stage in map(json.loads, process.stdout)}
        status = process.wait()
        timer.cancel()
        text = log_tail(log, 2000)
    ended = f"killed after {limit:g} s" if killed.is_set() else f"with status {status}" if status else "by itself"
    return {**stages, "ended": ended, "log": text}


@contextlib.contextmanager
def _hosted(engine: str, python: str, fault: str, log: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        **SINGLE_THREADED,
        **VLLM_ON_CPU,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks" / "faults" / "startup"), str(ROOT)]),
        FAULT_VARIABLE: fault,
    }
    command = [python, "-m", "benchmarks.faults.host", engine, fault, str(MODEL)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment, text=True)
    try:
        yield process
    finally:
        _kill_tree(process.pid)
        process.wait()


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants, which may no longer react to other signals."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def evaluate(fault: str, system: str, seen: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the table."""
    row: dict[str, Any] = {"fault": fault, "system": system, "ended": seen["ended"]}
    answers = {stage: [Answer(**one) for one in seen[stage]["answers"]] for stage in STAGES if stage in seen}
    if "without" not in answers:
        print(f"{fault}, {system} didn't start: {seen['log']}", file=sys.stderr)
        return row | {"victim": "didn't start", "engine": seen["ended"], "next": "none"}
    if "with" not in answers:
        # The engine's process is gone, and all connections with it.
        return row | {"victim": "no answer", "valid": "0 of 8", "engine": f"host ended {seen['ended']}", "next": "none"}
    row["first_gap"] = max(answer.longest_gap for answer in answers["first"])
    hurt, *others = answers["with"]
    row["unguided_gap"] = max(answer.longest_gap for answer in others if answer.name.startswith("plain"))
    requests = bystanders()
    outcomes = [_outcome(one, answer) for one, answer in zip(requests, others, strict=True)]
    row |= {"victim": _victim_answer(hurt, _outcome(victim(fault, marked=True), hurt)), "victim_seconds": hurt.seconds}
    row["outcomes"] = {outcome: outcomes.count(outcome) for outcome in OUTCOMES}
    row["victim_outcome"] = _outcome(victim(fault, marked=True), hurt)
    row["valid"] = f"{outcomes.count('valid')} of {len(requests)}"
    row["others"] = "; ".join(_rest(others, outcomes)) or "-"
    before = {answer.name: answer for answer in answers["without"]}
    row["reference_valid"] = sum(is_valid(one, before[one.name]) for one in requests)
    pairs = [
        (answer.seconds / before[answer.name].seconds, answer.longest_gap)
        for answer, outcome in zip(others, outcomes, strict=True)
        if outcome == "valid"
    ]
    if pairs:
        ratios = [ratio for ratio, _ in pairs]
        row["ratio"] = f"{statistics.median(ratios):.2f} (worst {max(ratios):.2f})"
        row["ratios"] = ratios
        row["longest_gap"] = max(gap for _, gap in pairs)
    row["engine"] = seen.get("state", {}).get("engine", seen["ended"])
    if "next" in answers and all(answer.hung for answer in answers["next"]):
        row["engine"] = f"hung (says: {row['engine']})"
    if "next" in answers:
        found = zip(next_requests(), answers["next"], strict=True)
        row["next"] = "; ".join(f"{one.name}: {_short(answer, _outcome(one, answer))}" for one, answer in found)
    row["answers"] = {stage: seen[stage]["answers"] for stage in STAGES[1:] if stage in seen}
    return row


def _outcome(request: Any, answer: Answer) -> str:
    if answer.hung:
        return "hung"
    if answer.error is not None:
        return "ended with an error"
    return "valid" if is_valid(request, answer) else "wrong, reported as complete"


def _victim_answer(answer: Answer, outcome: str) -> str:
    """Describe the answer that the victim's client gets."""
    if outcome == "valid":
        return "valid"
    if answer.hung:
        return f"nothing more after {answer.tokens} tokens"
    if answer.error is not None:
        return f"error: {_bounded(answer.error)}"
    return f"finish_reason {answer.finish_reason}, text that ends in {answer.text[-6:]!r}: not in the language"


def _rest(answers: list[Answer], outcomes: list[str]) -> list[str]:
    kinds = [_short(answer, outcome) for answer, outcome in zip(answers, outcomes, strict=True) if outcome != "valid"]
    return [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]


def _short(answer: Answer, outcome: str) -> str:
    return _bounded(answer.error, 40) if answer.error is not None else outcome


def _bounded(text: str, most: int = 70) -> str:
    return text if len(text) <= most else text[:most] + "…"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the outcomes of the nine requests of every run."""
    drawn = [row for row in rows if "outcomes" in row]
    figure, axes = canvas(1, width=10.0, height=0.42 * len(drawn) + 1.6)
    axis = axes[0]
    for at, row in enumerate(drawn):
        counts = dict(row["outcomes"])
        left = 0.0
        for outcome, colour in OUTCOMES.items():
            axis.barh(at, counts[outcome], left=left, color=colour, label=outcome if at == 0 else None, height=0.7)
            left += counts[outcome]
        axis.barh(at, 1, left=left + 0.3, color=OUTCOMES[row["victim_outcome"]], height=0.7, hatch="//")
        dead = "" if row["engine"] == "alive" else f"engine {row['engine'].partition(':')[0].partition(' ')[0]}"
        slower = f"time of the others {row['ratio']}" if "ratio" in row else ""
        axis.text(left + 1.5, at, "; ".join(filter(None, (dead, slower))), va="center", fontsize=8)
    axis.set_yticks(range(len(drawn)), [f"{row['fault']}, {row['system']}" for row in drawn], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 14)
    axis.set_xticks(range(9))
    axis.grid(visible=False)
    axis.set_title(
        "A fault in one request's masks: outcomes of the eight others, and of the victim (hatched)", fontsize=10
    )
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", nargs="+", choices=ALL_FAULTS, default=list(ALL_FAULTS))
    parser.add_argument("--max-replays", type=int, nargs="*", default=[0, 2], help="of our pool, one run per value")
    parser.add_argument("--vllm", nargs="*", choices=WAYS, default=list(WAYS), help="ways in vLLM")
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds after which an engine's processes are killed"
    )
    parser.add_argument("--vllm-python", help="a Python interpreter with vLLM (docs/benchmarks.md)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    started_on = machine()
    taking_part = systems(options)
    rows = []
    with tqdm(total=len(options.fault) * len(taking_part), unit=" runs", disable=None) as bar:
        for fault in options.fault:
            for system, (engine, python) in taking_part.items():
                if fault == "killed actor" and engine == "vllm":
                    continue  # it has no actors
                bar.set_description(f"{fault}, {system}")
                rows.append(evaluate(fault, system, observe(engine, python, fault, options.limit)))
                bar.update()
    print_table(rows, COLUMNS)
    print("engine alive: it answers after the fault. Their time: median and worst of the others with valid answers")
    write_json(options.out / "vllm_faults.json", vars(options), rows, started_on)
    plot(rows, options.out / "vllm_faults.png")
    print(f"wrote {options.out / 'vllm_faults.json'} and .png")


if __name__ == "__main__":
    main()
