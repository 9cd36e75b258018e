"""`guided top`."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer


def top(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
) -> None:
    """Show a running server: engine, mask actors by node, queues, exposed mask time, last failures."""
    from rich.console import Console
    from rich.live import Live

    from engine.server.top import View

    view, console = View.of(url), Console()
    with contextlib.suppress(KeyboardInterrupt):
        if once:
            time.sleep(interval)
            view.update()
            console.print(view.render())
            raise typer.Exit(view.now.problem is not None)
        with Live(view.render(), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                view.update()
                live.update(view.render(), refresh=True)
