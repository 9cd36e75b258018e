"""Compare ways of masking: each runs in its own process on the same rows, and the
processes take turns."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.child_process import SINGLE_THREADED, VLLM_ON_CPU, ChildProcess
from benchmarks.injected_faults import environment
from benchmarks.peers.loop import Samples
from benchmarks.peers.rows import Document
from benchmarks.report import ROOT, fail
from benchmarks.workload import Tokens


@dataclass(frozen=True)
class Candidate:
    """A way of masking in a comparison."""

    label: str
    way: str
    """See `benchmarks.peers.host.way_of`."""
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)
    root: Path = ROOT
    """The measured checkout of `guided` and `actors`."""


def vllm_candidate(python: str | None) -> Candidate | None:
    """Return the candidate of vLLM's own masks. Without an interpreter with vLLM, print
    a line and return None."""
    if python is None:
        print(
            "vLLM is left out: --vllm-python takes an interpreter that has it (docs/benchmarks.md)"
        )
        return None
    if not os.access(python, os.X_OK):
        fail(f"--vllm-python: {python} is not an interpreter (docs/benchmarks.md)")
    probe = subprocess.run(
        [
            python,
            "-c",
            "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)",
        ],
        check=False,
    )
    if probe.returncode:
        fail(f"--vllm-python: {python} has no vLLM (docs/benchmarks.md)")
    return Candidate("vLLM's manager", "vllm", python)


_WARM_UP = 5
FORWARD_SECONDS = 0.015
"""Duration of the simulated forward pass."""


@contextlib.contextmanager
def started(candidates: Sequence[Candidate], tokens: Tokens) -> Iterator[Comparison]:
    """Start the processes of the candidates, which end with the block."""
    with contextlib.ExitStack() as stack:
        processes = {
            one.label: stack.enter_context(_process(one, stack)) for one in candidates
        }
        vocabulary = {
            "vocabulary": str(tokens.path),
            "width": tokens.width,
            "stop": tokens.stop,
        }
        for one in candidates:
            processes[one.label].send(
                "start", way=one.way, options={**vocabulary, **one.options}
            )
        for process in tqdm(
            processes.values(), desc="starting", leave=False, disable=None
        ):
            process.result()
        yield Comparison(candidates, processes)


class Comparison:
    """Candidates with running processes."""

    def __init__(
        self, candidates: Sequence[Candidate], processes: Mapping[str, ChildProcess]
    ) -> None:
        self.candidates = list(candidates)
        self._processes = processes

    def load(self, backend: str, documents: Sequence[Document]) -> list[Document]:
        """Compile the documents in all candidates. Returns those that all of them can
        compile."""
        # The Ray pool compiles first: it ends compilations that take too long or too
        # much memory, and the other ways skip these documents. The other ways then
        # compile at the same time, because nothing is measured yet.
        first = [candidate for candidate in self.candidates if candidate.way == "ray"]
        left = list(documents)
        for group in (
            first,
            [candidate for candidate in self.candidates if candidate not in first],
        ):
            for candidate in group:
                self._processes[candidate.label].send(
                    "load", backend=backend, documents=left
                )
            for candidate in tqdm(
                group, desc=f"compiling for {backend}", leave=False, disable=None
            ):
                refused = self._processes[candidate.label].result()
                left = [one for one in left if one.name not in refused]
        return left or fail(
            f"{backend}: no schema of {len(documents)} compiles in every way of masking"
        )

    def run(
        self,
        documents: Sequence[Document],
        batch: int,
        steps: int,
        rounds: int,
        bar: tqdm[Any],
        *,
        seconds: float | None = None,
        pinned: Sequence[Document] = (),
    ) -> dict[str, Samples]:
        """Run the same rows in each candidate, in turns: the other candidates wait.
        Returns samples by label.

        A turn starts with a few steps that are not counted, because the caches are cold
        after the wait.

        Args:
            steps: steps per candidate.
            rounds: turns per candidate.
            seconds: time limit per candidate. A candidate runs at least one step per
                turn.
            pinned: documents that the first row writes instead.
        """
        for process in self._processes.values():
            process.call(
                "begin",
                batch=batch,
                documents=documents,
                pinned=pinned,
                forward_seconds=FORWARD_SECONDS,
            )
        samples = {label: Samples() for label in self._processes}
        share = None if seconds is None else seconds / rounds
        for _ in range(rounds):
            for label, process in self._processes.items():
                bar.set_postfix_str(label, refresh=False)
                turn = -(-steps // rounds)
                process.call("run", steps=_WARM_UP, seconds=share)
                samples[label].extend(process.call("run", steps=turn, seconds=share))
                bar.update(turn)
        for process in self._processes.values():
            process.call("end")
        return samples


def _process(candidate: Candidate, stack: contextlib.ExitStack) -> ChildProcess:
    """Start a `benchmarks.peers.host`: this checkout's, with the candidate's `guided`
    and `actors`."""
    root = candidate.root
    if root != ROOT:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="guided-"))
        )
        for package, where in {
            "guided": root,
            "actors": root,
            "benchmarks": ROOT,
        }.items():
            (folder / package).symlink_to(where / package)
        root = folder
    variables = (
        SINGLE_THREADED
        | (VLLM_ON_CPU if candidate.way == "vllm" else {})
        | environment(root)
    )
    return ChildProcess(
        "benchmarks.peers.host", candidate.label, variables, candidate.python, root
    )
