"""A rank that raises ends the job: else the others, and MPI_Finalize, would wait for it.

While a group is open, an exception that nobody catches is printed, by whatever prints it otherwise,
the others have a moment to raise and print theirs as well, and then MPI ends all processes of the
job, with exit code 1. What mpirun has not read by then is lost with them: so that is waited for.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from flashlight_py.distributed.failures.abort import is_interactive

# How long a rank whose program has raised waits for what is read, and then for the others.
_LINGER_SECONDS = 1.0
_LOOK_SECONDS = 1e-3


class _Guard:
    """``sys.excepthook`` around another one, for as long as it is ``active``."""

    def __init__(self, mpi: Any, before: Any, linger: Callable[[float], None]) -> None:
        self._mpi, self.before, self._linger = mpi, before, linger
        self._pid = os.getpid()
        self.active = True

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print, and end the job; in a forked child, which is no rank of it, print alone."""
        try:
            self.before(kind, error, trace)
        finally:
            if self.active and self._pid == os.getpid() and not self._mpi.Is_finalized():
                self._end_the_job()

    def _end_the_job(self) -> None:
        """Abort, soon; no code of the interpreter's exit runs after that."""
        end = time.monotonic() + _LINGER_SECONDS
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # as under pythonw
                    stream.flush()
            for descriptor in (1, 2):
                _await_reader(descriptor, end)
            self._linger(end)
        finally:  # also after Ctrl-C, or where nobody reads any more
            self._mpi.COMM_WORLD.Abort(1)


def _await_reader(descriptor: int, end: float) -> None:
    """Wait until all that was written into a pipe has been read; no event reports it."""
    while time.monotonic() < end and _unread(descriptor):
        time.sleep(_LOOK_SECONDS)


def _unread(descriptor: int) -> int:
    """Return the bytes in the pipe that ``descriptor`` is; 0 if it is none, or closed."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        count = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    except OSError:
        return 0
    return int.from_bytes(count, sys.byteorder)


_guard: _Guard | None = None
_users = 0


def install(mpi: Any, linger: Callable[[float], None]) -> None:
    """Guard this process until ``uninstall`` has been called as often; not a Python prompt.

    ``linger(end)`` gives the others time to notice, until the clock says ``end``.
    """
    global _guard, _users  # noqa: PLW0603  (there is one sys.excepthook)
    _users += 1
    if _guard is None and not is_interactive():
        _guard = _Guard(mpi, sys.excepthook, linger)
        sys.excepthook = _guard


def uninstall() -> None:
    """Undo one ``install``."""
    global _guard, _users  # noqa: PLW0603
    _users -= 1
    if _users or _guard is None:
        return
    _guard.active = False  # somebody may have put a hook of their own around it
    if sys.excepthook is _guard:
        sys.excepthook = _guard.before
    _guard = None
