"""Communication of NumPy arrays between processes over TCP, with Gloo.

The native code is in csrc/gloo. A blocking operation runs on the caller's thread. All other
operations run on threads of the backend: collectives one after another, messages in parallel.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from flashlight_py import _native, errors
from flashlight_py.distributed.backends.native import NativeBackend, NativeWork
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures import wording
from flashlight_py.distributed.rendezvous.secret import derived_key, nonce
from flashlight_py.distributed.rendezvous.store import Peer, Store, Subgroup, Waiting, this_process

# While ranks connect: seconds between two checks for ranks whose process has ended.
_LOOK_SECONDS = 0.1
_ADDRESS_BYTES = 1024  # Maximum length of an address

# Number of bits for a rank in the number of a subgroup; see ``GlooBackend.subgroup``.
_RANK_BITS = 24


class _GlooCards(NamedTuple):
    """Data that all ranks exchange before they connect. All fields are in rank order."""

    peers: list[Peer]
    addresses: bytes  # addresses of all ranks, concatenated
    ports: Sequence[int]  # TCP port of each rank for heartbeats
    limits: Sequence[float]  # Seconds that a host may be silent

    @classmethod
    def read(cls, texts: Sequence[bytes]) -> "_GlooCards":
        unique = dict[Any, Any]()  # shares equal values, which saves memory with many ranks
        peers, ports, limits, data = list[Peer](), list[int](), list[float](), bytearray()
        for process, address, _, port, limit in map(json.loads, texts):
            peers.append(Peer(*(unique.setdefault(field, field) for field in process)))
            ports.append(unique.setdefault(port, port))
            limits.append(unique.setdefault(limit, limit))
            data += zlib.decompress(b64decode(address))
        return cls(peers, bytes(data), ports, limits)


class GlooBackend(NativeBackend):
    """Backend that connects the ranks of ``store`` over TCP. Creation is collective and blocks.

    Args:
        address: Local address of the sockets, of the same family on all ranks.
        timeout, joining: Seconds that one operation and that connecting may take.
        key: Secret of the job. Both ends of a connection prove that they know it.
        host_timeout: Seconds of silence after which a host is lost (csrc/gloo/heartbeat.h). All
            ranks use the largest value of any rank. If any rank passes 0, no rank has a limit.
        lazily: If True, two ranks connect when they first exchange data. If False, the constructor
            connects the pairs of ranks that small collectives use.
        is_watched: True if a larger group watches the hosts and aborts this group after a loss.
        at_once: If True, no call returns before all ranks have made the call, also in subgroups.

    Raises BackendUnavailableError, PeerLostError, or CollectiveTimeoutError if a rank does not
    connect or another program answers at the address of a rank.
    """

    kind = DistributedBackend.GLOO
    path = "Gloo over TCP"

    def __init__(
        self, store: Store, address: str, timeout: float, joining: float, key: bytes,
        host_timeout: float = 0.0, lazily: bool = False, is_watched: bool = False,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        native = _native.load_extension("gloo")
        super().__init__(native, store, timeout)
        self.network_ranks = list(range(self.size))
        interface = address.encode(), b""  # no interface name, which may mean several addresses
        group = self.lib.fl_gloo_create(self.rank, self.size, *interface, joining)
        if group == self.ffi.NULL:
            raise errors.BackendUnavailableError(
                f"rank {self.rank} of {self.size}: Gloo cannot use address {address!r}: "
                f"{self.reason()}. Set params={{'INTERFACE': ...}} to another interface or address"
            )
        self._begin(native, self._owned(group), at_once)
        try:
            is_watched |= len(set(store.hosts)) < 2
            # TCP port on which this rank receives heartbeats of other hosts.
            port = 0 if is_watched else self.lib.fl_listen_for_hosts(self.group)
            if port < 0:
                raise errors.BackendUnavailableError(self.reason())
            self._connect(store, key, (port, host_timeout), lazily, joining)
        except BaseException:
            self.close()
            raise

    network = property(lambda self: self)  # subgroups share its connections

    def subgroup(self, ranks: Sequence[int], count: int, is_flat: bool) -> Subgroup:
        """Return a ``Subgroup``. Its number consists of ``count`` and the subgroup's first rank."""
        number = (count << _RANK_BITS | self.network_ranks[ranks[0]]) << 1
        return Subgroup(self, ranks, number, is_flat)

    def _connect(
        self, store: Store, key: bytes, watched: tuple[int, float], lazily: bool, seconds: float
    ) -> None:
        buffer = self.ffi.new("char[]", _ADDRESS_BYTES)
        count = self.lib.fl_address(self.group, buffer, _ADDRESS_BYTES)
        assert count > 0
        address = bytes(self.ffi.buffer(buffer, count))
        encoded = b64encode(zlib.compress(address)).decode()  # an address is mostly zeros
        card = [this_process(), encoded, nonce().hex(), *watched]
        texts = store.exchange(json.dumps(card).encode())
        cards = texts.derived(_GlooCards.read)
        self._peers = cards.peers
        # A key for this rendezvous only. Both ends of a connection use it in their handshake.
        key = texts.derived(derived_key, key)
        if len(set(store.hosts)) > 1:
            self._watch_hosts(store.hosts, cards, cards.addresses, count, key)
        op = self.lib.fl_connect(self.group, cards.addresses, count, key, lazily, seconds)
        work = NativeWork(self, "connect", op, cards.addresses, seconds)
        waiting = Waiting("connecting through Gloo")
        while True:
            with suppress(errors.CollectiveTimeoutError):  # the next wait raises the error again
                work.wait(_LOOK_SECONDS)
            if work.is_completed():
                break
            if (dead := self._dead("connect")) is not None:
                raise dead
            awaited = self.lib.fl_awaited(self.group)
            waiting.log_missing([self.numbers[awaited]] if awaited >= 0 and self.rank == 0 else [])
        work.wait()

    def _watch_hosts(self, hosts: Sequence[str], cards: "_GlooCards", *connecting: Any) -> None:
        """Start to watch ``hosts``. ``connecting``: all addresses, bytes of each one, the key."""
        host_names = dict(zip(hosts, (peer.host for peer in self._peers), strict=True))
        numbers = {host: number for number, host in enumerate(host_names)}
        texts = [self.ffi.new("char[]", name.encode()) for name in host_names.values()]
        fields = {
            "numbers": self.ffi.new("int[]", [numbers[host] for host in hosts]),
            "ports": self.ffi.new("int[]", cards.ports),
            "names": self.ffi.new("char *[]", texts),
            "count": len(texts),
            "seconds": max(cards.limits) if all(cards.limits) else 0.0,
        }
        self._do("watch_hosts", self.group, self.ffi.new("fl_hosts *", fields), *connecting)

    def lost(self, doing: str) -> errors.DistributedError | None:
        """See ``Backend``. Only ``Work.wait`` detects a dead process on another machine."""
        dead = self._dead(doing)
        return super().lost(doing) or dead  # prefer the library's error, which has a reason

    def _dead(self, doing: str) -> errors.PeerLostError | None:
        """Return an error if a rank's process on this machine has ended. Gloo cannot detect it."""
        dead = [rank for rank, peer in enumerate(self._peers) if peer.is_gone()]
        if not dead:
            return None
        where, advice = f"[{doing}] {self.name}", "Read its output"
        return wording.peer_lost(self, where, dead, "its process has ended", advice)

    def sum_by_hosts(self, hosts: Sequence[Sequence[int]]) -> None:
        """Combine small arrays of the ranks of each host first, like ``HierarchicalBackend``."""
        host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        numbers = self.ffi.new("int[]", [host_of[rank] for rank in range(self.size)])
        self._do("sum_by_hosts", self.group, numbers)

    def propagate_host_loss(self, other: NativeBackend) -> None:
        """If this group loses a host, abort ``other`` too, even if this group runs no call."""
        if other is self:
            return
        give_up = other._address_of(other.ffi.addressof(other.lib, "fl_give_up"))
        function = self.ffi.cast("int (*)(void *, const char *)", give_up)
        pointer = self.ffi.cast("void *", other._address_of(other.group))
        self._kept.append(other.group)  # ``other`` must be freed after this group
        advice = f". {wording.HOST_ADVICE}. {wording.UNUSABLE}".encode()
        self._do("take_along", self.group, function, pointer, advice)


class GlooPart(GlooBackend):
    """A subgroup of ``parent`` that uses the connections of ``parent``.

    It is usable once all ranks of ``store`` have created it.
    """

    def __init__(self, parent: GlooBackend, store: Store, timeout: float) -> None:
        native, subgroup = _native.load_extension("gloo"), store.subgroup
        assert subgroup is not None
        store.processes = [parent.processes[rank] for rank in subgroup.ranks]
        NativeBackend.__init__(self, native, store, timeout)
        self._peers = [parent._peers[rank] for rank in subgroup.ranks]
        self.network_ranks = [parent.network_ranks[rank] for rank in subgroup.ranks]
        ranks = self.ffi.new("int[]", subgroup.ranks)
        group = self.lib.fl_gloo_part(parent._open("new_group"), ranks, self.size, subgroup.number)
        if group == self.ffi.NULL:
            raise errors.DistributedError(f"[new_group] {self.name}: Gloo failed: {self.reason()}")
        self._begin(native, self._owned(group))
