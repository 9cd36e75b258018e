"""Tables, result files and pictures of all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
"""The default folder of results."""
Panels = Mapping[str, str]
LIBRARIES = (
    "torch",
    "llguidance",
    "xgrammar",
    "outlines_core",
    "lm-format-enforcer",
    "ray",
    "transformers",
)


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2, for an invalid argument."""
    print(f"{_name()}: {message}", file=sys.stderr)
    raise SystemExit(2)


def exit_with(violations: Sequence[str]) -> NoReturn:
    """Print the violations and exit with status 1, or 0 if there are none."""
    for line in violations:
        print(f"VIOLATION: {line}")
    raise SystemExit(1 if violations else 0)


def _name() -> str:
    """Return the name of the running benchmark: a file, or a folder with a
    `__main__.py`."""
    path = Path(sys.argv[0])
    return path.parent.name if path.stem == "__main__" else path.stem


def percentiles(values: Sequence[float], scale: float = 1e3) -> dict[str, float]:
    """Return p50, p90, p99 and mean of times in seconds, as milliseconds."""
    if not values:
        return {}
    scaled = np.asarray(values) * scale
    found = {
        f"p{at}": round(float(np.percentile(scaled, at)), 4) for at in (50, 90, 99)
    }
    return {**found, "mean": round(float(scaled.mean()), 4)}


def machine() -> dict[str, Any]:
    """Describe this machine: commit and date, processor, library versions, load
    average."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_json(
    path: Path, setting: Mapping[str, Any], results: Any, started_on: Mapping[str, Any]
) -> None:
    """Write the result of a benchmark as JSON.

    Args:
        setting: the benchmark's options.
        started_on: `machine()` before the measurement.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = [_portable(argument) for argument in sys.argv[1:]]
    command = shlex.join(["python", "-m", f"benchmarks.{_name()}", *arguments])
    document = {
        "command": command,
        "machine": {
            **started_on,
            "load_average_at_the_end": [round(load, 2) for load in os.getloadavg()],
        },
        "setting": {name: _portable(value) for name, value in setting.items()},
        "results": results,
    }
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def _portable(value: Any) -> Any:
    """Replace absolute paths, which do not exist on other machines."""
    if not isinstance(value, str | Path):
        return value
    path = Path(value)
    if not path.is_absolute():
        return str(value)
    return (
        str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else f"DIR/{path.name}"
    )


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Return the lines of a table: headings, then rows. Columns with text are aligned
    to the left.

    Args:
        columns: key of a row -> heading.
    """
    values = [[row.get(key) for key in columns] for row in rows]
    cells = [
        list(columns.values()),
        *([cell(value) for value in row] for row in values),
    ]
    for place in range(len(columns)):
        width = max(len(line[place]) for line in cells)
        has_text = any(isinstance(row[place], str) for row in values)
        for line in cells:
            line[place] = (
                line[place].ljust(width) if has_text else line[place].rjust(width)
            )
    return ["  ".join(line).rstrip() for line in cells]


def print_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print a table."""
    print("\n".join(table(rows, columns)))


def cell(value: Any) -> str:
    """Return a value of a table as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return (
            f"{value:.0f}"
            if abs(value) >= 1000
            else f"{value:.3g}"
            if abs(value) < 10
            else f"{value:.1f}"
        )
    return str(value)


def start(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: `--out` and `--quick`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder for the results (default: %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run about a minute, to see that the command works",
    )
    return parser


def plot(
    path: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    place: Sequence[str],
    panels: Panels,
) -> None:
    """Draw horizontal bars, one group per place and one bar per row, in panels side by
    side.

    Args:
        rows: each has a "way", which names and colours its bar.
        place: the keys that together name a group.
        panels: key of the bar -> its label. A key that ends in `_p50` gets a dash at
            the row's `_p99`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = list(dict.fromkeys(row["way"] for row in rows))
    groups = list(dict.fromkeys(tuple(row[key] for key in place) for row in rows))
    height = 1.8 + 0.2 * len(rows) + 0.2 * len(groups)
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(6.0 * len(panels), height),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axis, (key, label) in zip(axes[0], panels.items(), strict=True):
        top, middles = 0.0, []
        for group in groups:
            mine = [
                row
                for row in rows
                if tuple(row[each] for each in place) == group
                and row.get(key) is not None
            ]
            for at, row in enumerate(mine):
                color = f"C{ways.index(row['way'])}"
                axis.barh(top + at, row[key], 0.9, color=color)
                if key.endswith("_p50"):
                    axis.plot(
                        [row[key.replace("_p50", "_p99")]],
                        [top + at],
                        "|",
                        color=color,
                        markersize=8,
                    )
            middles.append(top + (len(mine) - 1) / 2)
            top += len(mine) + 0.8
        axis.set_yticks(
            middles, [", ".join(map(str, group)) for group in groups], fontsize=8
        )
        axis.set_xlabel(
            f"{label} (bar p50, dash p99)" if key.endswith("_p50") else label
        )
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    bars = [
        axes[0][0].barh([0], [0], color=f"C{index}", label=way)
        for index, way in enumerate(ways)
    ]
    figure.legend(
        handles=bars, loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    print(f"wrote {path} and .json")
