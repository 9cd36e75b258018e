"""Child processes that read commands and write answers as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.report import ROOT

SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
VLLM_ON_CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_STOP_SECONDS = 60.0


def answer_writer() -> Callable[[Any], None]:
    """In a child: return a function that writes an answer to stdout. What libraries print to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return write


def log_tail(log: IO[bytes], characters: int = 3000) -> str:
    """Return the end of what a child printed."""
    log.seek(0)
    return log.read().decode("utf-8", "replace")[-characters:]


class JsonProcess:
    """A child process that answers each command, one line of JSON each way. Use it in a `with` block.

    Args:
        module: run with `python -m`, with `arguments`.
        label: names the process in errors.
        environment: variables in addition to this process's.
        root: the checkout that it runs in.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        label: str,
        environment: Mapping[str, str],
        python: str = sys.executable,
        root: Path = ROOT,
    ) -> None:
        self._label = label
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=root,
            env={**os.environ, **environment},
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> JsonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, command: Any) -> Any:
        """Send a command and wait for its answer."""
        self.send(command)
        return self.answer()

    def send(self, command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise("the process ended")

    def answer(self) -> Any:
        """Wait for the next answer. Raises `RuntimeError` with the end of the log if the process failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            self._raise(answer["error"])
        return answer

    def _raise(self, message: str) -> None:
        raise RuntimeError(f"{self._label}: {message}\n{log_tail(self._log)}")
