"""The memory of a sharded module that the ranks of a host have in common.

All parameters of a dtype lie in one flat array, and their gradients in another of the same order,
each once on a host, in memory that all its ranks map. The arrays are cut into chunks, no larger
than a bucket; rank r of a host sums, and steps, the r-th part of each. Gradients come in through
two buckets per rank; between hosts they are summed, and sent, by the first ranks of each.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.api.running import refusing
from flashlight_py.distributed.calls.arrays import scale_in_place
from flashlight_py.distributed.reducers.host_memory import add_up, hosts_of, map_zeros, meet
from flashlight_py.errors import TornStateError, UnavailableEverywhereError
from flashlight_py.parallel.agreement import of_all_ranks

LINE = 64  # bytes of a cache line, at which the parts of ranks begin


@dataclass(frozen=True)
class Chunk:
    """Elements ``start`` to ``stop`` of the flat array, in parts of ``part``, one for each rank.

    The last chunk of a unit may have room that no parameter uses.
    """

    start: int
    stop: int
    part: int

    def part_of(self, rank: int) -> slice:
        """Return the elements of ``rank``, in the flat array."""
        return slice(self.start + rank * self.part, self.start + (rank + 1) * self.part)


@dataclass(eq=False)
class UnitPlan:
    """Parameters, by number, that are sent together, and where each begins in the flat array."""

    numbers: list[int]
    starts: list[int]
    sizes: list[int]
    chunks: list[Chunk]


@dataclass(frozen=True)
class FlatLayout:
    """The units of one flat array in the order in which they are sent, and its length."""

    units: list[UnitPlan]
    length: int


def plan(
    shapes: Sequence[Sequence[int]],
    itemsize: int,
    ranks: int,
    bucket_bytes: int,
    hosts: Sequence[int] = (1,),
) -> FlatLayout:
    """Return where parameters of ``shapes`` lie, which are in the order of their gradients.

    A host has ``ranks`` ranks; ``hosts``: how many all hosts have, so that things lie at the same
    places on each.

    Example:
        >>> layout = plan([(100, 40), (40,), (3,)], 4, ranks=2, bucket_bytes=8192)
        >>> [(unit.numbers, unit.starts) for unit in layout.units]
        [([0], [0]), ([1, 2], [4000, 4040])]
        >>> [(chunk.start, chunk.stop, chunk.part) for chunk in layout.units[0].chunks]
        [(0, 1920, 960), (1920, 3840, 960), (3840, 4000, 80)]
    """
    line = max(1, LINE // itemsize)
    grain = line * math.lcm(ranks, *hosts)
    room = max(bucket_bytes // itemsize // grain, 1) * grain
    sizes = [math.prod(shape) for shape in shapes]
    sent: list[list[int]] = []
    small: list[int] = []
    for number, size in enumerate(sizes):
        if size * 4 > room:
            sent.append([number])
            continue
        if sum(sizes[other] for other in small) + size > room:
            sent.append(small)
            small = []
        small.append(number)
    if small:
        sent.append(small)
    units, end = [], 0
    for numbers in sent:
        own, step = [sizes[number] for number in numbers], room
        if len(numbers) == 1:  # a chunk of a large parameter has whole rows where they fit
            row = math.prod(shapes[numbers[0]][1:])
            rows = math.lcm(row, grain) if row else grain
            step = room // rows * rows or room
        *starts, last = itertools.accumulate(own, initial=end)
        begin, end = end, end + -(-(last - end) // grain) * grain
        edges = [*range(begin, end, step), end]
        chunks = [Chunk(a, b, (b - a) // ranks) for a, b in itertools.pairwise(edges)]
        units.append(UnitPlan(numbers, starts, own, chunks))
    return FlatLayout(units, end)


# What ranks compare where they meet: one may be in another pass, or in a step.
BACKWARD = "backward of a sharded module"
# Of all ranks of a host together, and of one bucket.
ALL_BYTES = 16 << 20
LEAST_BYTES, MOST_BYTES = 256 << 10, 2 << 20


def bucket_bytes(ranks: int) -> int:
    """Return how large a bucket of one of ``ranks`` ranks of a host may be.

    Example:
        >>> [bucket_bytes(ranks) >> 10 for ranks in (1, 4, 8, 64)]
        [2048, 2048, 1024, 256]
    """
    return min(max(ALL_BYTES // (2 * ranks), LEAST_BYTES), MOST_BYTES)


# The gradient of a large weight is computed into them in blocks of rows, so it never exists as a
# whole on a rank; ``GradSink`` is what autograd knows of it.
class Buckets:
    """The buckets of all ranks of a host. Making them is collective, and blocks.

    Args:
        local: the ranks of this host.
        nbytes: of one bucket.
        scale: the factor of the sums.
        keeps: sums are kept, so that a rank which is alone on its host needs no bucket.
    """

    def __init__(self, local: ProcessGroup, nbytes: int, scale: float, keeps: bool) -> None:
        self._local, self._scale = local, scale
        self._alone = keeps and local.size == 1
        nbytes = -(-nbytes // 4096) * 4096
        self._memory = map_zeros(local, local.size * 2 * nbytes).reshape(local.size, 2, nbytes)
        self._turn = 0

    def next(self, chunk: Chunk, total: Array, adds: bool) -> Array:
        """Return room for what this rank has of ``chunk``, which goes into ``total``.

        A rank that is alone on its host has it in ``total`` itself, unless that is added to.
        """
        if self._alone and not adds:
            return total[chunk.start : chunk.stop]
        self._turn ^= 1
        return self.of_ranks(chunk, total.dtype)[self._local.rank]

    def of_ranks(self, chunk: Chunk, dtype: np.dtype[np.generic]) -> list[Array]:
        """Return every rank's room for ``chunk``, for which ``next`` was called last."""
        nbytes = (chunk.stop - chunk.start) * dtype.itemsize
        rooms: list[Array] = [rank[self._turn, :nbytes].view(dtype) for rank in self._memory]
        return rooms

    def send(self, chunk: Chunk, total: Array, old: Callable[[Array, Chunk], None] | None) -> None:
        """Sum what ranks have in their rooms into this rank's part of ``total``. Collective.

        Blocks. ``old``: what is there stays, scaled by this in place, and is added to.
        """
        part = chunk.part_of(self._local.rank)
        if self._alone and old is None:
            scale_in_place(total[part], self._scale)
            return
        meet(self._local, BACKWARD)
        place = slice(part.start - chunk.start, part.stop - chunk.start)
        own = [room[place] for room in self.of_ranks(chunk, total.dtype)]
        if old is None:
            add_up(own, self._scale, total[part])
            return
        old(total[part], chunk)
        total[part] += add_up(own, self._scale, np.empty_like(total[part]))


