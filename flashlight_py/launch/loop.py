"""Wait for whatever happens first: output, a signal, the end of a child, or a time."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

__all__ = ["FORWARDED", "Loop"]

# What users and schedulers send to a job. Those that were ignored when we started stay ignored.
FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Loop:
    """Calls back when a descriptor is readable, a signal has come or a child has ended.

    One exists in a process: it takes the signals and reaps every child. ``hear_signal`` may be
    replaced at any time. Times are those of ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.hear_signal: Callable[[signal.Signals], None] = lambda number: None
        self._selector = selectors.DefaultSelector()
        self._ends_of: dict[int, Callable[[int], None]] = {}
        self._signals, self._woken = os.pipe()
        for end in (self._signals, self._woken):
            os.set_blocking(end, False)
        self.watch(self._signals, self._on_signals)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *FORWARDED):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._signals)
        os.close(self._woken)

    def watch(self, descriptor: int, callback: Callable[[], object], writing: bool = False) -> None:
        """Call ``callback`` whenever ``descriptor`` can be read, or is at its end; or written.

        Raises:
            PermissionError: it is a file, which always can.
        """
        event = selectors.EVENT_WRITE if writing else selectors.EVENT_READ
        self._selector.register(descriptor, event, callback)

    def forget(self, descriptor: int) -> None:
        """Watch ``descriptor`` no more; nothing happens if it was not."""
        with suppress(KeyError):
            self._selector.unregister(descriptor)

    def child(self, pid: int, callback: Callable[[int], None]) -> None:
        """Call ``callback`` when child ``pid`` has ended, with its exit code or minus the signal.

        It is reaped before.
        """
        self._ends_of[pid] = callback

    def once(self, until: float = math.inf) -> None:
        """Wait until something has happened, or the time ``until``, and call back."""
        seconds = None if until == math.inf else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(seconds):
            if key.fd in self._selector.get_map():  # not forgotten by an earlier callback
                key.data()

    def reap(self) -> bool:
        """Take the ends of all children that have ended; True if there are others."""
        while True:
            try:
                end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return False
            if end is None:
                return True
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            hear_end = self._ends_of.pop(end.si_pid, None)
            if hear_end is not None:  # else an orphan, which we have adopted
                hear_end(code)

    def _on_signals(self) -> None:
        for number in set(os.read(self._signals, 4096)):
            if number == signal.SIGCHLD:
                self.reap()
            else:
                self.hear_signal(signal.Signals(number))


def _do_nothing(number: int, frame: object) -> None:
    """Stand where a handler must be for the signal to wake the loop."""
