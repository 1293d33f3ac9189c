"""The memory of a sharded module that the ranks of a host have in common.

All parameters of a dtype lie in one flat array, and their gradients in another of the same order,
each once on a host, in memory that all its ranks map. The arrays are cut into chunks, no larger
than a bucket; rank r of a host sums, and steps, the r-th part of each. Gradients come in through
two buckets per rank; between hosts they are summed, and sent, by the first ranks of each.
"""

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import (
    add_up,
    hosts_of,
    map_zeros,
    meet,
    reject_together,
    scale_in_place,
)
from flashlight_py.errors import OutOfMemoryError, TornStateError, UnavailableEverywhereError
from flashlight_py.parallel.agreement import of_all_ranks
from flashlight_py.parallel.gradient_pass import Unit

LINE = 64  # bytes of a cache line, at which the parts of ranks begin


class HostUnit(Unit):
    """Parameters that are sent together: where each begins in the flat array ``name``.

    ``chunks``: of that array, each in one bucket. The last may have room that no parameter uses.
    """

    def __init__(
        self, name: str, params: Sequence[Variable], starts: list[int], chunks: list[slice]
    ) -> None:
        super().__init__(params)
        self.name, self.starts, self.chunks = name, starts, chunks
        self.sizes = [param.size for param in params]
        self.places: list[Any] = []  # of the parameters


