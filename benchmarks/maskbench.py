"""How many real schemas does `auto` enforce, and how fast? MaskBench's protocol: see `guided.maskbench`.

    python -m benchmarks.maskbench [--data FILE] [--backend auto] [--limit N]

Prints the outcomes, the refusals by keyword, and the times. Exit status 1 if an invalid instance is accepted.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.paths import RESULTS
from benchmarks.report import exit_with, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, read_rows, tekken
from guided.backends import AUTO, candidates
from guided.maskbench import OUTCOMES, Result, judge_all
from guided.vocabulary import Vocabulary


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the table of results."""
    count = len(results)
    outcomes = Counter(result.outcome for result in results)
    refused = Counter(result.keyword or result.reason[:60] for result in results if result.outcome == "refused")
    masks = [seconds for result in results for seconds in result.mask_seconds]
    alone = [seconds for result in results for seconds in result.library_seconds or result.mask_seconds]
    guarded = [seconds for result in results if result.guarded for seconds in result.mask_seconds]
    return {
        "schemas": count,
        "outcomes": {outcome: outcomes[outcome] for outcome in OUTCOMES},
        "percent": {outcome: round(100 * outcomes[outcome] / count, 2) for outcome in OUTCOMES},
        "accepted in the schema's property order only": sum(result.reordered for result in results),
        "with something not enforced": sum(bool(result.not_enforced) for result in results),
        "refused by keyword": dict(refused.most_common()),
        "backends": dict(Counter(result.backend for result in results if result.backend).most_common()),
        "first mask [ms]": percentiles([result.compile_seconds for result in results if result.compile_seconds]),
        "mask [us]": percentiles(masks, 1e6),
        "mask, by the library alone [us]": percentiles(alone, 1e6),
        "schemas with guarded keywords": sum(bool(result.guarded) for result in results),
        "mask, with guarded keywords [us]": percentiles(guarded, 1e6),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of MaskBench (default: %(default)s)")
    parser.add_argument("--backend", default=AUTO)
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of a compilation")
    parser.add_argument("--limit", type=int, help="only the first N schemas")
    parser.add_argument("--every", type=int, default=1, help="only every Nth schema")
    parser.add_argument("--details", type=Path, help="write each result that does not pass as a line of JSON")
    parser.add_argument("--out", type=Path, help=f"folder for the result file, such as {RESULTS}")
    options = parser.parse_args(argv)
    started_on = machine()
    entries = read_rows(options.data)[: options.limit : options.every]
    names = candidates("json_schema", options.backend)
    judged = judge_all(entries, Vocabulary.from_tekken(tekken()), names=names, seconds=options.seconds)
    results = list(tqdm(judged, total=len(entries), disable=None, mininterval=1))
    table = summary(results)
    shares = [{"outcome": name, "schemas": table["outcomes"][name], "%": table["percent"][name]} for name in OUTCOMES]
    print_table(shares, {"outcome": "outcome", "schemas": "schemas", "%": "%"})
    for name in list(table)[3:]:
        print(f"{name}: {json.dumps(table[name], ensure_ascii=False)}")
    if options.details:
        failed = (result for result in results if result.outcome != "passes")
        options.details.write_text("".join(json.dumps(_row(result), ensure_ascii=False) + "\n" for result in failed))
    if options.out:
        write_json(options.out / "maskbench.json", vars(options), table, started_on)
    exit_with([f"{r.id} accepts {r.reason[:200]}" for r in results if r.outcome == "accepts invalid"])


def _row(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ("id", "outcome", "backend", "keyword", "pointer", "reason")}


if __name__ == "__main__":
    main()
