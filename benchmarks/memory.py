"""Measure what the processes use memory for: `python -m benchmarks.memory`.

Three measurements, each in its own processes:

- **Processes.** A Ray pool for the real vocabulary of 131,072 tokens, and the server's engine with the embedded model
  (2,048 tokens): PSS, USS and RSS of the idle engine process, mask actors, compile actor, its fork server, compile
  processes and Ray's processes; and the shared segments before and after 64 sequences were filled.
- **A mask actor, part by part**, without a cluster: the interpreter, Ray's worker library, our modules, the vocabulary.
  Then, per backend in a separate process: its library, its tables of the vocabulary, grammars and open sequences.
  Grammars are real schemas from `--data`, loaded as an actor loads them, and compared with the size that the pool's
  cache assumes.
- **The engine's process, part by part.**

Parts are anonymous memory (the process's own) after the C library has returned free memory. `files` is code and data
mapped from files, which may be shared. `slack` is free memory that the C library held. Writes
benchmarks/out/memory.{json,png}.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tqdm import tqdm

from actors.compile.compiler import Compiler
from actors.compile.process import CompileResult
from benchmarks.child_process import SINGLE_THREADED, log_tail
from benchmarks.paths import RESULTS, ROOT
from benchmarks.peers.rows import Document
from benchmarks.report import canvas, fail, machine, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents
from guided.backends import BACKENDS
from guided.constraint import Constraint
from guided.limits import CompileLimits
from guided.vocabulary import Vocabulary

PROCESSES = {
    "vocabulary": "vocabulary",
    "process": "process",
    "count": "count",
    "pss": "PSS each",
    "uss": "USS",
    "rss": "RSS",
}
PARTS = {
    "part": "part",
    "anonymous": "MiB",
    "files": "files MiB",
    "slack": "slack MiB",
    "each": "each KiB",
    "weighed": "cache assumes KiB",
    "loaded": "imports",
}


def compiled(vocabulary: Vocabulary, drawn: Sequence[Document], count: int, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """Return up to `count` grammars per backend, serialized as a compile process sends them, and a text for each."""
    compiler = Compiler(vocabulary, CompileLimits())
    found = []
    try:
        for name in BACKENDS:
            have = 0
            for document in drawn:
                constraint = Constraint.json_schema(document.schema)
                future: Future[CompileResult] = compiler.submit(constraint, [name])
                outcome = future.result()
                if outcome.error is None:
                    grammar = {"backend": name, "constraint": constraint, "tokens": list(document.tokens)}
                    found.append({**grammar, "dumped": outcome.dumped, "nbytes": outcome.nbytes})
                    have += 1
                    bar.update()
                if have == count:
                    break
    finally:
        compiler.close()
    return found


def run_part(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a module of `benchmarks.memory_processes` and return its lines of JSON."""
    environment = {**os.environ, **SINGLE_THREADED}
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", f"benchmarks.memory_processes.{module}", *arguments]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment, check=False)
        if ended.returncode:
            fail(f"{module} ended with status {ended.returncode}: {log_tail(log, 1000)}")
    return [json.loads(line) for line in ended.stdout.splitlines()]