def plan(
    name: str, params: Sequence[Variable], bucket_bytes: int, ranks: Sequence[int]
) -> tuple[list[HostUnit], int]:
    """Return the units of the flat array ``name`` in the order in which they are sent; its length.

    ``params`` are of one dtype, in the order of their gradients. ``ranks``: how many each host has,
    so that things lie at the same places on all.

    Example:
        >>> shapes = (100, 40), (40,), (3,)
        >>> params = [Variable(np.zeros(shape, np.float32)) for shape in shapes]
        >>> units, length = plan("<f4", params, bucket_bytes=8192, ranks=[2])
        >>> [([param.size for param in unit.params], unit.starts) for unit in units]
        [([4000], [0]), ([40, 3], [4000, 4040])]
        >>> units[0].chunks
        [slice(0, 1920, None), slice(1920, 3840, None), slice(3840, 4000, None)]
    """
    itemsize = params[0].dtype.itemsize
    grain = max(1, LINE // itemsize) * math.lcm(*ranks)
    room = max(bucket_bytes // itemsize // grain, 1) * grain
    sent: list[list[Variable]] = []
    small: list[Variable] = []
    for param in params:
        if param.size * 4 > room:
            sent.append([param])
            continue
        if sum(other.size for other in small) + param.size > room:
            sent.append(small)
            small = []
        small.append(param)
    if small:
        sent.append(small)
    units, end = [], 0
    for together in sent:
        step = room
        if len(together) == 1:  # a chunk of a large parameter has whole rows where they fit
            row = math.prod(together[0].shape[1:])
            rows = math.lcm(row, grain) if row else grain
            step = room // rows * rows or room
        *starts, last = itertools.accumulate((param.size for param in together), initial=end)
        begin, end = end, end + -(-(last - end) // grain) * grain
        edges = [*range(begin, end, step), end]
        chunks = list(itertools.starmap(slice, itertools.pairwise(edges)))
        units.append(HostUnit(name, together, starts, chunks))
    return units, end


# What ranks compare where they meet: one may be in another pass, or in a step.
BACKWARD = "backward of a sharded module"
STEP = "optimizer.step of a sharded module"
# Of all ranks of a host together, and of one bucket.
ALL_BYTES = 16 << 20
LEAST_BYTES, MOST_BYTES = 256 << 10, 2 << 20
DEBUG = "FLASHLIGHT_DEBUG_SHARED"
# What ends the name of a layout of parameters that do not learn; before it stands their dtype.
FROZEN = " frozen"


# Once per host, mapped by all ranks: nothing is gathered, each element is stepped by the rank
# that has just summed it, and what fits once on a host trains.
class HostMemory:
    """Flat arrays for ``params``, in the order of their gradients, and the buckets of all ranks.

    ``hosts`` are the ranks of each host, and ``host`` is the number of this host. ``local`` is the
    group of this host's ranks; ``between`` is the group of the ranks with the same position on all
    hosts, or None. With ``across`` each host steps its own part and sends it to the other hosts. A
    rank that is alone on its host needs no bucket. The constructor is collective and blocking.
    """

    def __init__(self, group: ProcessGroup, params: Sequence[Variable], across_hosts: bool) -> None:
        self.group = self.local = group
        self.between: ProcessGroup | None = None
        self.hosts = hosts = sorted(hosts_of(group))
        self.host = next(number for number, ranks in enumerate(hosts) if group.rank in ranks)
        self._leaders = min(map(len, hosts))
        if len(hosts) > 1:
            place = hosts[self.host].index(group.rank)
            self.local = group.split(self.host)
            between = group.split(place if place < self._leaders else None, self.host)
            self.between = between if place < self._leaders else None
        self.across = across_hosts and len(hosts) > 1
        self._scale = 1.0 / group.size if len(hosts) == 1 else 1.0
        self._alone = self.local.size == 1
        self._turn = 0
        self._lock = threading.RLock()  # of the thread that changes parameters
        self._change = ""  # what does
        self._unwritten = 0  # bytes of this host's arrays that take no memory yet
        self.is_debugged = os.environ.get(DEBUG, "0") == "1"
        self.params: dict[str, Array] = {}
        self.grads: dict[str, Array] = {}
        self.units: list[HostUnit] = []
        with self._together():
            local, sizes = self.local, [len(ranks) for ranks in self.hosts]
            limit = min(max(ALL_BYTES // (2 * max(sizes)), LEAST_BYTES), MOST_BYTES)
            by_name: dict[str, list[Variable]] = {}
            for param in params:
                kind = param.dtype.name if param.dtype.kind == "V" else param.dtype.str  # bfloat16
                by_name.setdefault(kind if param.calc_grad else kind + FROZEN, []).append(param)
            for name, those in by_name.items():
                units, length = plan(name, those, limit, sizes)
                self.units += units
                self.params[name] = self.new_flat(length, those[0].dtype)
                self.grads[name] = self.new_flat(length, those[0].dtype)
                if name.endswith(FROZEN):  # these stay zeros that nobody has written
                    self._unwritten -= self.grads[name].nbytes
            # How often each rank has begun and ended to change parameters: odd while it does.
            self._marks = map_zeros(local, local.size * 64, "fully_shard").view(np.int64)[::8]
            self.protect(True)
            largest = max(
                (chunk.stop - chunk.start) * unit.params[0].dtype.itemsize
                for unit in self.units
                for chunk in unit.chunks
            )
            nbytes = -(-largest // 4096) * 4096
            shape = local.size, 2, nbytes
            buckets = map_zeros(local, math.prod(shape), "buckets of fully_shard", self._unwritten)
            self._buckets = buckets.reshape(shape)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Return a block that either ends on all ranks or raises on all of them. Collective."""
        group, several = self.group, len(self.hosts) > 1
        try:
            with reject_together(self.local, "fully_shard", outcome="failed"):
                yield
                self.local.barrier()
        except Exception as error:
            if several:
                of_all_ranks(f"{type(error).__name__}: {error}", group)
            raise
        for rank, reason in enumerate(of_all_ranks("", group) if several else ()):
            if reason:
                lacks = reason.partition(":")[0].endswith("MemoryError")
                raise (OutOfMemoryError if lacks else UnavailableEverywhereError)(
                    f"[fully_shard] rank {group.rank} of {group.size}: rank {rank} has failed "
                    f"({reason}), so no rank has changed anything; mend that and call it again"
                )

    def new_flat(self, length: int, dtype: DTypeLike) -> Array:
        """Return ``length`` zeros of ``dtype`` that this host's ranks share. Collective, blocks."""
        kind = np.dtype(dtype)
        what = "parameters, gradients or state of an optimizer in fully_shard"
        flat: Array = map_zeros(self.local, length * kind.itemsize, what, self._unwritten)
        self._unwritten += flat.nbytes
        return flat.view(kind) if length else np.zeros(0, kind)

    def part(self, chunk: slice) -> slice:
        """Return which elements of a flat array this rank sums, and steps, of ``chunk``."""
        rank, size = self.local.rank, (chunk.stop - chunk.start) // self.local.size
        return slice(chunk.start + rank * size, chunk.start + (rank + 1) * size)

    def own(self, name: str, host: int) -> slice:
        """Return what of a flat array ``host`` steps: all of it, unless each has a part."""
        length, count = self.params[name].size, len(self.hosts)
        if not self.across:
            return slice(0, length)
        return slice(length * host // count, length * (host + 1) // count)

    def room(self, chunk: slice, total: Array, adds: bool) -> Array:
        """Return room for what this rank has of ``chunk``, which goes into ``total``."""
        if self._alone and not adds:
            return total[chunk]
        self._turn ^= 1
        return self.rooms(chunk, total.dtype)[self.local.rank]

    def rooms(self, chunk: slice, dtype: np.dtype[np.generic]) -> list[Array]:
        """Return every rank's room for ``chunk``, for which ``room`` was called last."""
        nbytes = (chunk.stop - chunk.start) * dtype.itemsize
        rooms: list[Array] = [rank[self._turn, :nbytes].view(dtype) for rank in self._buckets]
        return rooms

    def add_rooms(self, name: str, chunk: slice, adds: bool) -> None:
        """Sum what ranks have in their rooms, by this rank's part of ``chunk``. Collective, blocks.

        ``adds``: to the sums of earlier passes.
        """
        part = self.part(chunk)
        total = self.grads[name][part]
        if self._alone and not adds:
            scale_in_place(total, self._scale)
            return
        meet(self.local, BACKWARD)
        place = slice(part.start - chunk.start, part.stop - chunk.start)
        own = [room[place] for room in self.rooms(chunk, total.dtype)]
        if not adds:
            add_up(own, self._scale, total)
            return
        if len(self.hosts) > 1:  # the sum of earlier passes is summed between hosts anew
            mine = self.own(name, self.host)
            edges = (mine.start - part.start, mine.stop - part.start)
            low, high = (min(max(edge, 0), total.size) for edge in edges)
            total[:low] = total[high:] = 0
            kept = self.group.size if self.across else self.group.size / len(self.hosts)
            total[low:high] *= total.dtype.type(kept)
        total += add_up(own, self._scale, np.empty_like(total))

    def check(self, what: str) -> None:
        """Refuse ``what`` where a rank has ended while it changed parameters.

        While marks differ, all ranks are in ``changing``, or were when one ended: so another thread
        of this rank is waited for, if that is it. Of this thread itself it is a RuntimeError.
        """
        if not self._are_torn():
            return
        group = self.group
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
        local, marks = self.local, self._marks
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
                    for between, host, part in self._led(self.params):
                        between.broadcast(part, root=host)
                marks[local.rank] += 1
                self._unwritten = 0
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
        self._unwritten = min(self._unwritten, sum(flat.nbytes for flat in self.grads.values()))
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

    def sum_between_hosts(self) -> None:
        """Add up the hosts' gradients; complete on this host when all its ranks have returned."""
        if len(self.hosts) == 1:
            return
        meet(self.local, BACKWARD)
        scale = 1.0 / self.group.size
        for between, host, part in self._led(self.grads):
            if self.across:
                between.reduce(part, root=host, scale=scale)
            else:
                between.all_reduce(part, scale=scale)

    def _led(self, flats: Mapping[str, Array]) -> Iterator[tuple[ProcessGroup, int, Array]]:
        """Yield what this rank exchanges of each host's part of flat arrays, and with whom."""
        if self.between is None:
            return
        for name, flat in flats.items():
            for host in range(len(self.hosts)) if self.across else [self.host]:
                part = flat[self.own(name, host)]
                edges = [part.size * (self.local.rank + n) // self._leaders for n in (0, 1)]
                part = part[slice(*edges)]
                if part.size:
                    yield self.between, host, part
