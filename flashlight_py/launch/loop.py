"""Wait for whatever happens first: output, a signal, the end of a child, a time, or a silence."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from selectors import EVENT_READ, EVENT_WRITE

from flashlight_py import system

HARMLESS = (signal.SIGUSR1, signal.SIGUSR2)  # they do not end a job
# Signals from users and schedulers. Those that were ignored when we started stay ignored.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *HARMLESS)
MOST_SECONDS = 1e6  # the kernel waits for events for 24 days at most
BEAT_SECONDS = 0.5  # between messages that show the other end of a connection that this one lives
LOST_SECONDS = 6.0  # of silence until a host is declared lost


class Poll:
    """Calls back when a descriptor can be read or written. Times are of ``time.monotonic``."""

    def __init__(self) -> None:
        self._selector = system.Selector()

    def close(self) -> None:
        self._selector.close()

    def watch(self, descriptor: int, callback: Callable[[], object], writing: bool = False) -> None:
        """Call ``callback`` whenever ``descriptor`` can be read, or is at its end; or written.

        Raises:
            PermissionError: it is a file, which always can.
        """
        event = EVENT_WRITE if writing else EVENT_READ
        self._selector.register(descriptor, event, callback)

    def forget(self, descriptor: int) -> None:
        """Watch ``descriptor`` no more; nothing happens if it was not."""
        with suppress(KeyError):
            self._selector.unregister(descriptor)

    def once(self, until: float = math.inf) -> None:
        """Wait until something has happened, or the time ``until``, and call back."""
        seconds = None if until == math.inf else max(0.0, until - system.monotonic())
        for key, _ in self._selector.select(seconds):
            if key.fd in self._selector.get_map():  # not forgotten by an earlier callback
                key.data()


class Loop(Poll):
    """A poll that also calls back when a signal has arrived or a child has ended.

    One exists in a process: it takes the signals and reaps every child. ``on_signal`` may be
    replaced at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None
        self._pulses: list[Pulse] = []
        self._children: dict[int, tuple[system.Popen[bytes], Callable[[int], None]]] = {}
        self._ours: dict[int, system.Popen[bytes]] = {}
        self._signals, self._woken = system.pipe()
        for end in (self._signals, self._woken):
            system.set_blocking(end, False)
        self.watch(self._signals, self._on_signals)
        system.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *FORWARDED):
            if number == signal.SIGCHLD or system.getsignal(number) is not signal.SIG_IGN:
                # A handler must be there for the signal to wake the loop.
                system.signal(number, lambda number, frame: None)

    def close(self) -> None:
        system.setitimer(signal.ITIMER_REAL, 0)
        system.set_wakeup_fd(-1)
        super().close()
        system.close(self._signals)
        system.close(self._woken)

    def keep(self, pulse: Pulse) -> None:
        """Have ``pulse`` beat from now on, also while this process waits in a system call."""
        self._pulses.append(pulse)
        system.signal(signal.SIGALRM, self._beat)
        if system.getitimer(signal.ITIMER_REAL)[1] == 0.0:
            system.setitimer(signal.ITIMER_REAL, BEAT_SECONDS, BEAT_SECONDS)

    def stop(self, pulse: Pulse) -> None:
        """Have ``pulse`` beat no more; nothing happens if it did not."""
        with suppress(ValueError):
            self._pulses.remove(pulse)

    def child(
        self, process: system.Popen[bytes], callback: Callable[[int], None], is_ours: bool = False
    ) -> None:
        """Call ``callback`` when ``process`` has ended, with its exit code or minus the signal.

        It is reaped before. ``is_ours``: it is not of the ranks, and does not end with them.
        """
        self._children[process.pid] = process, callback
        if is_ours:
            self._ours[process.pid] = process

    def ours(self) -> set[int]:
        """Return the processes that are not of the ranks."""
        self._ours = {pid: each for pid, each in self._ours.items() if each.returncode is None}
        return set(self._ours)

    def reap(self) -> bool:
        """Take the ends of all children that have ended; True if there are others."""
        while True:
            try:
                end = system.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return False
            if end is None:
                return True
            if end.si_pid in self._children:  # else an orphan, which we have adopted
                process, callback = self._children.pop(end.si_pid)
                process.returncode = code_of(end)
                callback(process.returncode)

    def _on_signals(self) -> None:
        for number in set(system.read(self._signals, 4096)):
            if number == signal.SIGCHLD:
                self.reap()
            elif number == signal.SIGALRM:
                for pulse in tuple(self._pulses):
                    pulse.look()
            else:
                self.on_signal(signal.Signals(number))

    def _beat(self, number: int, frame: object) -> None:
        for pulse in tuple(self._pulses):
            pulse.beat()


def code_of(end: os.waitid_result) -> int:
    """Return the exit code of a process that has ended, or minus the signal."""
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def await_end(process: system.Popen[bytes]) -> int | None:
    """Wait for the end of ``process`` and return its exit code, or minus the signal.

    It is not reaped, so that a signal still reaches what it has left in its group. None: something
    else in this process, such as a handler of SIGCHLD, has reaped it.
    """
    try:
        end = system.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    assert end is not None, "waitid returns None only with WNOHANG"
    return code_of(end)


@contextmanager
def kept_exit_codes() -> Iterator[None]:
    """Have the kernel keep the exit codes of children, also if this process ignores SIGCHLD."""
    if system.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    set_handler = ctypes.CDLL(None).signal  # on any thread, which signal.signal() does not allow
    set_handler(signal.SIGCHLD, ctypes.c_void_p(int(signal.SIG_DFL)))
    try:
        yield
    finally:
        set_handler(signal.SIGCHLD, ctypes.c_void_p(int(signal.SIG_IGN)))


class Pulse:
    """Shows the other end of a connection that this one is there, and notices its silence.

    A cut cable ends no connection, and a machine that hangs may still acknowledge data. So each end
    calls ``beat`` every ``BEAT_SECONDS``, from a signal's handler: even while the process waits for
    a terminal. Silence is counted only while this process reads, so that a process that was stopped
    first takes what has arrived meanwhile.

    ``on_silence`` is called, with the duration in words, after ``seconds`` of silence. They count
    from now on, or, unless ``is_there``, from the first message of the other end.
    """

    def __init__(
        self,
        loop: Loop,
        seconds: float,
        beat: Callable[[], None],
        on_silence: Callable[[str], None],
        is_there: bool = True,
    ) -> None:
        self.beat = beat
        self._loop, self._seconds, self._on_silence = loop, seconds, on_silence
        self._is_there, self.silent = is_there, 0.0
        loop.keep(self)

    def heard(self) -> None:
        self._is_there, self.silent = True, 0.0

    def look(self) -> None:
        """Count a beat in which nothing has arrived, after reading what was there."""
        if self._is_there:
            self.silent += BEAT_SECONDS
        if self.silent >= self._seconds:
            self.stop()
            since = time.strftime("%H:%M:%S", time.localtime(system.wall_clock() - self.silent))
            self._on_silence(f"since {since} ({self.silent:g} s)")

    def stop(self) -> None:
        """Beat and count no more; may be called again."""
        self._loop.stop(self)