def by_kind(vocabulary: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per kind of process with the mean of its processes, and one for all."""
    lines = []
    for kind in dict.fromkeys(row["process"] for row in rows):
        mine = [row for row in rows if row["process"] == kind]
        means = {size: statistics.mean(row[f"{size}_mib"] for row in mine) for size in ("pss", "uss", "rss")}
        lines.append({"vocabulary": vocabulary, "process": kind, "count": len(mine), **means})
    total = {size: sum(row[f"{size}_mib"] for row in rows) for size in ("pss", "uss")}
    return [*lines, {"vocabulary": vocabulary, "process": "all", "count": len(rows), **total}]


def parts(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of one process. Parts that consist of several objects also have the size of one."""
    rows = []
    seen: set[str] = set()
    for line in lines:
        row = {key: line.get(key) for key in ("part", "anonymous", "files", "slack")}
        if count := line.get("count"):
            row["each"] = line["anonymous"] * 1024 / count
            if "weighed" in line:
                row["weighed"] = line["weighed"] * 1024 / count
        fresh = [name for name in line["loaded"] if name not in seen]
        seen.update(fresh)
        rows.append({**row, "loaded": ", ".join(fresh) or None})
    return rows


def plot(shown: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the parts of each process, stacked."""
    figure, axes = canvas(1, width=11.0, height=0.7 * len(shown) + 2.6)
    axis = axes[0]
    import matplotlib

    colours = matplotlib.colormaps["tab20"]
    handles: dict[str, Any] = {}
    for at, rows in enumerate(shown.values()):
        left = 0.0
        for row in rows:
            size, part = row["anonymous"], row["part"].rpartition(": ")[2]
            if size < 0.5:
                continue
            colour = handles[part].patches[0].get_facecolor() if part in handles else colours(len(handles) % 20)
            bar = axis.barh(at, size, left=left, height=0.6, color=colour)
            handles.setdefault(part, bar)
            if size > 10:
                axis.text(left + size / 2, at, f"{size:.0f}", ha="center", va="center", fontsize=7)
            left += size
    axis.set_yticks(range(len(shown)), list(shown), fontsize=9)
    axis.invert_yaxis()
    axis.grid(visible=True, axis="x", alpha=0.3)
    axis.set_xlabel("MiB, anonymous")
    axis.set_title("Anonymous memory of a process, by part", fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--grammars", type=int, default=8, help="real schemas per backend, plus one")
    parser.add_argument(
        "--max-schema",
        type=int,
        default=500,
        help="maximum characters of a schema; some libraries need minutes for larger ones",
    )
    parser.add_argument("--sequences", type=int, default=64, help="open sequences per backend")
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    started_on = machine()
    tokens = Tokens.tekken()
    vocabulary = Vocabulary.from_tekken(tokens.path)
    drawn = documents(options.data, tokens, 20 * options.grammars, max_schema=options.max_schema, lengths=(10, 120))
    with tempfile.TemporaryDirectory(prefix="guided-memory-") as folder, tqdm(unit=" parts", disable=None) as bar:
        vocabulary_file, grammars_file = str(Path(folder) / "vocabulary"), str(Path(folder) / "grammars")
        Path(vocabulary_file).write_bytes(pickle.dumps(vocabulary))
        bar.set_description("compiling")
        grammars = compiled(vocabulary, drawn, options.grammars + 1, bar)
        Path(grammars_file).write_bytes(pickle.dumps(grammars))
        workers = {}
        for name in BACKENDS:
            bar.set_description(f"a mask actor, {name}")
            Path(grammars_file).write_bytes(pickle.dumps([one for one in grammars if one["backend"] == name]))
            workers[name] = run_part("mask_actor", vocabulary_file, grammars_file, str(options.sequences))
        small = [{**one, "tokens": []} for one in grammars if one["backend"] == "llguidance"]
        pools = {}
        for name, which in (("131,072 tokens", vocabulary_file), ("2,048, with the model", "default")):
            bar.set_description(f"a pool, {name}")
            Path(grammars_file).write_bytes(pickle.dumps(grammars if which != "default" else small))
            pools[name] = run_part("engine_process", which, grammars_file, str(options.actors))
    lines = [
        line
        for name, said in pools.items()
        for line in by_kind(name, next(one for one in said if one["part"] == "idle")["processes"])
    ]
    shown = {f"a mask actor, 131,072 tokens, {name}": parts(said) for name, said in workers.items()}
    for name, said in pools.items():
        shown[f"the engine, {name}"] = parts([one for one in said if "processes" not in one])
    print_table(lines, PROCESSES)
    for title, rows in shown.items():
        print(f"\n{title}")
        print_table(rows, PARTS)
    held = {name: {one["part"]: one["segments"] for one in said if "segments" in one} for name, said in pools.items()}
    print()
    for name, when in held.items():
        for part, found in when.items():
            each = "; ".join(f"{one['taken']:.2f} of {one['reserved']:.2f} MiB" for one in found)
            print(f"segments, {name}, {part}: {each}")
    results = {"processes": lines, "parts": shown, "segments": held}
    write_json(options.out / "memory.json", vars(options), results, started_on)
    plot(shown, options.out / "memory.png")
    print(f"wrote {options.out / 'memory.json'} and .png")


if __name__ == "__main__":
    main()
