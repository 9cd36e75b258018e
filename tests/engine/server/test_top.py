"""`guided top`: what it shows of a server that works, has failures, or is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hosting import Hosted, hosted
from rich.console import Console

from engine.model_loader import LoadedModel
from engine.server.top import View


@pytest.fixture
def server(tiny_model: LoadedModel) -> Iterator[Hosted]:
    with hosted(tiny_model) as running:
        yield running


def shown(view: View) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(view.render())
    return capture.get()


def test_a_server_at_work(server: Hosted) -> None:
    view = View.of(server.url)
    assert server.post(regex="[a-z]{5}", max_tokens=10).status_code == 200
    assert server.post(regex="(", max_tokens=10).status_code == 400
    view.update()
    text = shown(view)
    assert f"{server.url}" in text.splitlines()[0]
    assert "ok" in text.splitlines()[0]
    (line,) = [line for line in text.splitlines() if line.startswith("running")]
    assert line.split()[:3] == ["running", "0", "tokens/s"]
    assert float(line.split()[3]) > 0
    assert "1 x invalid_constraint" in text
    assert "ms a step" in text
    assert "1 of 1 wanted" in text


def test_rates_start_again_after_a_restart_of_the_server(server: Hosted) -> None:
    assert server.post(max_tokens=10).status_code == 200
    view = View.of(server.url)
    view.before = view.now
    view.now = type(view.now)(view.now.at + 1, view.now.health, dict.fromkeys(view.now.samples, 0.0))
    (line,) = [line for line in shown(view).splitlines() if line.startswith("running")]
    assert line.split()[2:4] == ["tokens/s", "0"]


def test_a_server_that_is_gone() -> None:
    view = View.of("http://127.0.0.1:1/")
    view.update()
    assert "http://127.0.0.1:1 does not answer" in shown(view)
