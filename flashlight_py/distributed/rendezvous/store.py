"""The contract of a store: how processes that are not connected yet exchange small things."""

from __future__ import annotations

import abc
import functools
import itertools
import logging
import struct
from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from flashlight_py import system

ANY_RANK = -1  # no rank, or any that is free
# Seconds until rank 0 first reports missing ranks, and between further reports.
FIRST_SECONDS, NEXT_SECONDS = 10.0, 30.0
MOST_RANKS = 20  # that a message names
_log = logging.getLogger("flashlight_py")
_Made = TypeVar("_Made")


class Store(abc.ABC):
    """A meeting place of ``size`` processes, of which this one is ``rank``.

    A backend uses it to exchange addresses, host identities and NCCL's unique id.
    """

    rank: int
    size: int
    processes: Sequence[str] = ()  # which process each rank is, for messages; empty: not known yet
    numbers: Sequence[int] = ()  # the ranks' among ``total``, where these are part of more
    total: int = 0
    hosts: Sequence[str] = ()  # identities of the ranks' hosts; empty: not known yet
    spaces: Sequence[str] = ("",)  # equal for those that see each other's processes; "": not known
    named = True  # memory that all might share is a file with a name, since not all are known to
    # Of each rank that is connected with this one for the rendezvous: the address and port of our
    # end, and of the other.
    ends: Mapping[int, tuple[Any, Any]] = MappingProxyType({})
    secret: bytes = b""  # what all ranks knew beforehand and no exchange shows, if anything
    host_timeout: float = 0.0  # a host that is silent for so many seconds is lost; 0: never
    kin: Kin | None = None  # what the ranks are part of, where they are joined already
    near: Kin | None = None  # the same of those that share memory with this one; -1: does not

    @abc.abstractmethod
    def exchange(self, payload: bytes) -> Roster:
        """Pass ``payload`` and return every rank's, in rank order. Collective, blocking.

        Raises:
            RendezvousError: a rank did not arrive within the timeout or has died (named), two
                processes claim one rank, ranks have other world sizes, another rank aborted, or
                this store has ended: it cannot be used after an error. Raised on every rank that
                can still be notified.
        """

    def close(self) -> None:  # noqa: B027  (optional, as the next one)
        """Leave; collective. When it has returned on every rank, nothing of it is left behind.

        By default nothing happens: the connections belong to another object, which closes them.

        Raises:
            RendezvousError: a rank has not left within the timeout, or has died (named).
        """

    def abort(self, reason: str) -> None:  # noqa: B027  (optional: a store without waiters needs none)
        """Notify ranks that still wait in this store that this one aborts, and clean up."""


# With many ranks, most payloads are never looked at.
class Roster(Sequence[bytes]):
    """The payloads of all ranks, in rank order, in one string of bytes, ``body``."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._kept: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, payloads: Sequence[bytes]) -> Roster:
        """Pack ``payloads``: their number and their lengths precede them."""
        count = len(payloads)
        return cls(b"".join([struct.pack(f"!{count + 1}I", count, *map(len, payloads)), *payloads]))

    @functools.cached_property
    def _ends(self) -> Sequence[int]:
        """The beginning of each payload, and the end of the last one."""
        (count,) = struct.unpack_from("!I", self.body)
        lengths = struct.unpack_from(f"!{count}I", self.body, 4)
        return array("Q", itertools.accumulate(lengths, initial=4 + 4 * count))

    def __len__(self) -> int:
        return int.from_bytes(self.body[:4], "big")

    def __getitem__(self, index: Any) -> Any:
        which = range(len(self))[index]  # which raises as a list does
        if isinstance(which, range):
            return [self[each] for each in which]
        return self.body[self._ends[which] : self._ends[which + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self.body[start:end] for start, end in itertools.pairwise(self._ends))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def derived(self, make: Callable[..., _Made], *more: Hashable) -> _Made:
        """Return ``make(self, *more)``, which is kept for the next caller."""
        key = make, more
        if key not in self._kept:
            self._kept[key] = make(self, *more)
        return cast(_Made, self._kept[key])


def _part(payloads: Sequence[bytes], ranks: Sequence[int]) -> Roster:
    return Roster.of([payloads[rank] for rank in ranks])


class Kin(NamedTuple):
    """Ranks of a group that become a group of their own, on connections of the backend ``whole``.

    ``ranks`` are their ranks in ``whole``. ``number`` is the same on all of them, and differs from
    the number of any other group that has two of them.
    """

    whole: Any
    ranks: Sequence[int]
    number: int
    is_all: bool  # the group has nothing but ``whole``: no two ranks share memory, for example

    def among(self, ranks: Sequence[int]) -> Kin:
        """Return the same of some of these ranks, for another group."""
        return Kin(self.whole, [self.ranks[rank] for rank in ranks], self.number + 1, self.is_all)


class SubStore(Store):
    """The ranks ``ranks`` of ``store``, with this one, as a store of their own.

    Each exchange is one of the whole store: all of its ranks must make the same number of them.
    """

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._ranks = tuple(ranks)
        self.rank, self.size = self._ranks.index(store.rank), len(self._ranks)
        self.numbers, self.total = self._ranks, store.size
        for name in ("processes", "hosts", "spaces"):
            if len(values := getattr(store, name)) == store.size:
                setattr(self, name, [values[each] for each in self._ranks])
        self.kin = store.kin and store.kin.among(self._ranks)
        self.near = store.near and store.near.among(self._ranks)

    def exchange(self, payload: bytes) -> Roster:
        return self._store.exchange(payload).derived(_part, self._ranks)


class Peer(NamedTuple):
    """A process of this or another machine."""

    host: str
    pid: int
    machine: str = ""  # differs between kernels and PID namespaces; "" where /proc does not say
    started: str = ""  # differs between a process and a later one with the same PID; likewise

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def is_gone(self) -> bool:
        """Return whether this process is known to be dead; False where that cannot be known."""
        is_of_this_machine = bool(self.machine) and self.machine == _machine(system.gethostname())
        return is_of_this_machine and self.started != _start_time(self.pid)


def this_process() -> Peer:
    """Return the peer that this process is."""
    machine = _machine(system.gethostname())
    started = _start_time(system.getpid())
    return Peer(system.gethostname(), system.getpid(), machine if started else "", started)


def host_identity() -> str:
    """Return a text that is equal for two processes exactly if loopback joins them.

    Containers may share a host name. The kernel's boot id distinguishes machines, the network
    namespace containers.
    """
    return kernel_and("net") or system.gethostname()


@functools.cache
def _machine(host: str) -> str:
    kernel = kernel_and("pid")
    return kernel and f"{host} {kernel}"


def kernel_and(namespace: str) -> str:
    """Return the kernel's boot id and our namespace of a kind; "" where /proc does not say."""
    try:
        boot = system.read_text("/proc/sys/kernel/random/boot_id").strip()
        return f"{boot} {system.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return when ``pid`` started, in the kernel's ticks, or "" if it has ended (proc(5), stat)."""
    try:
        # Of its first thread: emulators say another start of the process that they run.
        stat = system.read_text(f"/proc/{pid}/task/{pid}/stat")
    except OSError:
        return ""
    # The second field is the command in parentheses and may hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    has_ended = fields[0] in "ZX"
    return "" if has_ended else fields[19]