DEBUG = "FLASHLIGHT_DEBUG_SHARED"
STEP = "optimizer.step of a sharded module"
# What ends the name of a layout of parameters that do not learn; before it stands their dtype.
FROZEN = " frozen"


class Hosts:
    """The ranks of ``group`` by host: ``local`` joins this host's, ``between`` counterparts.

    Collective, blocking. ``between`` is None where there is one host, and on ranks that have no
    counterpart on each host.
    """

    def __init__(self, group: ProcessGroup) -> None:
        hosts = hosts_of(group)
        self.group, self.count = group, len(hosts)
        self.index = next(i for i, host in enumerate(hosts) if group.rank in host)
        self.leaders = min(len(host) for host in hosts)
        self.sizes = [len(host) for host in hosts]
        self.first_ranks = [host[0] for host in hosts]
        self.local, self.between = group, None
        if self.count > 1:
            place = hosts[self.index].index(group.rank)
            self.local = group.split(self.index)
            leads = place < self.leaders
            between = group.split(place if leads else None)
            self.between = between if leads else None

    @contextlib.contextmanager
    def together(self, verb: str) -> Iterator[None]:
        """Return a block of ``verb`` that either ends on all ranks or raises on all. Collective.

        Raises:
            MismatchError, UnavailableEverywhereError: another rank has failed; with its reason.
        """
        try:
            with refusing(self.local, verb, how="failed"):
                yield
                self.local.barrier()
        except Exception as error:
            if self.count > 1:
                of_all_ranks(f"{type(error).__name__}: {error}", self.group)
            raise
        failed = of_all_ranks("", self.group) if self.count > 1 else []
        for rank, reason in enumerate(failed):
            if reason:
                raise UnavailableEverywhereError(
                    f"[{verb}] rank {self.group.rank} of {self.group.size}: rank {rank} has failed "
                    f"({reason}), so no rank has changed anything; mend that and call it again"
                )


