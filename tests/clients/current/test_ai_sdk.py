"""AI SDK (Node): its providers for responses, chats, compatible servers and
messages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("ai_sdk.mjs")
PACKAGES = [
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "@ai-sdk/anthropic@3.0.140",
]


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node")
def test_providers(shared: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path)
    subprocess.run(["npm", "install", "--silent", *PACKAGES], cwd=tmp_path, check=True)
    names = {name: shared[name] for name in ("URL", "KEY", "MODEL", "TEXT")}
    environment = {
        **os.environ,
        **names,
        "SCHEMA": json.dumps(shared["Person"].model_json_schema()),
    }
    run = subprocess.run(
        ["node", SCRIPT.name],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    answers = [value for line in run.stdout.splitlines() for value in json.loads(line)]
    assert len(answers) == 8
    for value in answers:
        assert value == {"name": "Anna Weber", "age": 47, "city": "Hamburg"}
