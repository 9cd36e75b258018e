"""Tables, result files and pictures of all benchmarks."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from benchmarks.paths import ROOT

LIBRARIES = ("torch", "llguidance", "xgrammar", "outlines_core", "lm-format-enforcer", "ray", "transformers")


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2: an argument can't be used."""
    print(f"{_name()}: {message}", file=sys.stderr)
    raise SystemExit(2)


def exit_with(violations: Sequence[str]) -> NoReturn:
    """Print the violations and exit with status 1, or 0 if there are none."""
    for line in violations:
        print(f"VIOLATION: {line}")
    raise SystemExit(1 if violations else 0)


def _name() -> str:
    """Return the name of the running benchmark: a file, or a folder with a `__main__.py`."""
    path = Path(sys.argv[0])
    return path.parent.name if path.stem == "__main__" else path.stem


def percentiles(values: Sequence[float], scale: float = 1e3) -> dict[str, float]:
    """Return p50, p90, p99 and mean of times in seconds, as milliseconds."""
    if not values:
        return {}
    scaled = np.asarray(values) * scale
    found = {f"p{at}": round(float(np.percentile(scaled, at)), 4) for at in (50, 90, 99)}
    return {**found, "mean": round(float(scaled.mean()), 4)}


def machine() -> dict[str, Any]:
    """Describe this machine: processor, library versions, load average."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
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


def write_json(path: Path, setting: Mapping[str, Any], results: Any, started_on: Mapping[str, Any]) -> None:
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
        "machine": {**started_on, "load_average_at_the_end": [round(load, 2) for load in os.getloadavg()]},
        "setting": {name: _portable(value) for name, value in setting.items()},
        "results": results,
    }
    path.write_text(_as_text(document) + "\n")


def _as_text(value: Any, indent: str = "") -> str:
    """Return JSON in which lists and objects of plain values take one line."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if not any(isinstance(part, dict | list | tuple) for part in parts):
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    lines = [_as_text(part, inner) for part in parts]
    if isinstance(value, dict):
        lines = [
            f"{json.dumps(str(name), ensure_ascii=False)}: {line}" for name, line in zip(value, lines, strict=True)
        ]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{right}"


def _portable(value: Any) -> Any:
    """Replace absolute paths, which mean nothing on another machine."""
    if not isinstance(value, str | Path):
        return value
    path = Path(value)
    if not path.is_absolute():
        return str(value)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else f"DIR/{path.name}"


def print_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print rows below headings.

    Args:
        columns: key of a row -> heading.
    """
    cells = [[_text(row.get(key)) for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns.values(), *cells, strict=True)]
    print("  ".join(heading.rjust(width) for heading, width in zip(columns.values(), widths, strict=True)))
    for cell in cells:
        print("  ".join(text.rjust(width) for text, width in zip(cell, widths, strict=True)))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def canvas(columns: int = 1, width: float = 6.0, height: float = 4.2, **options: Any) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, side by side, for a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, columns, figsize=(width * columns, height), layout="constrained", squeeze=False, **options
    )
    for one in axes[0]:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(visible=True, axis="y", which="major", alpha=0.3)
        one.set_axisbelow(True)
    return figure, list(axes[0])
