"""`guided top`: what it shows of a server that works, has failures, or is gone."""

from __future__ import annotations

from dataclasses import replace

from hosting import hosted
from rich.console import Console
from typer.testing import CliRunner

from engine.model.loader import LoadedModel
from engine.server.cli import app
from engine.server.commands.top import Snapshot, view


def shown(url: str, before: Snapshot, now: Snapshot) -> list[str]:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(view(url, before, now))
    return capture.get().splitlines()


def test_a_server_at_work_and_after_its_restart(tiny_model: LoadedModel) -> None:
    with hosted(tiny_model) as server:
        before = Snapshot.of(server.url)
        assert server.post(regex="[a-z]{5}", max_tokens=10).status_code == 200
        assert server.post(regex="(", max_tokens=10).status_code == 400
        now = Snapshot.of(server.url)
        lines = shown(server.url, before, now)
        assert lines[0].startswith(server.url)
        (cells,) = [line.split() for line in lines if line.startswith("running")]
        assert cells[:3] == ["running", "0", "tokens/s"]
        assert float(cells[3]) > 0
        for text in ("1 x invalid_constraint", "ms a step", "1 up"):
            assert any(text in line for line in lines)
        restarted = replace(now, at=now.at + 1, samples=dict.fromkeys(now.samples, 0.0))
        (cells,) = [
            line.split()
            for line in shown(server.url, now, restarted)
            if line.startswith("running")
        ]
        assert cells[2:4] == ["tokens/s", "0.0"]


def test_a_server_that_is_gone() -> None:
    result = CliRunner().invoke(
        app, ["top", "http://127.0.0.1:1/", "--once", "--interval", "0.1"]
    )
    assert result.exit_code == 1
    assert "http://127.0.0.1:1/ does not answer" in result.output
