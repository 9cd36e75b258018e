"""`guided maskbench`: prints how a backend does on MaskBench's schemas."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.server.commands.parameters import Backend, Tokenizer, reported
from guided.backends import AUTO, candidates

if TYPE_CHECKING:
    from guided.maskbench import Result


def maskbench(
    file: Annotated[
        Path, typer.Argument(help="MaskBench's schemas: lines of JSON, maybe .gz.", exists=True, dir_okay=False)
    ],
    tokenizer: Tokenizer,
    backend: Backend = AUTO,
    seconds: Annotated[float, typer.Option(help="Time limit of a compilation.", min=0.1)] = 10.0,
    limit: Annotated[int | None, typer.Option(help="Only the first schemas.", min=1)] = None,
) -> None:
    """Run MaskBench's protocol: which schemas are enforced exactly, which are refused, and how long do masks take?

    The exit status is 1 if an invalid instance is accepted.
    """
    from tqdm import tqdm

    from guided.check import vocabulary_of  # slow: the grammar libraries
    from guided.maskbench import judge_all

    with reported("maskbench", 2):
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            entries = [json.loads(line) for line in lines][:limit]
        names = candidates("json_schema", backend)
        judged = judge_all(entries, vocabulary_of(tokenizer), names=names, seconds=seconds)
        results = list(tqdm(judged, total=len(entries), desc="schemas", unit=" schemas", mininterval=1))
    _print_outcomes(results)
    raise typer.Exit(any(result.outcome == "accepts invalid" for result in results))


def _print_outcomes(results: Sequence[Result]) -> None:
    import numpy as np

    from guided.maskbench import OUTCOMES

    outcomes = Counter(result.outcome for result in results)
    refused = Counter(result.keyword or result.reason[:60] for result in results if result.outcome == "refused")
    for name, count in [
        *((name, outcomes[name]) for name in OUTCOMES),
        *((f"refused for {keyword}", count) for keyword, count in refused.most_common(12)),
    ]:
        print(f"{count:6} {100 * count / max(1, len(results)):5.1f} %  {name}")
    first = [1000 * result.compile_seconds for result in results if result.compile_seconds]
    masks = [1e6 * seconds for result in results for seconds in result.mask_seconds]
    for what, unit, values in (("first mask", "ms", first), ("mask", "µs", masks)):
        if values:
            p50, p99 = np.percentile(values, (50, 99))
            print(f"{what}: average {np.mean(values):.1f} {unit}, p50 {p50:.1f}, p99 {p99:.1f}")
    for result in results:
        if result.outcome == "accepts invalid":
            print(f"{result.id} accepts {result.reason[:200]}")
