"""The contract of a store, through which unconnected processes exchange small payloads."""

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

ANY_RANK = -1  # in place of a rank number: no rank
# Seconds until rank 0 first reports missing ranks, and between further reports.
FIRST_SECONDS, NEXT_SECONDS = 10.0, 30.0
MOST_RANKS = 20  # Maximum number of ranks that a message names
_log = logging.getLogger("flashlight_py")
_Made = TypeVar("_Made")


class Store(abc.ABC):
    """A means to exchange payloads between ``size`` processes. This process has rank ``rank``.

    A backend uses a store to exchange addresses, host identities and NCCL's unique id.
    """

    rank: int
    size: int
    processes: Sequence[str] = ()  # description of each rank's process, for errors; empty: unknown
    numbers: Sequence[int] = ()  # in a sub-store: number of each rank in the larger group
    total: int = 0
    hosts: Sequence[str] = ()  # identity of each rank's host; empty if unknown
    spaces: Sequence[str] = ("",)  # kernel and PID namespace of each rank; "": unknown
    named = True  # True: shared memory needs a file name, because PID namespaces differ
    # For each rank with a rendezvous connection to this rank: (address, port) of this end of the
    # connection, and (address, port) of the other end.
    ends: Mapping[int, tuple[Any, Any]] = MappingProxyType({})
    secret: bytes = b""  # secret known to all ranks before the first exchange; b"": none
    host_timeout: float = 0.0  # seconds until a silent host is lost; 0: no limit
    subgroup: "Subgroup | None" = None  # set if the ranks have connections already
    memory_subgroup: "Subgroup | None" = None  # set if ranks share memory; other ranks are -1 in it

    @abc.abstractmethod
    def exchange(self, payload: bytes) -> "Roster":
        """Return the payloads of all ranks, in rank order. Collective, blocking.

        Raises:
            RendezvousError: If a rank (named) did not join within the timeout, died or aborted; if
                two processes claim one rank; if ranks pass different world sizes; or if an earlier
                exchange failed. Every reachable rank raises.
        """

    def close(self) -> None:  # noqa: B027 (optional, like ``abort``)
        """Leave the store. Collective. If all ranks have left, the store uses no resources.
        The default does nothing: another object owns and closes the connections.

        Raises RendezvousError if a rank (named) did not leave within the timeout, or died.
        """

    def abort(self, reason: str) -> None:  # noqa: B027 (optional)
        """Notify ranks that wait in this store that this rank aborts, and release resources."""


