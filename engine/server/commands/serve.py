"""`guided serve`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from engine.server.commands.parameters import SERVER_OPTIONS, options_of, reported
from engine.server.options import check_names, take_api_key


def serve(**values: Any) -> None:
    """Serve a model over HTTP, OpenAI-compatible, with guided decoding.

    Without MODEL, the server uses a small embedded model. It ends on Ctrl-C or SIGTERM.
    """
    with reported("serve", 1):
        options = take_api_key(options_of(values))
        # a port in use is reported at once
        with listener_on(options.host, options.port) as listener:
            check_names(options)
            if options.ray.address is None and options.ray.placement not in (
                "local",
                "spread",
            ):
                raise ValueError(
                    f"placement {options.ray.placement} needs a cluster: name it with --ray-address"
                )
            from engine.server import process  # slow: torch, transformers

            process.serve(options, listener)


serve.__signature__ = SERVER_OPTIONS  # type: ignore[attr-defined]


@contextlib.contextmanager
def listener_on(host: str, port: int) -> Iterator[socket.socket]:
    """Bind the server's socket to a name or an address (empty: all). Raises OSError,
    which says why.

    It does not listen yet, so early connections are refused instead of kept waiting.
    """
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), port))
        except OSError as error:
            where = f"can't listen on {host or 'any address'} port {port}"
            raise OSError(
                f"{where}: {error.strerror}; choose another --host or --port"
            ) from None
        yield listener
