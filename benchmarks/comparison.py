"""Compare ways of masking: each runs in its own process on the same rows, and the processes take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from benchmarks.child_process import SINGLE_THREADED, VLLM_ON_CPU, JsonProcess
from benchmarks.injected_faults import environment
from benchmarks.peers.loop import Samples
from benchmarks.peers.rows import Document
from benchmarks.report import ROOT, fail
from benchmarks.workload import Tokens


@dataclass(frozen=True)
class Candidate:
    """One way of masking that takes part in a comparison."""

    label: str
    way: str
    """See `benchmarks.peers.host.way_of`."""
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)
    root: Path = ROOT
    """The checkout of `guided` and `actors` that it measures."""


def vllm_candidate(python: str | None) -> Candidate | None:
    """Return vLLM's own path. Without an interpreter that has vLLM, print a line and return None."""
    if python is None:
        print("vLLM is left out: --vllm-python takes an interpreter that has it (docs/benchmarks.md)")
        return None
    if not os.access(python, os.X_OK):
        fail(f"--vllm-python: {python} is not an interpreter (docs/benchmarks.md)")
    probe = subprocess.run(
        [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"], check=False
    )
    if probe.returncode:
        fail(f"--vllm-python: {python} has no vLLM (docs/benchmarks.md)")
    return Candidate("vLLM's manager", "vllm", python)


_WARM_UP = 5


class Comparison:
    """The processes of the candidates. Use it in a `with` block."""

    def __init__(self, candidates: Sequence[Candidate], tokens: Tokens) -> None:
        self.candidates = list(candidates)
        self._tokens = tokens
        self._processes: dict[str, JsonProcess] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Comparison:
        with contextlib.ExitStack() as stack:
            for candidate in self.candidates:
                process = stack.enter_context(_process(candidate, stack))
                self._processes[candidate.label] = process
                vocabulary = {"vocabulary": str(self._tokens.path), "width": self._tokens.width}
                options = {**vocabulary, "stop": self._tokens.stop, **candidate.options}
                process.send({"do": "start", "way": candidate.way, "options": options})
            for candidate in tqdm(self.candidates, desc="starting", leave=False, disable=None):
                self._processes[candidate.label].answer()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def load(self, backend: str, documents: Sequence[Document]) -> list[Document]:
        """Compile the documents in all candidates. Returns those that all of them can compile."""
        # Our Ray pool compiles first. It ends what takes too long or too much memory, and the others skip it. They then
        # compile at the same time, because nothing is measured yet.
        first = [candidate for candidate in self.candidates if candidate.way == "ray"]
        left = list(documents)
        for group in (first, [candidate for candidate in self.candidates if candidate not in first]):
            fields = [dataclasses.asdict(one) for one in left]
            for candidate in group:
                self._processes[candidate.label].send({"do": "load", "backend": backend, "documents": fields})
            for candidate in tqdm(group, desc=f"compiling for {backend}", leave=False, disable=None):
                refused = self._processes[candidate.label].answer()["refused"]
                left = [one for one in left if one.name not in refused]
        return left or fail(f"{backend}: no schema of {len(documents)} compiles in every way of masking")

    def run(
        self,
        documents: Sequence[Document],
        batch: int,
        forward_seconds: float,
        steps: int | Mapping[str, int],
        rounds: int,
        bar: tqdm[Any],
        *,
        seconds: float | None = None,
        pinned: Sequence[Document] = (),
    ) -> dict[str, Samples]:
        """Run the same rows in each candidate, in turns: one computes while the others wait. Returns samples by label.

        A turn starts with a few steps that are not counted: after the wait the caches are cold, unlike in an engine
        under load.

        Args:
            steps: steps per candidate, or steps by label.
            rounds: turns per candidate.
            seconds: time limit per candidate. A candidate stops at it, but runs at least one step per turn.
            pinned: documents that the first row writes instead.
        """
        names, first = ([document.name for document in some] for some in (documents, pinned))
        begin = {"do": "begin", "batch": batch, "documents": names, "pinned": first, "forward_seconds": forward_seconds}
        for process in self._processes.values():
            process.ask(begin)
        samples = {label: Samples() for label in self._processes}
        share = None if seconds is None else seconds / rounds
        for _ in range(rounds):
            for label, process in self._processes.items():
                bar.set_postfix_str(label, refresh=False)
                turn = -(-(steps if isinstance(steps, int) else steps[label]) // rounds)
                process.ask({"do": "run", "steps": _WARM_UP, "seconds": share})
                for name, values in process.ask({"do": "run", "steps": turn, "seconds": share}).items():
                    getattr(samples[label], name).extend(values)
                bar.update(turn)
        for process in self._processes.values():
            process.ask({"do": "end"})
        return samples


def _process(candidate: Candidate, stack: contextlib.ExitStack) -> JsonProcess:
    """Start a `benchmarks.peers.host`: this checkout's, with the candidate's `guided` and `actors`."""
    root = candidate.root
    if root != ROOT:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="guided-")))
        for package, where in {"guided": root, "actors": root, "benchmarks": ROOT}.items():
            (folder / package).symlink_to(where / package)
        root = folder
    variables = SINGLE_THREADED | (VLLM_ON_CPU if candidate.way == "vllm" else {}) | environment(root)
    return JsonProcess(
        "benchmarks.peers.host", label=candidate.label, environment=variables, python=candidate.python, root=root
    )
