"""Run child processes, also in other environments, that call a method of an object for
each message."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
VLLM_ON_CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_STOP_SECONDS = 60.0


def serve(target: Any) -> None:
    """Call a method of `target` for each message, in a child, until the parent closes
    the pipe."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    pipe: Connection[Any, Any] = Connection(descriptor)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(target, name)(**arguments), None))
        except Exception as error:
            traceback.print_exc()
            pipe.send((None, f"{type(error).__name__}: {error}"))


class ChildProcess:
    """A child process that runs `serve`. Use it in a `with` block.

    Args:
        module: run with `python -m`.
        label: names the process in errors.
        environment: variables in addition to this process's.
        root: the checkout in which the child runs.
    """

    def __init__(
        self,
        module: str,
        label: str,
        environment: Mapping[str, str],
        python: str,
        root: Path,
    ) -> None:
        self._label = label
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                cwd=root,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a method and wait for its result."""
        self.send(name, **arguments)
        return self.result()

    def send(self, name: str, **arguments: Any) -> None:
        """Begin a call. `result` waits for it."""
        self._pipe.send((name, arguments))

    def result(self) -> Any:
        """Wait for the result of a call. Raises `RuntimeError` with the end of the log
        if the process failed."""
        try:
            value, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            value, error = None, "the process ended"
        if error is not None:
            self._log.seek(0)
            raise RuntimeError(
                f"{self._label}: {error}\n{self._log.read().decode('utf-8', 'replace')[-3000:]}"
            )
        return value