# Payloads are unpacked on access: with many ranks, most of them are never read.
class Roster(Sequence[bytes]):
    """The payloads of all ranks in rank order, packed in one bytes object, ``body``."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._kept: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, payloads: Sequence[bytes]) -> "Roster":
        """Pack ``payloads``, preceded by their number and their lengths."""
        count = len(payloads)
        return cls(b"".join([struct.pack(f"!{count + 1}I", count, *map(len, payloads)), *payloads]))

    @functools.cached_property
    def _ends(self) -> Sequence[int]:
        """Offsets in ``body``: start of the first payload, then the end of each payload."""
        (count,) = struct.unpack_from("!I", self.body)
        lengths = struct.unpack_from(f"!{count}I", self.body, 4)
        return array("Q", itertools.accumulate(lengths, initial=4 + 4 * count))

    def __len__(self) -> int:
        return int.from_bytes(self.body[:4], "big")

    def __getitem__(self, index: Any) -> Any:
        selected = range(len(self))[index]  # raises IndexError, as a list does
        if isinstance(selected, range):
            return [self[rank] for rank in selected]
        return self.body[self._ends[selected] : self._ends[selected + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self.body[start:end] for start, end in itertools.pairwise(self._ends))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # unhashable like a list

    def derived(self, make: Callable[..., _Made], *more: Hashable) -> _Made:
        """Return ``make(self, *more)``; the result is cached."""
        key = make, more
        if key not in self._kept:
            self._kept[key] = make(self, *more)
        return cast(_Made, self._kept[key])


def _part(payloads: Sequence[bytes], ranks: Sequence[int]) -> "Roster":
    return Roster.of([payloads[rank] for rank in ranks])


class Subgroup(NamedTuple):
    """Ranks of the backend ``parent`` that form a new group on its connections or memory.

    ``ranks`` are the ranks in ``parent``. ``number`` is equal on all of them, and differs from the
    number of every other group that shares two or more of these ranks.
    """

    parent: Any
    ranks: Sequence[int]
    number: int
    is_flat: bool  # whether all ranks use this backend only, because no ranks share memory

    def among(self, ranks: Sequence[int]) -> "Subgroup":
        """Return a part of this subgroup, with another number. ``ranks`` index ``self.ranks``."""
        ranks = [self.ranks[rank] for rank in ranks]
        return Subgroup(self.parent, ranks, self.number + 1, self.is_flat)


class SubStore(Store):
    """A store for some ``ranks`` of ``store``. All ranks of ``store`` join each exchange."""

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._ranks = tuple(ranks)
        self.rank, self.size = self._ranks.index(store.rank), len(self._ranks)
        self.numbers, self.total = self._ranks, store.size
        for name in ("processes", "hosts", "spaces"):
            if len(values := getattr(store, name)) == store.size:
                setattr(self, name, [values[rank] for rank in self._ranks])
        self.subgroup = store.subgroup and store.subgroup.among(self._ranks)
        self.memory_subgroup = store.memory_subgroup and store.memory_subgroup.among(self._ranks)

    def exchange(self, payload: bytes) -> "Roster":
        return self._store.exchange(payload).derived(_part, self._ranks)


class Peer(NamedTuple):
    """A process on this or another machine."""

    host: str
    pid: int
    machine: str = ""  # identifies kernel and PID namespace; "": unknown
    started: str = ""  # start time, since a PID may be reused; "": unknown

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def is_gone(self) -> bool:
        """Return True if the process is known to be dead, and False if it may be alive."""
        is_of_this_machine = bool(self.machine) and self.machine == _machine(system.gethostname())
        return is_of_this_machine and self.started != _start_time(self.pid)


def this_process() -> Peer:
    machine = _machine(system.gethostname())
    started = _start_time(system.getpid())
    return Peer(system.gethostname(), system.getpid(), machine if started else "", started)


def host_identity() -> str:
    """Return a text that is equal for two processes if and only if loopback connects them.

    Containers may share a host name. The kernel's boot id distinguishes machines, and the network
    namespace distinguishes containers.
    """
    return boot_id_and_namespace("net") or system.gethostname()


@functools.cache
def _machine(host: str) -> str:
    kernel = boot_id_and_namespace("pid")
    return kernel and f"{host} {kernel}"


def boot_id_and_namespace(namespace: str) -> str:
    """Return boot id and a namespace of this process; "" if /proc does not contain them."""
    try:
        boot = system.read_text("/proc/sys/kernel/random/boot_id").strip()
        return f"{boot} {system.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return the start time of ``pid`` in kernel ticks, or "" if it has ended (proc(5), stat)."""
    try:
        # Read the entry of the first thread: emulators show another start time for the process.
        stat = system.read_text(f"/proc/{pid}/task/{pid}/stat")
    except OSError:
        return ""
    # The second field is the command in parentheses. It may contain spaces and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def check_member(rank: int, size: int, timeout: float) -> None:
    """Raise ValueError unless ``size`` >= 1, ``rank`` is in [0, size) and ``timeout`` > 0."""
    if size < 1:
        raise ValueError(f"world_size must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise ValueError(f"world_rank must be from 0 to {size - 1} (world_size - 1), got {rank}")
    if not timeout > 0:
        raise ValueError(f"the timeout must be more than 0 seconds, got {timeout}")


def shared_process_error(peers: Iterable[Peer]) -> str:
    """Return an error message if several ranks run in one process, otherwise ""."""
    ranks: dict[Peer, list[int]] = {}
    for rank, peer in enumerate(peers):
        if peer.machine:
            ranks.setdefault(peer, []).append(rank)
    for peer, same in ranks.items():
        if len(same) > 1:
            return (
                f"{name_ranks(same)} are one process ({peer}), expected a process for each rank. "
                "Threads of one Dask worker can cause this. Start one process for each rank, with "
                "Dask workers of one thread (processes=True, threads_per_worker=1)"
            )
    return ""


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 2, 3". A long list ends in "and N more"."""
    numbers = sorted(ranks)
    named, more = ", ".join(map(str, numbers[:MOST_RANKS])), len(numbers) - MOST_RANKS
    return f"rank{'s' if len(numbers) > 1 else ''} {named}{f' and {more} more' if more > 0 else ''}"


def missing_text(missing: Iterable[int], size: int, timeout: float) -> str:
    """Return a sentence that names the ``missing`` ranks after ``timeout`` seconds."""
    numbers = sorted(missing)
    verb = "have" if len(numbers) > 1 else "has"
    return f"{name_ranks(numbers)} of {size} {verb} not arrived within {timeout:g} s"


def unreachable_text(who: str, seconds: float) -> str:
    """Return the error for a process ``who`` whose host has been silent for ``seconds``."""
    return (
        f"{who} cannot be reached for {seconds:g} s: its host, this host "
        f"({system.gethostname()}) or the network between them is down. If hosts may be silent for "
        "longer, set params={'HOST_TIMEOUT': seconds}"
    )


class Waiting:
    """A wait for other ranks that logs missing ranks from time to time."""

    def __init__(self, activity: str) -> None:
        self._activity, self._began = activity, system.monotonic()
        self.due = self._began + FIRST_SECONDS

    def log_missing(self, missing: Collection[int], why: str = "") -> None:
        """Log the ``missing`` ranks and the reason ``why``, if the next report is due."""
        now = system.monotonic()
        if now < self.due or not missing:
            return
        self.due += NEXT_SECONDS
        names, seconds = name_ranks(missing), now - self._began
        _log.warning("Still waiting for %s (%.0f s): %s%s", names, seconds, self._activity, why)
