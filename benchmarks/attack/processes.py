"""Attacks on the server's processes, ports, files and surroundings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.attack.case import Setup, Target, case
from benchmarks.attack.connections import KEY, WITH_KEY
from benchmarks.processes import COMPILE_ACTOR, FORK_SERVER

RECOVERY_SECONDS = 60.0
LOOPBACK = ("127.", "::1", "::ffff:127.")
HEAD = "Ray: gcs_server"
RAYLET = ("Ray: raylet",)
AGENT = ("Ray: DashboardAgent", "Ray: agent")
RUNTIME_ENV_AGENT = ("Ray: RuntimeEnvAgent", "Ray: runtime_env")


def _signal(target: Target, kinds: Sequence[str], number: signal.Signals) -> list[int]:
    pids = target.server.pids(*kinds)
    target.expect(pids, f"there is no process {' or '.join(kinds)}")
    for pid in pids:
        os.kill(pid, number)
    return pids


@case("6", seconds=80, restarts=True, slow=True)
async def raylet_terminated(target: Target) -> None:
    """SIGTERM to the raylet."""
    _signal(target, RAYLET, signal.SIGTERM)
    await target.recovered(RECOVERY_SECONDS)


@case("6", seconds=80, restarts=True, slow=True)
async def dashboard_agent_killed(target: Target) -> None:
    """SIGKILL to Ray's dashboard agent."""
    _signal(target, AGENT, signal.SIGKILL)
    await asyncio.sleep(10)
    await target.recovered(RECOVERY_SECONDS)


@case("6", seconds=80, restarts=True, slow=True)
async def runtime_env_agent_killed(target: Target) -> None:
    """SIGKILL to Ray's runtime-env agent."""
    _signal(target, RUNTIME_ENV_AGENT, signal.SIGKILL)
    await asyncio.sleep(10)
    await target.recovered(RECOVERY_SECONDS)


@case("13", seconds=80, restarts=True, slow=True)
async def raylet_killed(target: Target) -> None:
    """SIGKILL to the raylet: time until a 503, and until recovery."""
    _signal(target, RAYLET, signal.SIGKILL)
    await target.recovered(RECOVERY_SECONDS)


async def _kill_each(target: Target, *kinds: str) -> None:
    """Kill one kind of process after the other, and wait for the recovery from each."""
    for kind in kinds:
        target.notes.append(f"SIGKILL to {kind}")
        _signal(target, (kind,), signal.SIGKILL)
        await asyncio.sleep(2)
        await target.recovered(RECOVERY_SECONDS, whole=kind != HEAD)


@case("new", seconds=190, restarts=True, slow=True)
async def ray_killed(target: Target) -> None:
    """SIGKILL to Ray's GCS, its driver process and its raylet. Without its GCS it goes on until an actor is needed."""
    await _kill_each(target, HEAD, "Ray: driver", *RAYLET)


