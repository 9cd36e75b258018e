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
from pathlib import Path
from typing import Any, Literal

import typer

from engine.server.commands.parameters import SERVER_OPTIONS, options_of
from engine.server.commands.serve import listener_on
from engine.server.options import ServeOptions
from guided.backends import BACKENDS
from guided.cpus import available_cpus

_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}
_PACKAGES = ("torch", "transformers", "fastapi", "uvicorn", "ray")
_LIBRARIES = {"outlines": "outlines_core"}
"""Packages with another name than their backend."""
_SECONDS = 120.0
_LEAST_FILES, _LEAST_PROCESSES = 4096, 4096
_LEAST_BYTES = 2 << 30
_LEAST_DISK_BYTES = 1 << 30
_SOCKET_PATH_BYTES = 60
"""Longest temporary directory with which the paths of the actors' sockets are allowed."""

_TRY_BACKEND = """
import sys
from guided import Constraint, InlinePool, Vocabulary
tokens = (b"</s>", *(bytes([byte]) for byte in range(256)), b"<pad>")
pool = InlinePool(Vocabulary(tokens, (0,), frozenset({0, 257}), 264))
pool.compile(Constraint.regex("ab+"), (sys.argv[1],)).result()
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
_FIND_GPU = "import torch, sys; sys.exit(not torch.cuda.is_available() and 'no CUDA device')"
_TRY_GPU = """
import sys
import numpy as np, torch
from guided.kernel import apply_bitmask
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
        *(_system, _packages, _limits, _memory, _ports, _shared_memory, _ray, _backends, _device),
    )
    for check in checks:
        yield from check(options)


def _system(options: ServeOptions) -> Iterator[Finding]:
    cpus, machine = available_cpus(), os.cpu_count() or 1
    here = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {cpus} CPUs of {machine}"
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        yield Finding("error", "system", f"{here}: the mask pool needs Linux 5.3; use --pool inline elsewhere")
    elif cpus < 2:
        yield Finding("warning", "system", f"{here}: the engine and the mask actors compete for it; use two or more")
    else:
        yield Finding("ok", "system", here)


def _packages(options: ServeOptions) -> Iterator[Finding]:
    found = {name: _version(name) for name in _PACKAGES}
    missing = [name for name, text in found.items() if text is None and (options.pool == "ray" or name != "ray")]
    if missing:
        yield Finding("error", "packages", f"{', '.join(missing)} missing: pip install 'guided[server,ray]'")
    yield Finding("ok", "packages", ", ".join(f"{name} {text}" for name, text in found.items() if text is not None))


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _limits(options: ServeOptions) -> Iterator[Finding]:
    for kind, letter, subject, least in (
        (resource.RLIMIT_NOFILE, "n", "open files", max(_LEAST_FILES, 2 * options.connections.max_connections)),
        (resource.RLIMIT_NPROC, "u", "processes and threads", _LEAST_PROCESSES),
    ):
        soft, hard = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and soft < least:
            as_root = "" if hard == resource.RLIM_INFINITY or hard >= least else ", as root"
            yield Finding("warning", f"limit of {subject}", f"{soft}; set ulimit -{letter} {least}{as_root}")
        else:
            yield Finding("ok", f"limit of {subject}", "none" if soft == resource.RLIM_INFINITY else str(soft))


def _memory(options: ServeOptions) -> Iterator[Finding]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    text = f"{available >> 20} MiB available"
    if available < _LEAST_BYTES:
        text += f": the embedded model and two mask actors need about {_LEAST_BYTES >> 20} MiB"
    yield Finding("warning" if available < _LEAST_BYTES else "ok", "memory", text)


def _ports(options: ServeOptions) -> Iterator[Finding]:
    try:
        with listener_on(options.host, options.port, "--port"):
            yield Finding("ok", "port", f"{options.host} port {options.port or 'any'} is free")
    except OSError as error:
        yield Finding("error", "port", str(error))


def _shared_memory(options: ServeOptions) -> Iterator[Finding]:
    try:
        fd = os.memfd_create("guided-doctor")
        opened = os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR)
        os.close(opened)
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
    else:
        yield Finding("ok", "temporary files", f"{directory}, {free >> 30} GiB free")


def _ray(options: ServeOptions) -> Iterator[Finding]:
    if options.pool != "ray":
        return
    if options.ray.address is not None:
        given = {name: getattr(options.ray, name) for name in _POOL_OPTIONS}
        problem = _fails(_TRY_CLUSTER, json.dumps(given))
        text = f"the cluster at {options.ray.address} has room for the pool"
        yield Finding("ok", "Ray", text) if problem is None else Finding("error", "Ray", problem)
    elif options.ray.placement != "local":
        text = f"placement {options.ray.placement} needs a cluster: name it with --ray-address"
        yield Finding("error", "Ray", text)
    else:
        yield Finding("ok", "Ray", "a local Ray is started")


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
    if (problem := _fails(_FIND_GPU)) is not None:
        advice = "torch may be a CPU build" if shutil.which("nvidia-smi") else "start containers with --gpus all"
        if device.startswith("cuda"):
            yield Finding("error", "GPU", f"{problem}: {advice}")
        else:
            yield Finding("ok", "GPU", f"{problem} ({advice}); the CPU is used")
        return
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        yield Finding("error", "GPU", "Triton needs a C compiler: apt-get install gcc libc6-dev")
    elif (problem := _fails(_TRY_GPU, "cuda" if device == "auto" else device)) is not None:
        yield Finding("error", "GPU", f"the mask kernel does not run: {problem}")
    else:
        yield Finding("ok", "GPU", f"the mask kernel runs; Triton {_version('triton')}")


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
