"""Draw the timeline of a run: answers, faults, actors, memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import FAULTS, Event
from benchmarks.chaos.load import Record
from benchmarks.chaos.watch import Watch

COLORS = {"valid": "tab:green", "left": "tab:gray", "refused": "tab:olive", "failed": "tab:orange", "violation": "red"}


def timeline(
    path: Path, title: str, zero: float, records: Sequence[Record], events: Sequence[Event], watch: Watch
) -> None:
    """Draw a chaos run. `zero` is the `time.monotonic()` at 0 on the axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        4, 1, figsize=(11, 9), sharex=True, layout="constrained", height_ratios=[3, 1.8, 1, 2]
    )
    _answers(axes[0], zero, records)
    names = list(FAULTS)
    for name in names:
        at = [event.at - zero for event in events if event.fault == name]
        axes[1].scatter(at, [names.index(name)] * len(at), marker="|", s=60)
    axes[1].set_yticks(range(len(names)), names, fontsize=8)
    axes[1].set_ylim(len(names) - 0.5, -0.5)
    axes[1].set_ylabel("faults")
    axes[2].step(
        [look.at - zero for look in watch.seen], [look.up for look in watch.seen], where="post", color="tab:blue"
    )
    axes[2].set_ylabel("actors up")
    axes[2].set_ylim(bottom=0)
    memory_panel(axes[3], zero, watch.memory)
    axes[3].set_xlabel("seconds")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(visible=True, axis="y", alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _answers(axis: Any, zero: float, records: Sequence[Record]) -> None:
    bins: dict[str, dict[int, int]] = {name: defaultdict(int) for name in COLORS}
    for record in records:
        name = record.verdict.outcome if record.verdict.outcome in COLORS else "violation"
        bins[name][math.floor(record.ended - zero)] += 1
    seconds = range(max((max(each) for each in bins.values() if each), default=0) + 1)
    counts = [[each[second] for second in seconds] for each in bins.values()]
    axis.stackplot(seconds, counts, labels=list(bins), colors=COLORS.values(), step="post", linewidth=0)
    axis.set_ylabel("answers/s")
    axis.legend(loc="upper right", ncols=len(COLORS), fontsize=8, frameon=False)


def memory_panel(axis: Any, zero: float, samples: Sequence[tuple[float, list[dict[str, Any]]]]) -> None:
    """Draw the PSS per kind of process, stacked."""
    sizes: dict[str, list[float]] = {}
    for index, (_, rows) in enumerate(samples):
        for row in rows:
            name = "Ray" if row["process"].startswith("Ray:") else row["process"]
            sizes.setdefault(name, [0.0] * len(samples))[index] += row["pss_mib"]
    if sizes:
        axis.stackplot([at - zero for at, _ in samples], list(sizes.values()), labels=list(sizes), linewidth=0)
        axis.set_ylim(top=1.35 * max(map(sum, zip(*sizes.values(), strict=True))))
    axis.set_ylabel("PSS, MiB")
    axis.legend(loc="upper left", ncols=3, fontsize=7, frameon=False)
