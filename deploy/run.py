"""`serve run`, which SIGTERM ends as Ctrl-C does: `python -m deploy.run deploy/serve.yaml`.

A `serve run` that has started Ray ends Ray's proxy at SIGTERM at once, and all streams break.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run the command with the arguments of `serve run`."""
    command = [str(Path(sys.executable).with_name("serve")), "run", *sys.argv[1:]]
    with subprocess.Popen(command, process_group=0) as process:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: process.send_signal(signal.SIGINT))
        sys.exit(process.wait())


if __name__ == "__main__":
    main()
