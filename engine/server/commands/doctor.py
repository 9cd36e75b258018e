"""`guided doctor`: checks whether this machine can run `guided serve` with the given
options, and says what to do."""

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
from guided.masks.resources import available_cpus

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
import json, sys, threading
import ray
from actors.cluster import Cluster
from guided.errors import PoolUnavailable
from guided.pools.options import RayPoolOptions
options = RayPoolOptions(**json.loads(sys.argv[1]))
try:
    if options.address is not None:
        Cluster.join(options.address).check_room(options, threading.Event())
except PoolUnavailable as error:
    sys.exit(str(error))
"""
_TRY_SERVER = """
import engine.server.process
"""
_TRY_MODEL = """
import sys
from engine.model.loader import check_model
try:
    check_model(sys.argv[1], sys.argv[2] or None, int(sys.argv[3]) or None)
except (OSError, ValueError) as error:
    sys.exit(str(error))
"""
_TRY_GPU = """
import sys
import numpy as np, torch
from guided.processors.kernel import apply_bitmask
if torch.version.cuda is None:
    sys.exit("no CUDA device: this torch is a build for CPUs")
if not torch.cuda.is_available():
    sys.exit(f"no CUDA device: its driver is missing, hidden, or too old for torch's CUDA {torch.version.cuda}")
device = torch.device(sys.argv[1])
logits = torch.zeros(2, 264, device=device)
apply_bitmask(logits, np.zeros((2, 9), np.int32), [0, 1])
assert torch.isinf(logits).all()
import engine.model.paged_kernel
row = torch.ones(1, 2, 16, dtype=torch.bfloat16, device=device)
keys = row.repeat(16, 1, 1)
starts = torch.arange(2, device=device)
places = torch.zeros(1, 1, dtype=torch.int64, device=device)
out = engine.model.paged_kernel.attend(row, keys, keys, None, places[0], starts, places, 16, 1.0, None, 16, False)
assert (out == 1).all()
print(f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}: the kernels of attention and masks run")
"""


class Finding(NamedTuple):
    """The result of a check. If the result is not ok, `text` also says what to do."""

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str


def doctor(**values: Any) -> None:
    """Check whether this machine can serve with these options, and say what to do. Exit
    status 1: it cannot."""
    failed = False
    for finding in examine(options_of(values)):
        failed |= finding.level == "error"
        typer.echo(f"{finding.level:8}{finding.subject}: {finding.text}")
    raise typer.Exit(failed)


doctor.__signature__ = SERVER_OPTIONS  # type: ignore[attr-defined]


def examine(options: ServeOptions) -> Iterator[Finding]:
    """Run all checks and yield each finding at once, because importing a library takes
    seconds."""
    cpus = available_cpus()
    here = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {cpus} CPUs"
    if not hasattr(os, "pidfd_open"):
        yield Finding(
            "error",
            "system",
            f"{here}: the mask pool needs Linux 5.3; use --pool inline elsewhere",
        )
    elif cpus < 2:
        yield Finding(
            "warning",
            "system",
            f"{here}: the engine and the mask actors compete for it; use two or more",
        )
    else:
        yield Finding("ok", "system", here)
    yield _tried("server", "its packages are installed", "", _TRY_SERVER)
    yield _listening(options)
    if (
        options.pool is None
        and options.ray.address is None
        and find_spec("ray") is None
    ):
        text = "not installed: masks are computed in the server's process, without isolation"
        advice = install_advice("No module named 'ray'")
        yield Finding("warning", "Ray", f"{text}: {advice}")
    elif options.pool != "inline":
        given = json.dumps(asdict(options.ray))
        if options.ray.address is None:
            good = "a local one is started"
        else:
            good = "the cluster has room for the pool"
        yield _tried("Ray", good, "", _TRY_RAY, given)
    for name in BACKENDS:
        advice = "pip install --force-reinstall it, with constraints.txt"
        yield _tried(f"backend {name}", "compiles", advice, _TRY_BACKEND, name)
    revision = options.load.revision or ""
    length = str(options.engine.max_model_len or 0)
    yield _tried(
        "model",
        "its architecture can be served",
        "",
        _TRY_MODEL,
        options.model_path,
        revision,
        length,
    )
    device = options.load.device
    if device != "cpu":
        advice = (
            "a container needs --gpus all, and Triton a C compiler (docs/install.md)"
        )
        finding = _tried("GPU", "", advice, _TRY_GPU, device.replace("auto", "cuda"))
        if device == "auto" and finding.text.startswith("no CUDA device"):
            finding = Finding(
                "ok",
                "GPU",
                f"{finding.text.removesuffix(f': {advice}')}; the CPU is used",
            )
        elif finding.level == "ok" and find_spec("liger_kernel") is None:
            yield Finding(
                "warning",
                "fused kernels",
                "not installed, so decoding is slower: pip install '.[gpu]'",
            )
        yield finding


def _listening(options: ServeOptions) -> Finding:
    """Try to bind the port of the server."""
    try:
        with listener_on(options.host, options.port):
            return Finding("ok", "port", f"{options.port} is free")
    except OSError as error:
        return Finding("error", "port", str(error))


def _tried(subject: str, good: str, advice: str, code: str, *arguments: str) -> Finding:
    """Run code in a separate process, because a broken library may crash.

    Args:
        good: text of the finding if the code succeeds. Empty: the output of the code.
        advice: what to do if the code fails.
    """
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_SECONDS:g} s"
    else:
        if done.returncode == 0:
            return Finding("ok", subject, good or done.stdout.strip())
        last_line = done.stderr.strip().rpartition("\n")[2]
        if "No module named" in last_line:
            advice = install_advice(last_line)
        problem = last_line or f"the process ended with status {done.returncode}"
    if advice:
        problem += f": {advice}"
    return Finding("error", subject, problem)