@case("new", seconds=190, restarts=True, slow=True)
async def compilation_killed(target: Target) -> None:
    """SIGKILL to the compile actor and to the processes that compile; SIGSTOP to the compile actor."""
    await _kill_each(target, COMPILE_ACTOR, FORK_SERVER)
    for pid in _signal(target, (COMPILE_ACTOR,), signal.SIGSTOP):
        try:
            await target.recovered(RECOVERY_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@case("15", seconds=70, restarts=True, slow=True)
async def actors_stopped(target: Target) -> None:
    """SIGSTOP to all mask actors under load."""
    body = {"prompt": "a", "regex": "[a-z ]{400}", "max_tokens": 400, "stream": False}
    load = asyncio.create_task(target.posts(*[body] * 20, limit=40))
    await asyncio.sleep(0.5)
    pids = _signal(target, ("mask actor",), signal.SIGSTOP)
    try:
        await load
        await target.recovered(25)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        found = process.net_connections("tcp")
        return [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]
    return []


@case("7")
async def port_scan(target: Target) -> None:
    """Connect to every port on which the server's own process listens, HTTP excepted, with what strangers send."""
    ports = [each for each in _listening(psutil.Process(target.server.process.pid)) if each[1] != target.address[1]]
    target.notes.append(f"ports of the server's process besides HTTP: {len(ports)}")
    before = await _restarts(target)
    for _ in range(5):
        for host, port in ports:
            host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
            for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", secrets.token_bytes(1000)):
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(host, port)
                    writer.write(garbage)
                    await asyncio.sleep(0.02)
                    writer.transport.abort()
    await asyncio.sleep(2)
    restarts = await _restarts(target) - before
    target.expect(restarts == 0, f"{restarts} restarts of actors")


async def _restarts(target: Target) -> int:
    pool = (await target.http.get("/health")).json()["pool"]
    return sum(actor["restarts"] for actor in pool["actors"])


@case("14", setup=WITH_KEY)
async def exposure(target: Target) -> None:
    """The key in the environment of other processes, the mode of token files, metrics beyond loopback."""
    processes = [each for each in target.server.processes() if each[1].pid != target.server.process.pid]
    holders: set[str] = set()
    for kind, process in processes:
        with contextlib.suppress(OSError):
            if KEY.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                holders.add(kind)
    target.expect(not holders, f"GUIDED_API_KEY is in the environment of {', '.join(sorted(holders))}")
    for path in set(_token_files(processes)) or {Path.home() / ".ray" / "auth_token"}:
        if path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
            target.expect(mode & 0o077 == 0, f"{path.name} of Ray has mode {mode:04o}")
    ports = [(kind, *each) for kind, process in processes for each in _listening(process)]
    beyond = [(kind, port) for kind, host, port in ports if not host.startswith(LOOPBACK)]
    target.notes.append(f"{len(beyond)} ports of Ray beyond loopback")
    for kind, port in beyond:
        with contextlib.suppress(httpx.HTTPError):
            answer = await target.http.get(f"http://127.0.0.1:{port}/metrics", timeout=2)
            target.expect(answer.status_code != 200, f"{kind}: /metrics on all addresses without a token")


def _token_files(processes: Sequence[tuple[str, psutil.Process]]) -> Iterator[Path]:
    for _, process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            if path := process.environ().get("RAY_AUTH_TOKEN_PATH"):
                yield Path(path)


def _no_namespaces() -> str | None:
    done = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "needs unprivileged mount namespaces (unshare -rm)"


def _with_tmpfs(folder: str, size: str, **variables: str) -> Setup:
    """Return a server with a small file system of its own on an existing folder."""
    mount = f'mount -t tmpfs -o size={size} tmpfs {folder} && exec "$@"'
    return Setup(prefix=("unshare", "-rm", "env", *(f"{k}={v}" for k, v in variables.items()), "sh", "-c", mount, "sh"))


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    """Fill a file system."""
    path = folder / "full"
    try:
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while file.write(b"0" * (1 << 16)):
                pass
        yield
    finally:
        with contextlib.suppress(OSError):  # it is gone with the server
            path.unlink()


@case("held", setup=_with_tmpfs("/mnt", "400m", TMPDIR="/mnt"), unable=_no_namespaces)
async def full_disk(target: Target) -> None:
    """No space left in the folder of temporary files."""
    with _full(Path(f"/proc/{target.server.process.pid}/root/mnt")):
        for number in range(20):
            await target.post({"prompt": "a", "regex": f"[a-z]{{3}}{number}{time.monotonic_ns()}", "max_tokens": 30})


@case("held", seconds=50, setup=_with_tmpfs("/dev/shm", "64m"), unable=_no_namespaces)
async def small_shared_memory(target: Target) -> None:
    """A /dev/shm of 64 MB, as in a container, with large choices."""
    choices = [[f"{number:05}{each:035}" for each in range(8_000)] for number in range(6)]
    await target.posts(*({"prompt": "a", "choice": each, "max_tokens": 40} for each in choices), limit=40)
