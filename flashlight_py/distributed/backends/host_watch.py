"""Notices when other hosts of a group cannot be reached any more: see csrc/gloo/heartbeat.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashlight_py.errors import BackendUnavailableError

_MESSAGE_BYTES = 1024


class HostWatch:
    """The heartbeats of ``group``, whose ranks are on ``hosts``: equal bytes are the same host.

    ``timeout``: a host that is silent for so many seconds is lost; 0: never. The longest that any
    rank was given counts for all, and 0 of any. On one host there is nothing to watch. Where
    ``is_watched``, another group, of more ranks of these hosts, does it, and takes this one along:
    it is only awaited what that finds.

    Raises:
        BackendUnavailableError: it cannot listen for those of the other hosts.
    """

    def __init__(
        self,
        ffi: Any,
        lib: Any,
        group: Any,
        hosts: Sequence[bytes],
        timeout: float,
        is_watched: bool,
    ) -> None:
        self._ffi, self._lib, self._group = ffi, lib, group
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        self._numbers = [numbers[host] for host in hosts]
        self._timeout, self._port, self._count = timeout, 0, len(numbers)
        if self._count > 1 and not is_watched:
            room = ffi.new("char[]", _MESSAGE_BYTES)
            self._port = lib.fl_gloo_listen_for_hosts(group, room, _MESSAGE_BYTES)
            if self._port < 0:
                raise BackendUnavailableError(ffi.string(room).decode(errors="replace"))

    def card(self) -> dict[str, object]:
        """Return what the other ranks are to know."""
        return {"heartbeats": self._port, "host_timeout": self._timeout}

    def begin(
        self, cards: Sequence[Mapping[str, Any]], addresses: bytes, size: int, proofs: bytes
    ) -> None:
        """Begin to watch; ``cards`` are of all ranks. For the rest see ``fl_gloo_connect``."""
        if self._count < 2:
            return
        limits = [card["host_timeout"] for card in cards]
        names = [self._ffi.new("char[]", card["peer"]["host"].encode()) for card in cards]
        known = {
            "numbers": self._ffi.new("int[]", self._numbers),
            "names": self._ffi.new("char *[]", names),
            "ports": self._ffi.new("int[]", [card["heartbeats"] for card in cards]),
            "seconds": max(limits) if all(limits) else 0.0,
        }
        hosts = self._ffi.new("fl_hosts *", known)
        self._lib.fl_gloo_watch_hosts(self._group, hosts, addresses, size, proofs)
