"""The commands `guided check` and `guided maskbench`: they print what `guided.check` and MaskBench report."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from guided.backends import candidates
from guided.check import Report, check_all, vocabulary_of
from guided.maskbench import OUTCOMES, Result, judge_all


def check_files(
    files: Sequence[Path], tokenizer: Path, options: Mapping[str, Any], *, rewritten: bool, strict: bool, as_json: bool
) -> bool:
    """Print a report on each file; return whether all are accepted.

    Args:
        options: arguments of `guided.check.check_all`.
        rewritten: print the rewritten constraint, too.
        strict: what is not enforced counts as refused.
        as_json: print lines of JSON.
    """
    texts = ((str(f), sys.stdin.read() if str(f) == "-" else f.read_text(encoding="utf-8")) for f in files)
    good = True
    for report in check_all(texts, vocabulary_of(tokenizer), **options):
        good = good and report.accepted and not (strict and report.not_enforced)
        print(json.dumps(asdict(report), ensure_ascii=False) if as_json else _text(report, rewritten), flush=True)
    return good


def _text(report: Report, rewritten: bool) -> str:
    if report.accepted:
        lines = [f"{report.name}: accepted ({report.kind}), {report.backend}, {1000 * report.compile_seconds:.1f} ms"]
    else:
        where = "" if report.pointer is None else f" at {report.pointer or 'the root'}"
        lines = [f"{report.name}: refused ({report.kind}){where}: {report.error}"]
    if report.accepted:
        lines += [f"  not {name}: {reason}" for name, reason in report.refusals.items()]
    for what in ("rewritten", "guarded", "not_enforced"):
        if found := getattr(report, what):
            lines.append(f"  {what.replace('_', ' ')}: {', '.join(found)}")
    if report.least_tokens is not None:
        lines.append(f"  shortest output: {report.least_tokens} tokens")
    if rewritten and report.compiled:
        lines += ["  compiled as:", *(f"    {line}" for line in report.compiled.splitlines())]
    return "\n".join([*lines, *(f"  sample: {sample}" for sample in report.samples)])


def run_maskbench(file: Path, backend: str, tokenizer: Path, seconds: float, limit: int | None) -> bool:
    """Judge MaskBench's schemas and print the table; return whether no invalid instance was accepted."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        entries = [json.loads(line) for line in lines][:limit]
    names = candidates("json_schema", backend)
    judged = judge_all(entries, vocabulary_of(tokenizer), names=names, seconds=seconds)
    results = list(tqdm(judged, total=len(entries), desc="schemas", unit=" schemas", mininterval=1))
    _print_outcomes(results)
    return not any(result.outcome == "accepts invalid" for result in results)


def _print_outcomes(results: Sequence[Result]) -> None:
    counts = Counter(result.outcome for result in results)
    refused = Counter(result.keyword or result.reason[:60] for result in results if result.outcome == "refused")
    first = [1000 * result.compile_seconds for result in results if result.compile_seconds]
    masks = [1e6 * seconds for result in results for seconds in result.mask_seconds]
    table = Table("", "schemas", "%", title=f"MaskBench, {len(results)} schemas", title_justify="left")
    for outcome in OUTCOMES:
        table.add_row(outcome, str(counts[outcome]), f"{100 * counts[outcome] / max(1, len(results)):.1f}")
    table.add_section()
    for keyword, count in refused.most_common(12):
        table.add_row(f"refused for {keyword}", str(count), f"{100 * count / len(results):.1f}")
    console = Console()
    console.print(table)
    for what, unit, values in (("first mask", "ms", first), ("mask", "µs", masks)):
        if values:
            p50, p99 = np.percentile(values, (50, 99))
            console.print(f"{what}: average {np.mean(values):.1f} {unit}, p50 {p50:.1f}, p99 {p99:.1f}")
    for result in results:
        if result.outcome == "accepts invalid":
            console.print(f"{result.id} accepts {result.reason[:200]}", markup=False)
