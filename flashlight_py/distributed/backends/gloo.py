"""NumPy arrays between processes through Gloo, over TCP.

The native side is csrc/gloo. Operations run on the caller's thread, asynchronous ones on threads of
the group's own: collectives in turn, messages beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from flashlight_py import _native
from flashlight_py.distributed.backends.native import MESSAGE_BYTES, NativeBackend
from flashlight_py.distributed.backends.native_work import NOTHING, NativeWork
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures.wording import HOST_ADVICE, UNUSABLE, names, who_that_was
from flashlight_py.distributed.rendezvous.secret import nonce, proof
from flashlight_py.distributed.rendezvous.store import Peer, Store, Waiting, this_process
from flashlight_py.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
)

# While ranks connect, a look at the others' processes every so many seconds.
_LOOK_SECONDS = 0.1


class GlooBackend(NativeBackend):
    """The ranks of ``store``, which connect when they need each other; collective, blocking.

    Those that every small collective needs connect at once, unless ``lazily``. ``address`` is what
    the sockets are bound to, of one family on all ranks. ``timeout`` (seconds) bounds an operation,
    ``joining`` connecting. Both ends of each connection prove that they know ``key``, which is that
    of the job.

    ``hosts`` says which ranks share a host (equal bytes). Where there are several, it is noticed
    when one cannot be reached any more (csrc/gloo/heartbeat.h): one that is silent for
    ``host_timeout`` seconds is lost. The longest that any rank was given counts for all, and 0, for
    ever, of any. Where the group ``is_watched``, another one, of more ranks of these hosts, does
    it, and takes this one along.

    Raises:
        BackendUnavailableError: the native extension or the interface is missing, or this rank
            cannot listen to the other hosts.
        PeerLostError, CollectiveTimeoutError: a rank could not be connected, or somebody else came
            in its place.
    """

    kind = DistributedBackend.GLOO
    path = "Gloo over TCP"
    symbols = "fl_gloo"

    def __init__(
        self,
        store: Store,
        address: str,
        timeout: float,
        joining: float,
        key: bytes,
        hosts: Sequence[bytes] = (),
        host_timeout: float = 0.0,
        lazily: bool = False,
        is_watched: bool = False,
    ) -> None:
        native = _native.load("gloo")
        super().__init__(native, store, timeout)
        self._joining = joining
        self._begin(native, self._create(address))
        try:
            is_watched |= len(set(hosts)) < 2
            port = 0 if is_watched else self._listen_for_hosts()
            watched = {"heartbeats": port, "host_timeout": host_timeout}
            self._connect(store, key, hosts, watched, lazily)
        except BaseException:
            self.close()
            raise

    def _create(self, address: str) -> Any:
        room = self.ffi.new("char[]", MESSAGE_BYTES)
        group = self.lib.fl_gloo_create(
            self.rank,
            self.size,
            address.encode(),
            b"",  # no interface's name: it might have several addresses
            self._joining,
            room,
            MESSAGE_BYTES,
        )
        if group == self.ffi.NULL:
            raise BackendUnavailableError(
                f"rank {self.rank} of {self.size}: Gloo cannot use address {address!r}: "
                f"{self.message(room)}. Choose another with params={{'INTERFACE': ...}}"
            )
        return self._owned(group)

    def _listen_for_hosts(self) -> int:
        """Return the port at which this rank hears of the other hosts."""
        room = self.ffi.new("char[]", MESSAGE_BYTES)
        port = int(self.lib.fl_gloo_listen_for_hosts(self.group, room, MESSAGE_BYTES))
        if port < 0:
            raise BackendUnavailableError(self.message(room))
        return port

    def _connect(
        self,
        store: Store,
        key: bytes,
        hosts: Sequence[bytes],
        watched: dict[str, float],
        lazily: bool,
    ) -> None:
        """Send the peers this rank's address, and connect to theirs."""
        mine = self._address()
        card = {
            "peer": this_process(),
            "address": mine.hex(),
            "nonce": nonce().hex(),
            **watched,
        }
        texts = store.exchange(json.dumps(card).encode())
        cards = [json.loads(text) for text in texts]
        self._peers = [Peer(*card["peer"]) for card in cards]
        addresses = b"".join(bytes.fromhex(card["address"]) for card in cards)
        proofs = self._proofs(proof(key, *texts))
        if len(set(hosts)) > 1:
            self._watch_hosts(hosts, cards, addresses, len(mine), proofs)
        seconds = self._joining
        op = self.lib.fl_gloo_connect(self.group, addresses, len(mine), proofs, lazily, seconds)
        work = NativeWork(self, "connect", op, addresses, NOTHING, self._joining)
        waiting = Waiting("connecting through Gloo")
        while not _has_ended(work, _LOOK_SECONDS):
            dead = self._dead("connect")
            if dead is not None:
                raise dead
            awaited = self.lib.fl_gloo_awaited(self.group)
            waiting.look([self.numbers[awaited]] if awaited >= 0 and self.rank == 0 else [])
        work.wait()

    def _watch_hosts(
        self,
        hosts: Sequence[bytes],
        cards: Sequence[Mapping[str, Any]],
        addresses: bytes,
        size: int,
        proofs: bytes,
    ) -> None:
        """Begin to watch; ``cards`` are of all ranks. For the rest see ``fl_gloo_connect``."""
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        limits = [card["host_timeout"] for card in cards]
        texts = [self.ffi.new("char[]", peer.host.encode()) for peer in self._peers]
        known = {
            "numbers": self.ffi.new("int[]", [numbers[host] for host in hosts]),
            "names": self.ffi.new("char *[]", texts),
            "ports": self.ffi.new("int[]", [card["heartbeats"] for card in cards]),
            "seconds": max(limits) if all(limits) else 0.0,
        }
        watched = self.ffi.new("fl_hosts *", known)
        self.lib.fl_gloo_watch_hosts(self.group, watched, addresses, size, proofs)

    def _proofs(self, key: bytes) -> bytes:
        """Return what this rank shows each rank, and what that one must show, by turns.

        ``key`` is of this meeting alone: it is made of the job's and of every rank's nonce.
        """
        pairs = [
            (_proof(key, self.rank, peer), _proof(key, peer, self.rank))
            for peer in range(self.size)
        ]
        return b"".join(mine + theirs for mine, theirs in pairs)

    def lost(self, doing: str) -> DistributedError | None:
        """Return why the group cannot be used any more; see ``Backend``.

        Of ranks of other machines the end is not known before something waits for them.
        """
        dead = self._dead(doing)
        return super().lost(doing) or dead  # who could say why it ended said so before

    def _dead(self, doing: str) -> PeerLostError | None:
        """Return which ranks of this machine have ended, if any: Gloo would wait in vain."""
        dead = [rank for rank, peer in enumerate(self._peers) if peer.is_gone()]
        if not dead:
            return None
        return PeerLostError(
            f"[{doing}] {self.name}: lost {names(self.numbers[rank] for rank in dead)} (its "
            f"process has ended){who_that_was(dead, self.processes)}. Look at its own output. "
            f"{UNUSABLE}"
        )

    def _address(self) -> bytes:
        room = self.ffi.new("char[]", MESSAGE_BYTES)
        count = self.lib.fl_gloo_address(self.group, room, MESSAGE_BYTES)
        assert count > 0
        return bytes(self.ffi.buffer(room, count))

    def take_along(self, other: NativeBackend) -> None:
        """Have ``other`` end too when hosts are lost, also while nobody asks this group."""
        give_up = other.ffi.addressof(other.lib, f"{other.symbols}_give_up")
        addresses = [int(other.ffi.cast("uintptr_t", each)) for each in (give_up, other.group)]
        function = self.ffi.cast("void (*)(void *, const char *)", addresses[0])
        self._kept.append(other.group)  # it is freed after this one
        pointer, advice = self.ffi.cast("void *", addresses[1]), f". {HOST_ADVICE}. {UNUSABLE}"
        self.lib.fl_gloo_take_along(self.group, function, pointer, advice.encode())


# Proofs are made here and compared natively: two messages at the start of each connection, and no
# SHA-256 of our own in C++.
def _proof(key: bytes, source: int, destination: int) -> bytes:
    return proof(key, b"%d" % source, b"%d" % destination)


def _has_ended(work: NativeWork, seconds: float) -> bool:
    """Wait up to ``seconds`` for ``work``; raises what became of it, unless it goes on."""
    with suppress(CollectiveTimeoutError):  # its own timeout is raised by the next wait again
        work.wait(seconds)
    return work.is_completed()
