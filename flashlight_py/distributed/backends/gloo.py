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
from flashlight_py.distributed.rendezvous.peers import Peer, Waiting, this_process
from flashlight_py.distributed.rendezvous.secret import nonce, proof
from flashlight_py.distributed.rendezvous.store import Store
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
    of the job. ``hosts`` says which ranks share a host (equal bytes), ``host_timeout`` how long one
    may be silent, ``is_watched`` that another backend watches: see ``HostWatch``.

    Raises:
        BackendUnavailableError: the native extension or the interface is missing.
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
            watch = HostWatch(self.ffi, self.lib, self._group, hosts, host_timeout, is_watched)
            self._connect(store, key, watch, lazily)
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

    def _connect(self, store: Store, key: bytes, watch: HostWatch, lazily: bool) -> None:
        """Send the peers this rank's address, and connect to theirs."""
        mine = self._address()
        card = {
            "peer": this_process().as_record(),
            "address": mine.hex(),
            "nonce": nonce().hex(),
            **watch.card(),
        }
        texts = store.exchange(json.dumps(card).encode())
        cards = [json.loads(text) for text in texts]
        self._peers = [Peer.from_record(card["peer"]) for card in cards]
        addresses = b"".join(bytes.fromhex(card["address"]) for card in cards)
        proofs = self._proofs(proof(key, *texts))
        watch.begin(cards, addresses, len(mine), proofs)
        seconds = self._joining
        op = self.lib.fl_gloo_connect(self._group, addresses, len(mine), proofs, lazily, seconds)
        work = NativeWork(self, "connect", op, addresses, NOTHING, self._joining)
        waiting = Waiting(self.rank == 0, "connecting through Gloo")
        while not _has_ended(work, _LOOK_SECONDS):
            dead = self._dead("connect")
            if dead is not None:
                raise dead
            awaited = self.lib.fl_gloo_awaited(self._group)
            waiting.look([self.numbers[awaited]] if awaited >= 0 else [])
        work.wait()

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
        count = self.lib.fl_gloo_address(self._group, room, MESSAGE_BYTES)
        assert count > 0
        return bytes(self.ffi.buffer(room, count))

    def take_along(self, other: NativeBackend) -> None:
        """Have ``other`` end too when hosts are lost, also while nobody asks this group."""
        give_up = other.ffi.addressof(other.lib, f"{other.symbols}_give_up")
        addresses = [int(other.ffi.cast("uintptr_t", each)) for each in (give_up, other.group)]
        function = self.ffi.cast("void (*)(void *, const char *)", addresses[0])
        self._kept.append(other.group)  # it is freed after this one
        pointer, advice = self.ffi.cast("void *", addresses[1]), f". {HOST_ADVICE}. {UNUSABLE}"
        self.lib.fl_gloo_take_along(self._group, function, pointer, advice.encode())


def _proof(key: bytes, source: int, destination: int) -> bytes:
    return proof(key, b"%d" % source, b"%d" % destination)


def _has_ended(work: NativeWork, seconds: float) -> bool:
    """Wait up to ``seconds`` for ``work``; raises what became of it, unless it goes on."""
    with suppress(CollectiveTimeoutError):  # its own timeout is raised by the next wait again
        work.wait(seconds)
    return work.is_completed()


class HostWatch:
    """Notices when other hosts cannot be reached any more: see csrc/gloo/heartbeat.h.

    ``group`` sends heartbeats between the ``hosts`` of its ranks (equal bytes: the same host).
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
            room = ffi.new("char[]", MESSAGE_BYTES)
            self._port = lib.fl_gloo_listen_for_hosts(group, room, MESSAGE_BYTES)
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
