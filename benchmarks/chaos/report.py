"""The figures, violations and tables of a chaos run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.chaos.faults import Event
from benchmarks.chaos.load import Load, Record
from benchmarks.chaos.watch import Watch, replacements
from benchmarks.report import percentiles, print_table

SHOWN = 20


@dataclass
class Run:
    """A finished chaos run."""

    begun: float
    """`time.monotonic()`."""
    lasted: float
    """Seconds until the last request was answered."""
    load: Load
    calm: Load
    """Requests that were sent after the last fault."""
    events: list[Event]
    watch: Watch
    recovered: bool
    """Whether all mask actors were up again in time."""
    tracebacks: int
    """Number of tracebacks in the server's log."""


def violations(run: Run, *, every_good: bool) -> list[str]:
    """Return the violations, one line each.

    Args:
        every_good: whether all good requests must get valid answers.
    """
    found = [record.describe() for record in [*run.load.violations(), *run.calm.violations()][:SHOWN]]
    if run.watch.deaths:
        found.append("the engine or the server died")
    if not run.recovered:
        found.append("not all mask actors were up again after the last fault")
    found += [f"after the last fault, {each.describe()}" for each in _lost(run.calm.good)[:SHOWN]]
    if every_good:
        found += [f"good {each.describe()}" for each in _lost(run.load.good)[:SHOWN]]
    return found


def _lost(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.verdict.outcome in ("failed", "refused")]


def summary(run: Run) -> dict[str, Any]:
    """Return the figures for the JSON file."""
    load, outcomes = run.load, run.load.outcomes()
    good = load.good
    known = replacements(run.events, run.watch.seen)
    noticed = [each.noticed for each in known if each.noticed is not None]
    back = [each.replaced for each in known if each.replaced is not None]
    health = [look.took for look in run.watch.seen if look.actors]
    waits = [record.ended - record.began for record in good if record.verdict.outcome == "valid"]
    return {
        "requests": len(load.records),
        "requests_per_second": round(len(load.records) / run.lasted, 2),
        "valid": outcomes["valid"],
        "left_by_the_client": outcomes["left"],
        "good": len(good),
        "good_and_valid": sum(record.verdict.outcome == "valid" for record in good),
        "good_lost_by_cause": dict(load.causes(good)),
        "internal_errors_by_cause": dict(
            Counter(each.verdict.cause for each in load.records if each.verdict.outcome == "failed")
        ),
        "hostile": dict(Counter(each.verdict.outcome for each in load.records if each.hostile)),
        "invalid_outputs": outcomes["invalid"],
        "different_outputs": outcomes["different"],
        "undeclared_errors": outcomes["undeclared"],
        "hung": outcomes["hung"],
        "engine_restarts": run.watch.deaths,
        "tracebacks_in_the_log": run.tracebacks,
        "recovered": run.recovered,
        "calm_afterwards": dict(run.calm.outcomes()),
        "faults": dict(Counter(event.fault for event in run.events)),
        "replaced": len(back),
        "never_replaced": len(known) - len(back),
        "seconds_to_notice": _spread(noticed),
        "seconds_to_replace": _spread(back),
        "seconds_of_good_answers": _spread(waits),
        "milliseconds_of_health": percentiles(health),
        "no_actor_up_share": round(float(np.mean([look.up == 0 for look in run.watch.seen])), 4),
        "memory": memory_rows(run.watch.memory),
        "timeline": {
            "actors_up": [[round(look.at - run.begun, 1), look.up] for look in run.watch.seen[::5]],
            "faults": [[round(event.at - run.begun, 2), event.fault, event.index] for event in run.events],
        },
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {"p50": round(float(np.median(seconds)), 2), "max": round(max(seconds), 2)}


def memory_rows(samples: Sequence[tuple[float, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the PSS per kind of process in MiB at the first sample, its maximum, and at the last sample; and
    process counts."""
    if not samples:
        return []
    roles = list(dict.fromkeys(row["process"] for _, rows in samples for row in rows))
    found = []
    for role in roles:
        sizes = [[row["pss_mib"] for row in rows if row["process"] == role] for _, rows in samples]
        sums = [sum(each) for each in sizes]
        row = {"process": role, "count": len(sizes[0]), "start": sums[0], "most": max(sums), "end": sums[-1]}
        found.append({**row, "count_at_end": len(sizes[-1])})
    return found


def print_run(run: Run, result: dict[str, Any]) -> None:
    """Print the tables."""
    rows: list[dict[str, Any]] = []

    def line(what: str, value: Any) -> None:
        rows.append({"what": what, "value": value})

    line("requests", result["requests"])
    line("requests/s", result["requests_per_second"])
    line("valid", result["valid"])
    line("client disconnected", result["left_by_the_client"])
    share = result["good_and_valid"] / max(1, result["good"])
    line("good requests, valid answers", f"{result['good']}, {result['good_and_valid']} ({share:.2%})")
    for cause, count in sorted(result["good_lost_by_cause"].items()):
        line(f"good requests that ended {cause}", count)
    for name in ("invalid_outputs", "different_outputs", "undeclared_errors", "hung", "engine_restarts"):
        line(f"{name.replace('_', ' ')} (must be 0)", result[name])
    line("faults", ", ".join(f"{count} {name}" for name, count in result["faults"].items()))
    line("mask actors replaced, not replaced", f"{result['replaced']}, {result['never_replaced']}")
    spreads = {"to notice": "seconds_to_notice", "to replace": "seconds_to_replace"}
    for what, key in {**spreads, "of a good answer": "seconds_of_good_answers"}.items():
        spread = result[key]
        line(f"seconds {what}, p50 / max", f"{spread['p50']} / {spread['max']}" if spread else None)
    line("share of the time with no actor up", result["no_actor_up_share"])
    line("tracebacks in the server's log", result["tracebacks_in_the_log"])
    line("after the last fault", ", ".join(f"{count} {name}" for name, count in result["calm_afterwards"].items()))
    print()
    print_table(rows, {"what": "what", "value": ""})
    print()
    columns = {"process": "process", "count": "count", "start": "PSS MiB, start", "most": "most", "end": "end"}
    print_table(result["memory"], columns)
    print(f"\nhostile requests: {result['hostile']}")
