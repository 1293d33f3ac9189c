"""Event loop of the launcher: readable data, signals, ended children, deadlines and silence."""

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from selectors import EVENT_READ, EVENT_WRITE

from flashlight_py import system


def _signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return the signals that exist on this system."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


HARMLESS = _signals("SIGUSR1", "SIGUSR2")  # signals that do not end a job
# Signals from users and schedulers. Signals ignored at the start of the process stay ignored.
FORWARDED = (*_signals("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"), *HARMLESS)
# On Windows, any number kills a process, and threads wait for processes.
SIGKILL, SIGPIPE = getattr(signal, "SIGKILL", 9), getattr(signal, "SIGPIPE", 13)
SIGCONT, SIGCHLD = getattr(signal, "SIGCONT", 18), getattr(signal, "SIGCHLD", 0)
MOST_SECONDS = 1e6  # seconds; the kernel waits for events for at most 24 days
BEAT_SECONDS = 0.5  # seconds between two heartbeats of a connection
LOST_SECONDS = 6.0  # seconds of silence until a host is declared lost


class Poll:
    """A poll that calls back when descriptors are ready. Times are ``time.monotonic`` times."""

    def __init__(self) -> None:
        self._selector = system.Selector()

    def close(self) -> None:
        self._selector.close()

    def watch(self, descriptor: int, callback: Callable[[], object], writing: bool = False) -> None:
        """Call ``callback`` when ``descriptor`` can be read or is at its end.

        If ``writing`` is True, call it when ``descriptor`` can be written.

        Raises:
            PermissionError: If ``descriptor`` is a regular file, which is always ready.
        """
        self._selector.register(descriptor, EVENT_WRITE if writing else EVENT_READ, callback)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching ``descriptor``; no error if it is not watched."""
        with suppress(KeyError):
            self._selector.unregister(descriptor)

    def once(self, until: float = math.inf) -> None:
        """Wait for events, at most until the time ``until``, and call their callbacks."""
        seconds = None if until == math.inf else max(0.0, until - system.monotonic())
        for key, _ in self._selector.select(seconds):
            if key.fd in self._selector.get_map():  # an earlier callback may have unwatched it
                key.data()


class Loop(Poll):
    """A poll that also calls back when a signal has arrived or a child has ended.

    A process has one loop, which handles its signals and reaps every child. ``on_signal`` may be
    replaced at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None
        self.pulses: list[Pulse] = []
        self._children: dict[int, tuple[system.Popen[bytes], Callable[[int], None]]] = {}
        self._signals, self._woken = system.pipe()
        for descriptor in (self._signals, self._woken):
            system.set_blocking(descriptor, False)
        self.watch(self._signals, self._on_signals)
        system.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (*_signals("SIGCHLD"), *FORWARDED):
            if number == SIGCHLD or system.getsignal(number) is not signal.SIG_IGN:
                # A signal wakes the loop only if it has a handler.
                system.signal(number, lambda number, frame: None)

    def close(self) -> None:
        if system.setitimer:
            system.setitimer(signal.ITIMER_REAL, 0)
        system.set_wakeup_fd(-1)
        super().close()
        system.close(self._signals)
        system.close(self._woken)

    def start_pulse(self, pulse: "Pulse") -> None:
        """Start calling ``pulse.beat``, even while this process blocks in a system call."""
        self.pulses.append(pulse)
        system.signal(signal.SIGALRM, self._beat)
        if system.getitimer(signal.ITIMER_REAL)[1] == 0.0:
            system.setitimer(signal.ITIMER_REAL, BEAT_SECONDS, BEAT_SECONDS)

    def watch_child(self, process: system.Popen[bytes], callback: Callable[[int], None]) -> None:
        """Call ``callback`` when ``process`` ends, with its exit code or minus its signal."""
        self._children[process.pid] = process, callback
        if not SIGCHLD:
            system.Thread(target=self._wait_for, args=(process,), daemon=True).start()

    def reap(self) -> bool:
        """Reap all children that have ended; return True if other children remain."""
        if system.IS_PORTABLE:
            for pid, (process, callback) in list(self._children.items()):
                if process.poll() is not None:
                    del self._children[pid]
                    callback(process.returncode)
            return False  # processes that ranks have left behind are not found
        while True:
            try:
                end = system.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return False
            if end is None:
                return True
            if end.si_pid in self._children:  # an adopted orphan has no callback
                process, callback = self._children.pop(end.si_pid)
                process.returncode = exit_code_of(end)
                callback(process.returncode)

    def _on_signals(self) -> None:
        for number in set(system.read(self._signals, 4096)):
            if number == SIGCHLD:
                self.reap()
            elif self.pulses and number == signal.SIGALRM:
                for pulse in tuple(self.pulses):
                    pulse.count_silence()
            else:
                self.on_signal(signal.Signals(number))

    def _wait_for(self, process: system.Popen[bytes]) -> None:
        process.wait()
        with suppress(OSError):  # the loop is closed
            system.send(self._woken, b"\0")

    def _beat(self, number: int, frame: object) -> None:
        for pulse in tuple(self.pulses):
            pulse.beat()


