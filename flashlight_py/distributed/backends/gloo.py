"""NumPy arrays between processes through Gloo, over TCP.

The native side is csrc/gloo. Operations run on the caller's thread, asynchronous ones on threads of
the group's own: collectives in turn, messages beside them.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from flashlight_py import _native
from flashlight_py.distributed.backends.native import NativeBackend
from flashlight_py.distributed.backends.native_work import NativeWork
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures.wording import HOST_ADVICE, UNUSABLE, names, process_list
from flashlight_py.distributed.rendezvous.secret import derived_key, nonce
from flashlight_py.distributed.rendezvous.store import Kin, Peer, Store, Waiting, this_process
from flashlight_py.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
)

# While ranks connect, a look at the others' processes every so many seconds.
_LOOK_SECONDS = 0.1
_ADDRESS_BYTES = 1024  # at most

# Which ranks there may be, in the numbers of groups.
_RANK_BITS = 24


class _GlooCards(NamedTuple):
    """Facts of the ranks' cards, each in rank order."""

    peers: Sequence[Peer]
    addresses: bytes  # joined
    ports: Sequence[int]  # at which they hear of other hosts
    limits: Sequence[float]  # for how long these may be silent

    @classmethod
    def read(cls, texts: Sequence[bytes]) -> _GlooCards:
        known = dict[Any, Any]()  # of many ranks: values that are equal are kept once
        peers, ports, limits, joined = list[Peer](), list[int](), list[float](), bytearray()
        for process, address, _, port, limit in map(json.loads, texts):
            peers.append(Peer(*(known.setdefault(each, each) for each in process)))
            ports.append(known.setdefault(port, port))
            limits.append(known.setdefault(limit, limit))
            joined += zlib.decompress(b64decode(address))
        return cls(peers, bytes(joined), ports, limits)