def check_member(rank: int, size: int, timeout: float) -> None:
    """Raise ValueError unless ``size`` >= 1, ``rank`` is in [0, size), ``timeout`` > 0 seconds."""
    if size < 1:
        raise ValueError(f"world_size must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise ValueError(f"world_rank must be from 0 to {size - 1} (world_size - 1), got {rank}")
    if not timeout > 0:
        raise ValueError(f"the timeout must be more than 0 seconds, got {timeout}")


def why_not_apart(peers: Iterable[Peer]) -> str:
    """Return the error that several ranks are one process, given the process of each; or ""."""
    ranks: dict[Peer, list[int]] = {}
    for rank, peer in enumerate(peers):
        if peer.machine:
            ranks.setdefault(peer, []).append(rank)
    for peer, same in ranks.items():
        if len(same) > 1:
            return (
                f"{name_ranks(same)} are one process ({peer}), as threads of a Dask worker may be: "
                "a rank is a process of its own, since there is one world in each. Start one "
                "process for each rank, with Dask workers of one thread (processes=True, "
                "threads_per_worker=1)"
            )
    return ""


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 2, 3"; of very many how many more they are."""
    numbers = sorted(ranks)
    named, more = ", ".join(map(str, numbers[:MOST_RANKS])), len(numbers) - MOST_RANKS
    return f"rank{'s' if len(numbers) > 1 else ''} {named}{f' and {more} more' if more > 0 else ''}"


def not_arrived(missing: Iterable[int], size: int, timeout: float) -> str:
    """Return the sentence that names the ``missing`` ranks after ``timeout`` seconds."""
    numbers = sorted(missing)
    verb = "have" if len(numbers) > 1 else "has"
    return f"{name_ranks(numbers)} of {size} {verb} not arrived within {timeout:g} s"


def cannot_be_reached(who: str, seconds: float) -> str:
    """Return the sentence about ``who``, of whose host nothing has come for ``seconds``."""
    return (
        f"{who} cannot be reached for {seconds:g} s: its host, this one "
        f"({system.gethostname()}) or the network between them is down; hosts that may be silent "
        "for longer get params={'HOST_TIMEOUT': seconds}"
    )


class Waiting:
    """A wait for other ranks, in which missing ranks are logged from time to time."""

    def __init__(self, how: str) -> None:
        self._how, self._began = how, system.monotonic()
        self.due = self._began + FIRST_SECONDS

    def look(self, missing: Collection[int], why: str = "") -> None:
        """Log the ``missing`` ranks, if it is time to, and ``why`` if that is known."""
        now = system.monotonic()
        if now < self.due or not missing:
            return
        self.due += NEXT_SECONDS
        names, seconds = name_ranks(missing), now - self._began
        _log.warning("Still waiting for %s (%.0f s): %s%s", names, seconds, self._how, why)