def exit_code_of(end: os.waitid_result) -> int:
    """Return the exit code of an ended process, or minus the number of its signal."""
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def await_end(process: system.Popen[bytes]) -> int | None:
    """Wait for the end of ``process``; return its exit code, or minus the number of its signal.

    On Linux, the process is not reaped, so signals still reach the processes in its group. Returns
    None if other code in this process, such as a SIGCHLD handler, has reaped it.
    """
    try:
        if system.IS_PORTABLE:
            return process.wait()
        end = system.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    assert end is not None, "waitid returns None only with WNOHANG"
    return exit_code_of(end)


@contextmanager
def keep_exit_codes() -> Iterator[None]:
    """Keep exit codes of children within the block, even if this process ignores SIGCHLD."""
    if not SIGCHLD or system.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    set_handler = ctypes.CDLL(None).signal  # usable in any thread, unlike signal.signal()
    set_handler(signal.SIGCHLD, ctypes.c_void_p(int(signal.SIG_DFL)))
    try:
        yield
    finally:
        set_handler(signal.SIGCHLD, ctypes.c_void_p(int(signal.SIG_IGN)))


class Pulse:
    """A heartbeat over a connection, and a detector of silence of the other end.

    A cut cable does not end a connection, and a machine that hangs may still acknowledge data. So
    each end calls ``beat`` every ``BEAT_SECONDS``. A signal handler makes this call, even while
    this process blocks in a write. Silence is counted in the event loop, after all received data
    has been read. So the time in which this process was stopped does not count.

    After ``seconds`` of silence, ``on_silence`` is called with the duration in words. If
    ``is_connected`` is False, the time before the first message of the other end does not count.
    """

    def __init__(
        self, loop: Loop, seconds: float, beat: Callable[[], None],
        on_silence: Callable[[str], None], is_connected: bool = True,
    ) -> None:  # fmt: skip
        self.beat = beat
        self._loop, self._seconds, self._on_silence = loop, seconds, on_silence
        self._is_connected, self.silent = is_connected, 0.0
        loop.start_pulse(self)

    def on_data(self) -> None:
        self._is_connected, self.silent = True, 0.0

    def count_silence(self) -> None:
        """Count ``BEAT_SECONDS`` of silence. Call this when all received data has been read."""
        if self._is_connected:
            self.silent += BEAT_SECONDS
        if self.silent >= self._seconds:
            self.stop()
            since = time.strftime("%H:%M:%S", time.localtime(system.wall_clock() - self.silent))
            self._on_silence(f"since {since} ({self.silent:g} s)")

    def stop(self) -> None:
        """Stop the calls of ``beat``; no error if they have stopped."""
        with suppress(ValueError):
            self._loop.pulses.remove(self)