class GlooBackend(NativeBackend):
    """The ranks of ``store``, which connect when they need each other; collective, blocking.

    Pairs that every small collective needs connect at once, unless ``lazily``. Sockets are bound to
    ``address``, of one family on all ranks. ``timeout`` (seconds) bounds an operation, ``joining``
    connecting. Both ends of a connection prove that they know ``key``, that of the job.

    A host that is silent for ``host_timeout`` seconds is lost (csrc/gloo/heartbeat.h); the longest
    timeout of all ranks counts, 0 is no limit. If the group ``is_watched``, a larger group of these
    hosts does that and ends this one. With ``at_once`` no call ends before all ranks have made it,
    also in subgroups.

    Raises:
        BackendUnavailableError: the native extension or the interface is missing, or this rank
            cannot listen to the other hosts.
        PeerLostError, CollectiveTimeoutError: a rank could not be connected, or somebody else came
            in its place.
    """

    kind = DistributedBackend.GLOO
    path = "Gloo over TCP"

    def __init__(
        self,
        store: Store,
        address: str,
        timeout: float,
        joining: float,
        key: bytes,
        host_timeout: float = 0.0,
        lazily: bool = False,
        is_watched: bool = False,
        at_once: bool = False,
    ) -> None:
        native = _native.load("gloo")
        super().__init__(native, store, timeout)
        self._joining, self.places = joining, list(range(self.size))
        self._begin(native, self._create(address), at_once)
        try:
            is_watched |= len(set(store.hosts)) < 2
            # The port at which this rank hears of the other hosts.
            port = 0 if is_watched else self.lib.fl_listen_for_hosts(self.group)
            if port < 0:
                raise BackendUnavailableError(self.reason())
            self._connect(store, key, (port, host_timeout), lazily)
        except BaseException:
            self.close()
            raise

    @property
    def network(self) -> GlooBackend:
        """This one: groups that are made of it share its connections."""
        return self

    def kin(self, ranks: Sequence[int], count: int, is_all: bool) -> Kin:
        """Return that ``ranks``, of which the first has this ``count``, are to be a group."""
        return Kin(self, ranks, (count << _RANK_BITS | self.places[ranks[0]]) << 1, is_all)

    def part(self, store: Store, timeout: float) -> GlooBackend:
        """Return a backend of the ranks of ``store``; see ``Kin``. Use it once all have theirs."""
        return _Part(self, store, timeout)

    def _create(self, address: str) -> Any:
        where = address.encode(), b""  # no interface's name: it might have several addresses
        group = self.lib.fl_gloo_create(self.rank, self.size, *where, self._joining)
        if group == self.ffi.NULL:
            raise BackendUnavailableError(
                f"rank {self.rank} of {self.size}: Gloo cannot use address {address!r}: "
                f"{self.reason()}. Choose another with params={{'INTERFACE': ...}}"
            )
        return self._owned(group)

    def _connect(self, store: Store, key: bytes, watched: tuple[int, float], lazily: bool) -> None:
        """Send the peers this rank's address, and connect to theirs."""
        room = self.ffi.new("char[]", _ADDRESS_BYTES)
        count = self.lib.fl_address(self.group, room, _ADDRESS_BYTES)
        assert count > 0
        address = bytes(self.ffi.buffer(room, count))
        mine = b64encode(zlib.compress(address)).decode()  # most of it are zeros
        card = [this_process(), mine, nonce().hex(), *watched]
        texts = store.exchange(json.dumps(card).encode())
        cards = texts.derived(_GlooCards.read)
        self._know(cards.peers)
        # Of this meeting alone: what both ends of each connection show at its start is made of it.
        key = texts.derived(derived_key, key)
        if len(set(store.hosts)) > 1:
            self._watch_hosts(store.hosts, cards, cards.addresses, count, key)
        seconds = self._joining
        op = self.lib.fl_connect(self.group, cards.addresses, count, key, lazily, seconds)
        work = NativeWork(self, "connect", op, cards.addresses, seconds)
        waiting = Waiting("connecting through Gloo")
        while True:
            with suppress(CollectiveTimeoutError):  # its own is raised by the next wait again
                work.wait(_LOOK_SECONDS)
            if work.is_completed():
                break
            if (dead := self._dead("connect")) is not None:
                raise dead
            awaited = self.lib.fl_awaited(self.group)
            waiting.look([self.numbers[awaited]] if awaited >= 0 and self.rank == 0 else [])
        work.wait()

    def _know(self, peers: Sequence[Peer]) -> None:
        """Note which processes the ranks are, and of whose end this machine would tell."""
        machine = this_process().machine
        self._peers, ranks = peers, range(len(peers))
        self._of_machine = [rank for rank in ranks if machine and peers[rank].machine == machine]

    def _watch_hosts(self, hosts: Sequence[str], cards: _GlooCards, *connecting: Any) -> None:
        """Begin to watch; ``cards`` are of all ranks, the rest as for ``fl_connect``."""
        named = dict(zip(hosts, (peer.host for peer in self._peers), strict=True))
        numbers = {host: number for number, host in enumerate(named)}
        texts = [self.ffi.new("char[]", name.encode()) for name in named.values()]
        known = {
            "numbers": self.ffi.new("int[]", [numbers[host] for host in hosts]),
            "ports": self.ffi.new("int[]", cards.ports),
            "names": self.ffi.new("char *[]", texts),
            "count": len(texts),
            "seconds": max(cards.limits) if all(cards.limits) else 0.0,
        }
        self._do("watch_hosts", self.group, self.ffi.new("fl_hosts *", known), *connecting)

    def lost(self, doing: str) -> DistributedError | None:
        """See ``Backend``. The end of ranks of other machines is known once something waits."""
        dead = self._dead(doing)
        return super().lost(doing) or dead  # who could say why it ended said so before

    def _dead(self, doing: str) -> PeerLostError | None:
        """Return which ranks of this machine have ended, if any: Gloo would wait in vain."""
        dead = [rank for rank in self._of_machine if self._peers[rank].is_gone()]
        if not dead:
            return None
        return PeerLostError(
            f"[{doing}] {self.name}: lost {names(self.numbers[rank] for rank in dead)} (its "
            f"process has ended){process_list(dead, self.processes)}. Look at its own output. "
            f"{UNUSABLE}"
        )

    def take_along(self, other: NativeBackend) -> None:
        """Have ``other`` end too when hosts are lost, also while nobody asks this group."""
        if other is self:
            return
        give_up = other._address_of(other.ffi.addressof(other.lib, "fl_give_up"))
        function = self.ffi.cast("int (*)(void *, const char *)", give_up)
        pointer = self.ffi.cast("void *", other._address_of(other.group))
        self._kept.append(other.group)  # it is freed after this one
        advice = f". {HOST_ADVICE}. {UNUSABLE}".encode()
        self._do("take_along", self.group, function, pointer, advice)


class _Part(GlooBackend):
    """Some ranks of ``whole``, on its connections."""

    def __init__(self, whole: GlooBackend, store: Store, timeout: float) -> None:
        native, kin = _native.load("gloo"), store.kin
        assert kin is not None
        store.processes = [whole.processes[rank] for rank in kin.ranks]
        NativeBackend.__init__(self, native, store, timeout)
        self._know([whole._peers[rank] for rank in kin.ranks])
        self.places = [whole.places[rank] for rank in kin.ranks]
        ranks = self.ffi.new("int[]", kin.ranks)
        made = self.lib.fl_gloo_part(whole._open("new_group"), ranks, self.size, kin.number)
        if made == self.ffi.NULL:
            raise DistributedError(f"[new_group] {self.name}: it cannot be made: {self.reason()}")
        self._begin(native, self._owned(made))
