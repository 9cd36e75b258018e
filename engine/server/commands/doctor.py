"""`guided doctor`: checks whether this machine can run `guided serve` with the given options, and says what to do."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import typer

from engine.server.commands.parameters import SERVER_OPTIONS, install_advice, options_of
from engine.server.commands.serve import listener_on
from engine.server.options import ServeOptions
from guided.backends import BACKENDS
from guided.process_resources import available_cpus

_SECONDS = 120.0
"""Time limit of a check in a separate process."""

_TRY_BACKEND = """
import sys
from guided import Constraint, InlinePool, Vocabulary
tokens = (b"</s>", *(bytes([byte]) for byte in range(256)), b"<pad>")
pool = InlinePool(Vocabulary(tokens, (0,), frozenset({0, 257}), 264))
pool.compile(Constraint.choice(["a"]), (sys.argv[1],)).result()
"""
_TRY_RAY = """
import json, sys
import ray
from actors.cluster import Cluster
from guided.errors import PoolUnavailable
from guided.pools.options import RayPoolOptions
options = RayPoolOptions(**json.loads(sys.argv[1]))
try:
    if options.address is not None:
        Cluster.join(options.address).check_room(options)
except PoolUnavailable as error:
    sys.exit(str(error))
"""
_TRY_SERVER = """
import engine.server.process
"""
_TRY_MODEL = """
import sys
from engine.model_loader import check_model
try:
    check_model(sys.argv[1], sys.argv[2] or None, int(sys.argv[3]) or None)
except (OSError, ValueError) as error:
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
    """The result of a check. If the result is not ok, `text` also says what to do."""

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
    """Run all checks and yield each finding at once, because importing a library takes seconds."""
    cpus = available_cpus()
    here = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {cpus} CPUs"
    if not hasattr(os, "pidfd_open"):
        yield Finding("error", "system", f"{here}: the mask pool needs Linux 5.3; use --pool inline elsewhere")
    elif cpus < 2:
        yield Finding("warning", "system", f"{here}: the engine and the mask actors compete for it; use two or more")
    else:
        yield Finding("ok", "system", here)
    yield _tried("server", "its packages are installed", "", _TRY_SERVER)
    yield _listening(options)
    if options.pool is None and options.ray.address is None and find_spec("ray") is None:
        text = "not installed: masks are computed in the server's process, without isolation"
        advice = install_advice("No module named 'ray'")
        yield Finding("warning", "Ray", f"{text}: {advice}")
    elif options.pool != "inline":
        given = json.dumps(asdict(options.ray))
        good = "a local one is started" if options.ray.address is None else "the cluster has room for the pool"
        yield _tried("Ray", good, "", _TRY_RAY, given)
    for name in BACKENDS:
        advice = "pip install --force-reinstall it, with constraints.txt"
        yield _tried(f"backend {name}", "compiles", advice, _TRY_BACKEND, name)
    revision = options.load.revision or ""
    length = str(options.engine.max_model_len or 0)
    yield _tried("model", "its architecture can be served", "", _TRY_MODEL, options.model_path, revision, length)
    device = options.load.device
    if device != "cpu":
        advice = "torch may be a CPU build, a container needs --gpus all, and Triton a C compiler"
        finding = _tried("GPU", "the mask kernel runs", advice, _TRY_GPU, "cuda" if device == "auto" else device)
        no_gpu = device == "auto" and finding.text.startswith("no CUDA device")
        yield Finding("ok", "GPU", "no CUDA device; the CPU is used") if no_gpu else finding


def _listening(options: ServeOptions) -> Finding:
    """Try to bind the port of the server."""
    try:
        with listener_on(options.host, options.port):
            return Finding("ok", "port", f"{options.port} is free")
    except OSError as error:
        return Finding("error", "port", str(error))


def _tried(subject: str, good: str, advice: str, code: str, *arguments: str) -> Finding:
    """Run code in a separate process, because a broken library may crash. `advice`: what to do if the code fails."""
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_SECONDS:g} s"
    else:
        if done.returncode == 0:
            return Finding("ok", subject, good)
        last_line = done.stderr.strip().rpartition("\n")[2]
        if "No module named" in last_line:
            advice = install_advice(last_line)
        problem = last_line or f"the process ended with status {done.returncode}"
    return Finding("error", subject, f"{problem}: {advice}" if advice else problem)
