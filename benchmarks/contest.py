"""Ways of masking side by side: each in a process of its own, the same rows, taking turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from tqdm import tqdm

from benchmarks.peers.loop import Samples, Slowness
from benchmarks.peers.rows import Document
from benchmarks.report import ROOT, fail
from benchmarks.slow_backend import SECONDS_VARIABLE
from benchmarks.workload import Tokens

__all__ = ["Contest", "Entry", "Race", "vllm_entry"]


@dataclass(frozen=True)
class Entry:
    """One way of masking that takes part."""

    label: str
    way: str
    """A name of `benchmarks.peers.host.WAYS`."""
    backends: frozenset[str]
    """Those that it can do."""
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)
    in_process: bool = False
    """Masks are computed in the engine's process."""


def vllm_entry(python: str | None) -> Entry | None:
    """vLLM's own path, where an interpreter that has vLLM was named; else one line that says what is missing."""
    if python is None:
        print("vLLM is left out: name an interpreter that has it with --vllm-python (docs/benchmarks.md)")
        return None
    if not os.access(python, os.X_OK):
        fail(f"there is no interpreter {python}: --vllm-python takes one that has vLLM (docs/benchmarks.md)")
    probe = subprocess.run(
        [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"], check=False
    )
    if probe.returncode:
        fail(f"{python} has no vLLM: make an environment for it as docs/benchmarks.md says")
    backends = frozenset({"llguidance", "xgrammar", "outlines", "lm-format-enforcer"})
    return Entry("vLLM's manager", "vllm", backends, python, in_process=True)


class Contest:
    """The processes of some entries, for the length of a `with` block."""

    def __init__(
        self, entries: Sequence[Entry], tokens: Tokens, *, threads: int = 1, slow_seconds: float = 0.2
    ) -> None:
        self.entries = list(entries)
        self._tokens = tokens
        self._threads = threads
        self._slow_seconds = slow_seconds
        self._processes: dict[str, _Process] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Contest:
        with contextlib.ExitStack() as stack:
            for entry in self.entries:
                process = stack.enter_context(_Process(entry, self._slow_seconds))
                self._processes[entry.label] = process
                vocabulary = {"vocabulary": str(self._tokens.path), "width": self._tokens.width}
                options = {**vocabulary, "stop": self._tokens.stop, "threads": self._threads, **entry.options}
                process.send(do="start", way=entry.way, options=options)
            for entry in tqdm(self.entries, desc="starting", leave=False, disable=None):
                self._processes[entry.label].answer()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def load(self, backend: str, documents: Sequence[Document]) -> tuple[list[Entry], list[Document]]:
        """Have the documents compiled by everybody who can do `backend`.

        Returns:
            Those entries, and the documents that all of them can do.
        """
        able = [entry for entry in self.entries if backend in entry.backends]
        # Our Ray pool first: what takes too long or too much is ended there, and the others are spared. These compile
        # beside each other: nothing is measured yet.
        first = [entry for entry in able if entry.way == "ray"]
        left = list(documents)
        for group in (first, [entry for entry in able if entry not in first]):
            fields = [dataclasses.asdict(one) for one in left]
            for entry in group:
                self._processes[entry.label].send(do="load", backend=backend, documents=fields)
            for entry in tqdm(group, desc=f"compiling for {backend}", leave=False, disable=None):
                refused = self._processes[entry.label].answer()["refused"]
                left = [one for one in left if one.name not in refused]
        return able, left

    def race(
        self,
        entries: Sequence[Entry],
        documents: Sequence[Document],
        batch: int,
        forward_seconds: float,
        slow: Slowness | None = None,
        pinned: Sequence[Document] = (),
    ) -> Race:
        """Start the same rows in each of `entries`."""
        names = [document.name for document in documents]
        for entry in entries:
            self._processes[entry.label].ask(
                do="begin",
                batch=batch,
                documents=names,
                pinned=[document.name for document in pinned],
                slow=dataclasses.asdict(slow or Slowness()),
                forward_seconds=forward_seconds,
            )
        return Race([(entry, self._processes[entry.label]) for entry in entries])

    def pid(self, entry: Entry) -> int:
        """The process that an entry runs in: the engine's."""
        return self._processes[entry.label].pid


_WARM_UP = 5


class Race:
    """Rows on their way, in several processes that take turns: one computes while the others wait."""

    def __init__(self, running: Sequence[tuple[Entry, _Process]]) -> None:
        self._running = running

    def run(
        self,
        steps: int | Mapping[str, int],
        rounds: int,
        bar: tqdm[Any],
        seconds: float | None = None,
    ) -> dict[str, Samples]:
        """`steps` steps of each (or by label), in `rounds` turns. By labels.

        A turn begins with some that don't count: who has waited for the others finds its caches cold, which no engine
        under load does. Who would take more than `seconds` for them does fewer: as many as begin in that time, one a
        turn at the least.
        """
        samples = {entry.label: Samples() for entry, _ in self._running}
        share = None if seconds is None else seconds / rounds
        for _ in range(rounds):
            for entry, process in self._running:
                bar.set_postfix_str(entry.label, refresh=False)
                wanted = steps if isinstance(steps, int) else steps[entry.label]
                turn = -(-wanted // rounds)
                process.ask(do="run", steps=_WARM_UP, seconds=share)
                answer = process.ask(do="run", steps=turn, seconds=share)
                for name, values in answer.items():
                    getattr(samples[entry.label], name).extend(values)
                bar.update(turn)
        for _, process in self._running:
            process.ask(do="end")
        return samples


class _Process:
    """A `benchmarks.peers.host`."""

    def __init__(self, entry: Entry, slow_seconds: float) -> None:
        self._label = entry.label
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        paths = [str(ROOT)] if entry.way == "vllm" else [str(ROOT / "benchmarks" / "startup"), str(ROOT)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            SECONDS_VARIABLE: str(slow_seconds),
        }
        if entry.way == "vllm":
            environment |= {
                "VLLM_TARGET_DEVICE": "cpu",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }
        self._process = subprocess.Popen(
            [entry.python, "-m", "benchmarks.peers.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> _Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, **command: Any) -> Any:
        self.send(**command)
        return self.answer()

    def send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else self._died()
        if "error" in answer:
            raise RuntimeError(f"{self._label}: {answer['error']}\n{self._tail()}")
        return answer

    def _died(self) -> Any:
        raise RuntimeError(f"{self._label}: its process ended\n{self._tail()}")

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")[-3000:]
