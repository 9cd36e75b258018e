"""ScratchDirectory: a private directory that does not outlive its process."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

_PREFIX = "guided-"
_OWNER = "scratch-owner"
"""The file that the owner of a directory has locked. The lock ends with the owner."""
_log = logging.getLogger(__name__)

# The cleanup process: a shell that waits for a line (there is nothing to clean up) or the end of its input (the process
# is gone). Then it removes the directory; several times, because processes that are ending may still write.
_CLEANUP = """
read -r _ && exit
for pause in 0 1 3 5; do
    sleep "$pause"
    rm -rf -- "$1"
done
"""

# The shell that starts it ends at once, so that the cleanup process becomes a child of init. A host that kills all its
# descendants, as vLLM does, does not find it. Its input is descriptor 3, because a shell connects the standard input of
# a background process to /dev/null.
_START_CLEANUP = """
exec 3<&0
/bin/sh -c "$1" guided-cleanup "$2" <&3 3<&- &
"""


class ScratchDirectory:
    """A private (0700) directory with a short path. It is removed when this process ends, killed or not.

    If the cleanup process was killed too, the next process that makes such a directory removes it.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = _lock_new(self.path)
        start = _start_cleanup(self.path, subprocess.PIPE)
        assert start.stdin is not None
        self._cleanup = start.stdin
        start.wait()

    def remove(self) -> None:
        """Remove it now. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not os.path.exists(self.path):  # otherwise a process still writes there, and the cleanup process tries again
            with contextlib.suppress(OSError, ValueError):  # the cleanup process has ended already
                self._cleanup.write(b"\n")
                self._cleanup.flush()
        with contextlib.suppress(OSError):
            self._cleanup.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _start_cleanup(path: str, stdin: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _START_CLEANUP, "guided-cleanup", _CLEANUP, path],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def _lock_new(path: str) -> int:
    """Mark a directory as this process's. Returns the descriptor that holds the lock."""
    owner = os.path.join(path, _OWNER)
    descriptor = os.open(f"{owner}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(f"{owner}.new", owner)  # only now, so that no other process finds it without the lock
    return descriptor


def _remove_abandoned() -> None:
    """Start a cleanup for each directory that is left of an owner killed together with its cleanup process."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and _is_abandoned(path):
                _log.warning("%s is left from a process that was killed: removing it", path)
                _start_cleanup(str(path), subprocess.DEVNULL).wait()


def _is_abandoned(path: Path) -> bool:
    descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
