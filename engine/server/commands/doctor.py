"""`guided doctor`: checks whether this machine can run `guided serve` with the given options, and says what to do."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import typer

from engine.server.commands.parameters import SERVER_OPTIONS, options_of
from engine.server.options import ServeOptions
from guided.backends import BACKENDS
from guided.cpus import available_cpus

_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}
_LIBRARIES = {"outlines": "outlines_core"}
"""Packages with another name than their backend."""
_SECONDS = 120.0
"""Time limit of a check in a process of its own."""
_LEAST_FILES = 4096
_LEAST_DISK_BYTES = 1 << 30
_SOCKET_PATH_BYTES = 60
"""Longest temporary directory with which the paths of Ray's sockets are allowed."""

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
    cluster = Cluster.join(options.address)
    try:
        cluster.check_room(options)
    finally:
        cluster.leave()
except PoolUnavailable as error:
    sys.exit(str(error))
"""
_POOL_OPTIONS = ("address", "placement", "num_actors", "actor_cpus")
"""Those that say what a pool takes of a cluster."""
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


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str
    """What was found; with what to do if it is not ok."""


def doctor(**values: Any) -> None:
    """Check whether this machine can serve with these options, and say what to do. Exit status 1: it cannot."""
    failed = False
    for finding in examine(options_of(values)):
        failed |= finding.level == "error"
        level = typer.style(f"{finding.level:8}", fg=_COLOURS[finding.level])
        typer.echo(f"{level}{finding.subject}: {finding.text}")
    raise typer.Exit(failed)


doctor.__signature__ = SERVER_OPTIONS  # type: ignore[attr-defined]


def examine(options: ServeOptions) -> Iterator[Finding]:
    """Run all checks. Findings come as they are made; importing libraries takes seconds each."""
    checks: tuple[Callable[[ServeOptions], Iterator[Finding]], ...] = (
        *(_system, _open_files, _shared_memory, _ray, _backends, _device),
    )
    for check in checks:
        yield from check(options)


def _system(options: ServeOptions) -> Iterator[Finding]:
    cpus = available_cpus()
    here = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {cpus} CPUs"
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        yield Finding("error", "system", f"{here}: the mask pool needs Linux 5.3; use --pool inline elsewhere")
    elif cpus < 2:
        yield Finding("warning", "system", f"{here}: the engine and the mask actors compete for it; use two or more")
    else:
        yield Finding("ok", "system", here)


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _open_files(options: ServeOptions) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(_LEAST_FILES, 2 * options.connections.max_connections)
    if soft != resource.RLIM_INFINITY and soft < least:
        as_root = "" if hard == resource.RLIM_INFINITY or hard >= least else ", as root"
        yield Finding("warning", "limit of open files", f"{soft}; set ulimit -n {least}{as_root}")


def _shared_memory(options: ServeOptions) -> Iterator[Finding]:
    try:
        fd = os.memfd_create("guided-doctor")
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
        os.close(fd)
        yield Finding("ok", "shared memory", "memfds can be shared between processes; /dev/shm needs no size")
    except OSError as error:
        yield Finding("warning", "shared memory", f"{error.strerror}: mount /proc; until then masks travel over TCP")
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    if len(os.fsencode(directory)) > _SOCKET_PATH_BYTES:
        yield Finding("error", "temporary files", f"{directory} is too long for socket paths: set TMPDIR=/tmp")
    elif free < _LEAST_DISK_BYTES:
        yield Finding("warning", "temporary files", f"{directory} has {free >> 20} MiB free: Ray needs about 1 GiB")


def _ray(options: ServeOptions) -> Iterator[Finding]:
    if options.pool != "ray":
        return
    if _version("ray") is None:
        yield Finding("error", "Ray", "not installed: pip install 'guided[server,ray]'")
    elif options.ray.address is not None:
        given = {name: getattr(options.ray, name) for name in _POOL_OPTIONS}
        problem = _fails(_TRY_CLUSTER, json.dumps(given))
        text = f"the cluster at {options.ray.address} has room for the pool"
        yield Finding("ok", "Ray", text) if problem is None else Finding("error", "Ray", problem)
    elif options.ray.placement != "local":
        text = f"placement {options.ray.placement} needs a cluster: name it with --ray-address"
        yield Finding("error", "Ray", text)
    else:
        yield Finding("ok", "Ray", f"{_version('ray')}; a local one is started")


def _backends(options: ServeOptions) -> Iterator[Finding]:
    for name in BACKENDS:
        subject = f"backend {name} {_version(_LIBRARIES.get(name, name)) or ''}".strip()
        problem = _fails(_TRY_BACKEND, name)
        if problem is None:
            yield Finding("ok", subject, "compiles")
        else:
            yield Finding("error", subject, f"{problem}: pip install --force-reinstall it, with constraints.txt")


def _device(options: ServeOptions) -> Iterator[Finding]:
    device = options.load.device
    if device == "cpu":
        return
    problem = _fails(_TRY_GPU, "cuda" if device == "auto" else device)
    if problem is None:
        yield Finding("ok", "GPU", f"the mask kernel runs; torch {_version('torch')}, Triton {_version('triton')}")
    elif device == "auto" and problem == "no CUDA device":
        yield Finding("ok", "GPU", f"{problem}; the CPU is used")
    else:
        advice = "torch may be a CPU build, a container needs --gpus all, and Triton a C compiler"
        yield Finding("error", "GPU", f"the mask kernel does not run: {problem}: {advice}")


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