# Once per host, mapped by all ranks: nothing is gathered, each element is stepped by the rank
# that has just summed it, and what fits once on a host trains.
class HostMemory:
    """Flat arrays by dtype for ``layouts``; collective, blocking.

    Args:
        hosts: the ranks.
        layouts: the layout of each dtype, by its name.
        across_hosts: each host steps a part of its own, and sends it to the others.
    """

    __captured_state__ = ("params",)

    def __init__(self, hosts: Hosts, layouts: Mapping[str, FlatLayout], across_hosts: bool) -> None:
        self.hosts, self._layouts = hosts, layouts
        self.across = across_hosts and hosts.count > 1
        dtypes = {name: name.partition(" ")[0] for name in layouts}
        self.params = {name: self.new_flat(name, dtype) for name, dtype in dtypes.items()}
        self.grads = {name: self.new_flat(name, dtype) for name, dtype in dtypes.items()}
        # How often each rank has begun and ended to change parameters: odd while it does.
        self._marks = map_zeros(hosts.local, hosts.local.size * 64).view(np.int64)[::8]
        self._lock = threading.RLock()  # of the thread that changes parameters
        self._change = ""  # what does
        self.is_debugged = os.environ.get(DEBUG, "0") == "1"
        self.protect(True)

    def new_flat(self, name: str, dtype: DTypeLike) -> Array:
        """Return zeros of ``dtype``, as many as layout ``name`` has. Collective, blocking."""
        kind, length = np.dtype(dtype), self._layouts[name].length
        flat: Array = map_zeros(self.hosts.local, length * kind.itemsize)
        return flat.view(kind) if length else np.zeros(0, kind)

    def pieces(self, name: str, unit: UnitPlan, position: int) -> list[slice]:
        """Return which elements of the unit's parameter ``position`` this rank steps.

        They count from the parameter's first element.
        """
        start, size = unit.starts[position], unit.sizes[position]
        own = self.own(name, self.hosts.index) if self.across else slice(start, start + size)
        pieces = []
        for chunk in unit.chunks:
            part = chunk.part_of(self.hosts.local.rank)
            low, high = max(part.start, start, own.start), min(part.stop, start + size, own.stop)
            if low < high:
                pieces.append(slice(low - start, high - start))
        return pieces

    def own(self, name: str, host: int) -> slice:
        """Return what of a flat array ``host`` steps, where each has a part of its own."""
        length, count = self._layouts[name].length, self.hosts.count
        return slice(length * host // count, length * (host + 1) // count)

    # Changes, and whether one was left half done ----------------------------------------------

    def check(self, what: str) -> None:
        """Refuse ``what`` where a rank has ended while it changed parameters.

        While marks differ, all ranks are in ``changing``, or were when one ended: so another thread
        of this rank is waited for, if that is it.

        Raises:
            TornStateError: it has.
            RuntimeError: this thread itself is changing them.
        """
        if not self._are_torn():
            return
        group = self.hosts.group
        where = f"[{what}] rank {group.rank} of {group.size}:"
        with self._lock:
            if self._change:
                raise RuntimeError(
                    f"{where} called inside of {self._change}, which changes the module's "
                    "parameters: some are a step further than others. Call it afterwards"
                )
            if self._are_torn():
                raise TornStateError(
                    f"{where} a rank of this host ended or failed in the middle of a step, so some "
                    "of the module's parameters are a step further than others. Go back to "
                    "the checkpoint: fl.load(path, module=..., optimizer=...), or start again"
                )

    # Steps are counted in the shared memory by each rank, twice a step: numbers that differ, or
    # are odd, are left by a killed rank, whenever it dies.
    def _are_torn(self) -> bool:
        return bool((self._marks != self._marks[0]).any() or self._marks[0] % 2)

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Return the context in which ranks change parameters; collective, see ``Shards``."""
        local, marks = self.hosts.local, self._marks
        with self._lock:
            self.check(what)
            self._change = what
            try:
                meet(local, STEP)
                self.protect(False)
                marks[local.rank] += 1
                yield
                if self.across:
                    meet(local, STEP)
                    for between, host, part in self._led_by_host(self.params):
                        between.broadcast(part, root=host)
                marks[local.rank] += 1
                self.protect(True)
                meet(local, STEP)
            finally:
                self._change = ""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return the context in which this rank sets all parameters; they are whole then."""
        self.protect(False)
        yield
        self._marks[...] = 0
        self.protect(True)

    def protect(self, on: bool) -> None:
        """Have every write to parameters end the process, or allow it, if that is asked for."""
        if not self.is_debugged:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        mode = mmap.PROT_READ if on else mmap.PROT_READ | mmap.PROT_WRITE
        for flat in self.params.values():
            address, nbytes = flat.ctypes.data, flat.nbytes
            if nbytes and libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mode):
                code = ctypes.get_errno()
                raise OSError(code, f"{DEBUG}: mprotect: {os.strerror(code)}")

    # Between hosts ----------------------------------------------------------------------------

    def weigh_old(self, name: str, part: Array, chunk: Chunk) -> None:
        """Scale this rank's part of a sum of earlier passes, which is summed between hosts anew."""
        if self.hosts.count == 1:
            return
        ranks = self.hosts.group.size
        if not self.across:
            part *= part.dtype.type(ranks / self.hosts.count)
            return
        start = chunk.part_of(self.hosts.local.rank).start
        own = self.own(name, self.hosts.index)
        low, high = (min(max(edge - start, 0), part.size) for edge in (own.start, own.stop))
        part[:low] = part[high:] = 0
        part[low:high] *= part.dtype.type(ranks)

    def sum_between_hosts(self) -> None:
        """Add up the hosts' gradients; complete on this host when all its ranks have returned."""
        if self.hosts.count == 1:
            return
        meet(self.hosts.local, BACKWARD)
        scale = 1.0 / self.hosts.group.size
        if self.across:
            for between, host, part in self._led_by_host(self.grads):
                between.reduce(part, root=host, scale=scale)
        elif self.hosts.between is not None:
            for flat in self.grads.values():
                part = flat[self._led(0, flat.size)]
                if part.size:
                    self.hosts.between.all_reduce(part, scale=scale)

    def _led(self, start: int, stop: int) -> slice:
        """Return what of these elements this rank exchanges between hosts."""
        leaders, index, count = self.hosts.leaders, self.hosts.local.rank, stop - start
        return slice(start + count * index // leaders, start + count * (index + 1) // leaders)

    def _led_by_host(self, flats: Mapping[str, Array]) -> Iterator[tuple[ProcessGroup, int, Array]]:
        """Yield of each host's part of flat arrays what this rank exchanges, and with whom."""
        between = self.hosts.between
        if between is None:
            return
        for name, flat in flats.items():
            for host in range(self.hosts.count):
                own = self.own(name, host)
                part = flat[self._led(own.start, own.stop)]
                if part.size:
                    yield between, host, part
