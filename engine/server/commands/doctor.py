"""`guided doctor`: checks whether this machine can run `guided serve` with the given options, and says what to do."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

import typer

from engine.server.commands.parameters import SERVER_OPTIONS, options_of
from engine.server.options import ServeOptions
from guided.backends import BACKENDS
from guided.pools.options import RayPoolOptions
from guided.process_resources import available_cpus

_LIBRARIES = {"outlines": "outlines_core"}
"""Packages with another name than their backend."""
_SECONDS = 120.0
"""Time limit of a check in a process of its own."""

_TRY_BACKEND = """
import sys
from guided import Constraint, InlinePool, Vocabulary
tokens = (b"</s>", *(bytes([byte]) for byte in range(256)), b"<pad>")
pool = InlinePool(Vocabulary(tokens, (0,), frozenset({0, 257}), 264))
pool.compile(Constraint.json_schema({"type": "integer"}), (sys.argv[1],)).result()
"""
_TRY_CLUSTER = """
import json, sys
from actors.cluster import Cluster
from guided.errors import PoolUnavailable
from guided.pools.options import RayPoolOptions
options = RayPoolOptions(**json.loads(sys.argv[1]))
try:
    Cluster.join(options.address).check_room(options)
except PoolUnavailable as error:
    sys.exit(str(error))
"""
_TRY_GPU = """
import sys
import numpy as np, torch
from guided.kernel import apply_bitmask
if not torch.cuda.is_available():
    sys.exit("no CUDA device")
logits = torch.zeros(2, 264, device=sys.argv[1])
apply_bitmask(logits, np.zeros((2, 9), np.int32), [0, 1])
assert torch.isinf(logits).all()
"""


class Finding(NamedTuple):
    """The result of a check. If it is not ok, `text` says what to do too."""

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str


def doctor(**values: Any) -> None:
    """Check whether this machine can serve with these options, and say what to do. Exit status 1: it cannot."""
    failed = False
    for finding in examine(options_of(values)):
        failed |= finding.level == "error"
        typer.echo(f"{finding.level:8}{finding.subject}: {finding.text}")
    raise typer.Exit(failed)


doctor.__signature__ = SERVER_OPTIONS  # type: ignore[attr-defined]


def examine(options: ServeOptions) -> Iterator[Finding]:
    """Run all checks. Findings come as they are made; importing libraries takes seconds each."""
    cpus = available_cpus()
    here = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {cpus} CPUs"
    if not hasattr(os, "pidfd_open"):
        yield Finding("error", "system", f"{here}: the mask pool needs Linux 5.3; use --pool inline elsewhere")
    elif cpus < 2:
        yield Finding("warning", "system", f"{here}: the engine and the mask actors compete for it; use two or more")
    else:
        yield Finding("ok", "system", here)
    if options.pool == "ray":
        yield _ray(options.ray)
    yield from _backends()
    if options.load.device != "cpu":
        yield _gpu(options.load.device)


def _ray(options: RayPoolOptions) -> Finding:
    if _version("ray") is None:
        return Finding("error", "Ray", "not installed: pip install 'guided[server,ray]'")
    problem = None if options.address is None else _fails(_TRY_CLUSTER, json.dumps(asdict(options)))
    if problem is not None:
        return Finding("error", "Ray", problem)
    text = "a local one is started" if options.address is None else "the cluster has room for the pool"
    return Finding("ok", "Ray", text)


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _backends() -> Iterator[Finding]:
    for name in BACKENDS:
        subject = f"backend {name} {_version(_LIBRARIES.get(name, name)) or ''}".strip()
        problem = _fails(_TRY_BACKEND, name)
        if problem is None:
            yield Finding("ok", subject, "compiles")
        else:
            yield Finding("error", subject, f"{problem}: pip install --force-reinstall it, with constraints.txt")


def _gpu(device: str) -> Finding:
    problem = _fails(_TRY_GPU, "cuda" if device == "auto" else device)
    if problem is None:
        return Finding("ok", "GPU", f"the mask kernel runs; torch {_version('torch')}, Triton {_version('triton')}")
    if device == "auto" and problem == "no CUDA device":
        return Finding("ok", "GPU", f"{problem}; the CPU is used")
    advice = "torch may be a CPU build, a container needs --gpus all, and Triton a C compiler"
    return Finding("error", "GPU", f"the mask kernel does not run: {problem}: {advice}")


def _fails(code: str, *arguments: str) -> str | None:
    """Run code in a process of its own, because a broken library may crash. Return why it failed, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_SECONDS:g} s"
    if done.returncode == 0:
        return None
    last = done.stderr.strip().rpartition("\n")[2]
    return last or f"the process ended with status {done.returncode}"
