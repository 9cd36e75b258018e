"""Run Python scripts in forks of one process that has imported torch and transformers,
which takes seconds a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HOST = """
import json, os, runpy, sys, tempfile
import torch, transformers.models.llama.modeling_llama
for line in sys.stdin:
    script, folder = json.loads(line)
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            os.chdir(folder)
            os.dup2(printed.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv = [script]
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        errors.seek(0)
        print(json.dumps([status, printed.read().decode(), errors.read().decode()]), flush=True)
"""


class ScriptHost:
    """The process. Its forks import from the checkout."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, script: Path, folder: Path) -> str:
        """Run a script in a folder and return what it prints. Fails if its exit status
        is not 0."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(script), str(folder)]) + "\n")
        self._process.stdin.flush()
        status, printed, errors = json.loads(self._process.stdout.readline())
        assert status == 0, errors
        return str(printed)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
