"""Both ends of a connection show each other that they are there, and notice when one is not.

A cut cable ends no connection by itself, and a machine that hangs may still acknowledge what is
sent to it. So each end sends a few bytes every ``BEAT_SECONDS``, from a signal's handler: also
while the process waits for a terminal that somebody has stopped. Silence is counted only while
this process reads, so that one that was stopped itself first takes what has arrived meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flashlight_py.launch.loop import BEAT_SECONDS, Loop

# After so many seconds in which nothing has come from a host it counts as lost.
LOST_SECONDS = 6.0


class Pulse:
    """Calls ``send`` at every beat, and ``on_silence`` once nothing was heard for ``seconds``.

    That is given words for how long. ``send`` runs inside a signal's handler. Silence counts from
    now on, or, unless ``is_there``, once the other end was heard for the first time.
    """

    def __init__(
        self,
        loop: Loop,
        seconds: float,
        send: Callable[[], None],
        on_silence: Callable[[str], None],
        is_there: bool = True,
    ) -> None:
        self.beat = send
        self._loop, self._seconds, self._on_silence = loop, seconds, on_silence
        self._is_there, self._silent = is_there, 0.0
        loop.pulses.append(self)
        loop.keep_time()

    def heard(self) -> None:
        """Note that something has arrived."""
        self._is_there, self._silent = True, 0.0

    def look(self) -> None:
        """Count a beat in which nothing has arrived, after reading what was there."""
        if self._is_there:
            self._silent += BEAT_SECONDS
        if self._silent >= self._seconds:
            self.stop()
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._silent))
            self._on_silence(f"since {since} ({self._silent:g} s)")

    def stop(self) -> None:
        """Send and count no more; may be called again."""
        if self in self._loop.pulses:
            self._loop.pulses.remove(self)
