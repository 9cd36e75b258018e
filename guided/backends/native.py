"""One guard for errors from grammar libraries: whatever a library raises becomes a `BackendError`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from guided.errors import BackendError, GuidedError, bounded


class guard:  # noqa: N801 -- used like a function, in `with`
    """Context manager that turns every exception of a grammar library into a `BackendError`.

    A Rust panic is included: it arrives as a BaseException that is no Exception. Errors of `guided.errors`,
    KeyboardInterrupt and SystemExit pass unchanged. One instance may be used any number of times, also nested.

    Args:
        library: name for the message.
        describe: text of an exception for the message.
    """

    # A class: a generator-based context manager would take as long as a small mask.
    def __init__(self, library: str, describe: Callable[[BaseException], object] = str) -> None:
        self._library = library
        self._describe = describe

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or isinstance(error, GuidedError | KeyboardInterrupt | SystemExit):
            return
        message = bounded(self._describe(error))
        raise BackendError(f"{self._library} failed: {type(error).__name__}: {message}") from error
