"""``python -m flashlight_py.launch.agent``: start ranks on this host for a launcher elsewhere.

The launcher starts it over ssh and talks to it through standard input and output; see ``wire``.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import Any

from flashlight_py.launch.environs import LISTENER, environ_of
from flashlight_py.launch.feeds import Feed
from flashlight_py.launch.front import run_behind
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.output import Source
from flashlight_py.launch.plan import Place
from flashlight_py.launch.ranks import Ranks
from flashlight_py.launch.wire import Reader, message
from flashlight_py.launch.writing import write_whole

__all__ = ["Agent", "main"]

_IN, _OUT = 0, 1
# How many ranks may knock before rank 0 answers; who finds no room is let in a second later.
_BACKLOG = 1024


class Agent:
    """Does what the launcher says, until it says leave or is gone."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._reader = Reader(_IN)
        self._ranks = Ranks(loop, self._hear_output, self._hear_end)
        self._feed: Feed | None = None
        self._grace = 0.0
        self._is_leaving = False
        loop.watch(_IN, self._read)
        loop.hear_signal = lambda number: self._leave()

    def run(self) -> None:
        """Work until it is time to leave; then end what is left of the ranks."""
        address = _address()
        # Rank 0 inherits it: a port that is merely reserved could be taken by somebody else.
        with _listener_at(address) as self._listener:
            port = self._listener.getsockname()[1]
            self._tell("hello", os.uname().nodename, address, port)
            while not self._is_leaving:
                self._loop.once()
            self._tell("stuck", self._ranks.finish(self._grace))

    def _read(self) -> None:
        for kind, values in self._reader.read():
            getattr(self, f"_do_{kind}")(*values)
        if self._reader.has_ended:
            self._leave()

    def _do_start(self, task: dict[str, Any]) -> None:
        self._grace = task["grace"]
        environ = {**os.environ, **task["environ"]}
        for place in map(Place._make, task["places"]):
            is_first = place.rank == 0 and task["has_input"]
            if is_first:
                self._feed = Feed(self._loop, lambda: self._tell("more"))
            listener, meeting = [], task["meeting"]
            if place.rank == 0 and "MASTER_PORT" in meeting:
                listener = [self._listener.fileno()]
                meeting = {**meeting, LISTENER: str(listener[0])}
            self._ranks.start(
                place.rank,
                task["program"],
                environ_of(environ, place, task["size"], task["restarts"], meeting),
                self._feed.theirs if is_first and self._feed else None,
                listener,
            )
            if is_first and self._feed:
                self._feed.begin()
        self._listener.close()  # it is rank 0's alone, and ends with it

    def _do_signal(self, number: int) -> None:
        self._ranks.signal(number)

    def _do_input(self, text: str) -> None:
        if self._feed is not None:
            self._feed.put(text.encode("latin-1"))

    def _do_leave(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._is_leaving = True

    def _hear_output(self, source: Source, data: bytes) -> None:
        self._tell("output", *source, data.decode("latin-1"))

    def _hear_end(self, rank: int, code: int) -> None:
        self._tell("end", rank, code)

    def _tell(self, kind: str, *values: Any) -> None:
        try:
            write_whole(_OUT, message(kind, *values))
        except ConnectionError:
            self._leave()


def _address() -> str:
    """Return the address that others reach this host at; "" if there is no way out of it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737); nothing is sent
        return str(probe.getsockname()[0])
    return ""


def _listener_at(address: str) -> socket.socket:
    """Return a socket that listens at ``address``, or at all of this host's if it is empty."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def main() -> int:
    """Run the agent; returns its exit code."""
    return run_behind(_work, lambda: None)


def _work() -> int:
    with Loop() as loop:
        Agent(loop).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
