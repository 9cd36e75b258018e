"""Measure many tools in one request: `python -m benchmarks.tool_calls`.

The tools are in the format of Hermes and Qwen, with 131,072 tokens (mistral_common's). Compared are this package with
llguidance, and xgrammar alone, each in a process of its own: time to the first mask and the memory that
it takes, and the masks while calls are written. Writes benchmarks/out/tool_calls.json.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import machine, percentiles, print_table, write_json
from benchmarks.workload import tekken
from guided.backends import Backends
from guided.bitmask import words
from guided.constraint import Constraint
from guided.tools.formats import TOOL_FORMATS, Calls, Function, answer_format
from guided.vocabulary import Vocabulary

WAYS = ("guided", "xgrammar")
_FORMAT = TOOL_FORMATS["hermes"]
_LIMIT_SECONDS = 900


_KINDS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "string"}, "The quick brown fox"),
    ({"type": "integer", "minimum": 0, "maximum": 1000}, 217),
    ({"type": "boolean"}, True),
    ({"type": "string", "enum": ["low", "medium", "high"]}, "medium"),
    ({"type": "array", "items": {"type": "string"}}, ["a", "few", "words"]),
    ({"type": "string", "format": "date"}, "2026-11-22"),
    (
        {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat"]},
        {"lat": 47.5, "lon": 8.25},
    ),
]
"""Schemas of properties, and a value of each."""


def functions(tools: int, properties: int) -> list[tuple[Function, dict[str, Any]]]:
    """Return functions with arguments, the same for the same numbers."""
    source = random.Random(tools * 1000 + properties)
    found = []
    for number in range(tools):
        names = [f"{source.choice('abcdefgh')}_property_{number}_{index}" for index in range(properties)]
        chosen = {name: source.choice(_KINDS) for name in names}
        schema = {
            "type": "object",
            "properties": {name: kind for name, (kind, _) in chosen.items()},
            "required": names[: properties // 2],
            "additionalProperties": False,
        }
        function = Function(f"function_{number}", schema)
        found.append((function, {name: value for name, (_, value) in chosen.items()}))
    return found


def measure(way: str, tools: int, properties: int, calls: int) -> dict[str, Any]:
    """Compile the tools in this process, and write calls."""
    vocabulary = Vocabulary.from_tekken(tekken())
    given = functions(tools, properties)
    form = answer_format(Calls(_FORMAT, [function for function, _ in given], required=False, parallel=True), None)
    compile_tag = _guided(vocabulary) if way == "guided" else _xgrammar(vocabulary)
    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
    before, began, used = _resident(), time.perf_counter(), time.process_time()
    matcher = compile_tag({"type": "structural_tag", "format": form})
    matcher.fill(row)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
    memory = _resident() - before
    times: list[float] = []
    for number in range(calls):
        function, arguments = given[number * 7 % tools]
        text = f"{_FORMAT.begin(function.name)}{json.dumps(arguments)}{_FORMAT.call[1]}\n"
        for token in vocabulary.encode(text):
            began = time.perf_counter()
            matcher.fill(row)
            times.append(time.perf_counter() - began)
            matcher.accept(token)
    return {
        "way": way,
        "first_mask_seconds": round(seconds, 4),
        "cpu_seconds": round(cpu_seconds, 4),
        "memory_mib": round(memory / 2**20, 1),
        **{f"mask_{name}_ms": value for name, value in percentiles(times).items()},
        "masks": len(times),
    }


class _Matcher(NamedTuple):
    fill: Callable[[NDArray[np.int32]], object]
    accept: Callable[[int], object]


def _guided(vocabulary: Vocabulary) -> Callable[[Any], _Matcher]:
    """Return our compilation: checks, lowering, llguidance."""
    backend = Backends(vocabulary)["llguidance"]

    def start(tag: Any) -> _Matcher:
        matcher = backend.compile(Constraint.structural_tag(tag)).matcher()
        return _Matcher(matcher.fill_bitmask, lambda token: matcher.accept_tokens([token]))

    return start


def _xgrammar(vocabulary: Vocabulary) -> Callable[[Any], _Matcher]:
    """Return xgrammar's compilation as an engine uses it, with its threads."""
    import xgrammar

    info = xgrammar.TokenizerInfo(
        list(vocabulary.token_bytes),
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary.padded_vocab_size,
        stop_token_ids=list(vocabulary.stop_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def start(tag: Any) -> _Matcher:
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(tag)))

        def accept(token: int) -> None:
            assert matcher.accept_token(token)

        return _Matcher(matcher.fill_next_token_bitmask, accept)

    return start


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=int, default=128)
    parser.add_argument("--properties", type=int, default=12, help="properties of each tool")
    parser.add_argument("--calls", type=int, default=20, help="calls that are written")
    parser.add_argument("--way", choices=WAYS, help="measure one way in this process, and print JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.tools, options.properties, options.calls)))
        return
    started_on = machine()
    counts = [f"--{name}={getattr(options, name)}" for name in ("tools", "properties", "calls")]
    rows = []
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.tool_calls", "--way", way, *counts]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True)
        rows.append(json.loads(done.stdout))
    columns = {
        "way": "way",
        "first_mask_seconds": "first mask s",
        "cpu_seconds": "CPU s",
        "memory_mib": "MiB",
        "mask_p50_ms": "mask p50 ms",
    }
    print_table(rows, {**columns, "mask_p50_ms": "mask p50 ms", "mask_p99_ms": "p99 ms", "masks": "masks"})
    ratio = rows[1]["cpu_seconds"] / rows[0]["cpu_seconds"]
    print(f"xgrammar alone takes {ratio:.1f} times the CPU time to the first mask")
    setting = {name: getattr(options, name) for name in ("tools", "properties", "calls")}
    write_json(options.out / "tool_calls.json", setting, rows, started_on)


if __name__ == "__main__":
    main()
