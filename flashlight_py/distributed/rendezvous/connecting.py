"""To connect to whichever of several addresses answers, without waiting for those that do not."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from flashlight_py.distributed.rendezvous.sockets import resolved

# After so many seconds without an answer the next address is tried as well, as RFC 8305 says.
_NEXT_SECONDS = 0.25
# Where one address refuses, rank 0 may not be there yet: then those that do not answer get so many
# seconds more, and all are tried again.
_REFUSED_SECONDS = 1.0


class Attempts:
    """Connections to ``addresses``, hosts and ports, a host being an address or a name.

    ``problems`` are why there is none to an address, by the address, in words.
    """

    def __init__(self, addresses: Iterable[tuple[str, int]]) -> None:
        self.problems: dict[str, str] = {}
        self._targets: deque[tuple[socket.AddressFamily, tuple[Any, ...]]] = deque()
        for host, port in addresses:
            try:
                self._targets.extend(resolved(host, port))
            except OSError as error:  # noqa: PERF203 - each for itself
                self.problems[host] = str(error)
        self.left = len(self._targets)

    def connected(self, until: float) -> Iterator[socket.socket]:
        """Yield what connects before ``until``, a time of ``time.monotonic``, the first one first.

        Each is the caller's to close. ``left`` is how many addresses have not been heard of then.
        """
        with selectors.DefaultSelector() as selector:
            try:
                yield from self._race(selector, until)
            finally:
                for key in list(selector.get_map().values()):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()

    def _race(self, selector: selectors.BaseSelector, until: float) -> Iterator[socket.socket]:
        due = time.monotonic()
        # All are tried in half of the time, however many do not answer.
        pause = min(_NEXT_SECONDS, (until - due) / (2 * max(1, len(self._targets))))
        while self._targets or selector.get_map():
            now = time.monotonic()
            if self._targets and (now >= due or not selector.get_map()):
                self._start(selector, *self._targets.popleft())
                due = now + pause
                continue
            ready = selector.select(min(until, due if self._targets else until) - now)
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                wire, error = (
                    key.fileobj,
                    key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR),
                )
                if error:
                    wire.close()
                    self._failed(key.data, OSError(error, os.strerror(error)))
                    due = 0.0  # nobody is there: the next one need not wait
                    until = min(until, time.monotonic() + _REFUSED_SECONDS)
                    continue
                self.left -= 1
                wire.setblocking(True)
                yield wire
            if not ready and time.monotonic() >= until:
                for key in selector.get_map().values():
                    self._failed(key.data, TimeoutError("timed out"))
                return

    def _start(
        self,
        selector: selectors.BaseSelector,
        family: socket.AddressFamily,
        address: tuple[Any, ...],
    ) -> None:
        try:
            wire = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # a family that this host does not have
            self._failed(address, error)
            return
        wire.setblocking(False)
        try:
            wire.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            wire.close()
            self._failed(address, error)
            return
        selector.register(wire, selectors.EVENT_WRITE, address)

    def _failed(self, address: tuple[Any, ...], error: OSError) -> None:
        self.left -= 1
        self.problems[address[0]] = str(error)
