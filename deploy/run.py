"""`serve run` that lets requests end when it is stopped: `python -m deploy.run deploy/serve.yaml`.

`serve run` itself ends Ray Serve's proxy first, and with it all streams. Here, SIGTERM and SIGINT delete the
applications before: their replicas answer what runs, or end it with an error event.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from ray import serve
from ray.serve.scripts import cli


def serve_run() -> None:
    """Run the command line of Ray Serve. Before SIGINT ends it, delete the applications."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in serve.status().applications:
            serve.delete(name)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    cli()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:  # Ray replaces the handler of SIGTERM
        sys.argv[1] = "run"
        serve_run()
    command = [sys.executable, "-m", "deploy.run", "--child", *sys.argv[1:]]
    with subprocess.Popen(command, process_group=0) as child:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: child.send_signal(signal.SIGINT))
        sys.exit(child.wait())
