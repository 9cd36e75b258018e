"""Folders that the benchmarks use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "out"
"""Where results are written by default. git ignores it; `benchmarks/results` has the published ones."""
