"""Memory of a sharded module that all ranks of a host share.

All parameters of a dtype are stored in one flat array, and their gradients in another flat array of
the same order, once per host, in memory that all its ranks map. The arrays are divided into chunks.
Rank r of a host sums part r of each chunk, and its optimizer updates this part. Each rank has two
staging buffers of the size of a chunk, in which it passes gradients to the other ranks of the host.
If the hosts have unequal numbers of ranks, only the first ranks send data between hosts.
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
from flashlight_py.distributed import ProcessGroup, internal
from flashlight_py.distributed.internal import host_memory
from flashlight_py.errors import OutOfMemoryError, TornStateError, UnavailableEverywhereError
from flashlight_py.parallel.agreement import gather_json
from flashlight_py.parallel.gradient_pass import PassBucket

LINE = 64  # bytes of a cache line; each rank's part begins at a multiple


class HostBucket(PassBucket):
    """Parameters that are sent together. ``starts`` are their offsets in flat array ``name``.

    ``chunks`` are the slices of this array that fit into a staging buffer. The last chunk may
    include unused elements after the last parameter.
    """

    def __init__(
        self, name: str, params: Sequence[Variable], starts: list[int], chunks: list[slice]
    ) -> None:
        super().__init__(params)
        self.name, self.starts, self.chunks = name, starts, chunks
        self.sizes = [param.size for param in params]
        self.placements: list[Any] = []  # of ``params``


def plan(
    name: str, params: Sequence[Variable], chunk_bytes: int, ranks: Sequence[int]
) -> tuple[list[HostBucket], int]:
    """Return the buckets of the flat array ``name`` in sending order, and the array's length.

    ``params`` have one dtype and are in the order in which a pass completes their gradients.
    ``ranks`` has the number of ranks of each host. All hosts pass equal ``ranks``.

    Example:
        >>> shapes = (100, 40), (40,), (3,)
        >>> params = [Variable(np.zeros(shape, np.float32)) for shape in shapes]
        >>> buckets, length = plan("<f4", params, chunk_bytes=8192, ranks=[2])
        >>> [([param.size for param in bucket.params], bucket.starts) for bucket in buckets]
        [([4000], [0]), ([40, 3], [4000, 4040])]
        >>> buckets[0].chunks
        [slice(0, 1920, None), slice(1920, 3840, None), slice(3840, 4000, None)]
    """
    itemsize = params[0].dtype.itemsize
    grain = max(1, LINE // itemsize) * math.lcm(*ranks)
    limit = max(chunk_bytes // itemsize // grain, 1) * grain
    groups: list[list[Variable]] = []
    small: list[Variable] = []
    for param in params:
        if param.size * 4 > limit:
            groups.append([param])
            continue
        if sum(other.size for other in small) + param.size > limit:
            groups.append(small)
            small = []
        small.append(param)
    if small:
        groups.append(small)
    buckets, end = [], 0
    for bucket_params in groups:
        step = limit
        if len(bucket_params) == 1:  # a large parameter: end chunks between rows if a row fits
            row = math.prod(bucket_params[0].shape[1:])
            rows = math.lcm(row, grain) if row else grain
            step = limit // rows * rows or limit
        *starts, last = itertools.accumulate((param.size for param in bucket_params), initial=end)
        begin, end = end, end + -(-(last - end) // grain) * grain
        chunks = list(itertools.starmap(slice, itertools.pairwise([*range(begin, end, step), end])))
        buckets.append(HostBucket(name, bucket_params, starts, chunks))
    return buckets, end


# Names of operations. Waiting ranks compare them, so a pass does not match a step of another rank.
BACKWARD = "backward of a sharded module"
STEP = "optimizer.step of a sharded module"
# Bytes of all staging buffers of a host; least and most bytes of one buffer.
ALL_BYTES = 16 << 20
LEAST_BYTES, MOST_BYTES = 256 << 10, 2 << 20
DEBUG = "FLASHLIGHT_DEBUG_SHARED"
# Suffix of the names of flat arrays with frozen parameters, after the dtype.
FROZEN = " frozen"


# Each array exists once per host and is mapped by all ranks, so nothing is gathered. The rank that
# sums the gradient of an element also updates it. A host needs memory for one copy of a model.
class HostMemory:
    """Shared memory of a host: flat arrays for ``params`` and gradients, and staging buffers.

    ``params`` are in the order in which a pass completes their gradients. ``hosts`` has the ranks
    of each host, and ``host`` is the index of this host. ``local`` is the group of this host's
    ranks. ``between`` is the group of the ranks with the same position on all hosts. It is None if
    there is one host, or if a host has no rank with this position. With ``across``, each host
    updates a part of the parameters and sends it to the other hosts. Creation is collective.
    """

    def __init__(self, group: ProcessGroup, params: Sequence[Variable], across_hosts: bool) -> None:
        self.group = self.local = group
        self.between: ProcessGroup | None = None
        self.hosts = hosts = sorted(host_memory.hosts_of(group))
        self.host = next(number for number, ranks in enumerate(hosts) if group.rank in ranks)
        self._leaders = min(map(len, hosts))
        if len(hosts) > 1:
            position = hosts[self.host].index(group.rank)
            self.local = group.split(self.host)
            between = group.split(position if position < self._leaders else None, self.host)
            self.between = between if position < self._leaders else None
        self.across = across_hosts and len(hosts) > 1
        self._scale = 1.0 / group.size if len(hosts) == 1 else 1.0
        self._alone = self.local.size == 1
        self._parity = 0
        self._lock = threading.RLock()  # guards ``_change`` and the parameters; check() is nested
        self._change = ""  # name of the operation that changes parameters
        self._unwritten = 0  # bytes of this host's arrays that do not use memory yet
        self.is_debugged = os.environ.get(DEBUG, "0") == "1"
        self.params: dict[str, Array] = {}
        self.grads: dict[str, Array] = {}
        self.buckets: list[HostBucket] = []
        with self._on_all_ranks():
            local, sizes = self.local, [len(ranks) for ranks in self.hosts]
            limit = min(max(ALL_BYTES // (2 * max(sizes)), LEAST_BYTES), MOST_BYTES)
            by_name: dict[str, list[Variable]] = {}
            for param in params:
                kind = param.dtype.name if param.dtype.kind == "V" else param.dtype.str  # bfloat16
                by_name.setdefault(kind if param.calc_grad else kind + FROZEN, []).append(param)
            for name, same_kind in by_name.items():
                buckets, length = plan(name, same_kind, limit, sizes)
                self.buckets += buckets
                self.params[name] = self.new_flat(length, same_kind[0].dtype)
                self.grads[name] = self.new_flat(length, same_kind[0].dtype)
                if name.endswith(FROZEN):  # never written, so no memory backs these zeros
                    self._unwritten -= self.grads[name].nbytes
            # Each rank's count of begins and ends of parameter changes. It is odd during a change.
            marks = host_memory.map_zeros(local, local.size * 64, "fully_shard")
            self._marks = marks.view(np.int64)[::8]
            self.protect(True)
            largest = max(
                (chunk.stop - chunk.start) * bucket.params[0].dtype.itemsize
                for bucket in self.buckets
                for chunk in bucket.chunks
            )
            shape = local.size, 2, -(-largest // 4096) * 4096
            nbytes, purpose = math.prod(shape), "buckets of fully_shard"
            staging = host_memory.map_zeros(local, nbytes, purpose, self._unwritten)
            self._staging = staging.reshape(shape)

    @contextlib.contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """Make the block raise on all ranks if it raises on any rank. Collective."""
        group, several = self.group, len(self.hosts) > 1
        try:
            with internal.reject_together(self.local, "fully_shard", outcome="failed"):
                yield
                self.local.barrier()
        except Exception as error:
            if several:
                gather_json(f"{type(error).__name__}: {error}", group)
            raise
        for rank, reason in enumerate(gather_json("", group) if several else ()):
            if reason:
                is_memory_error = reason.partition(":")[0].endswith("MemoryError")
                raise (OutOfMemoryError if is_memory_error else UnavailableEverywhereError)(
                    f"[fully_shard] rank {group.rank} of {group.size}: rank {rank} failed: "
                    f"{reason}. No module has changed. Fix this and call fully_shard again"
                )

    def new_flat(self, length: int, dtype: DTypeLike) -> Array:
        """Return ``length`` zeros that this host's ranks share. Collective, blocking."""
        kind = np.dtype(dtype)
        purpose = "parameters, gradients or state of an optimizer in fully_shard"
        nbytes = length * kind.itemsize
        flat: Array = host_memory.map_zeros(self.local, nbytes, purpose, self._unwritten)
        self._unwritten += flat.nbytes
        return flat.view(kind) if length else np.zeros(0, kind)

    def rank_range(self, chunk: slice) -> slice:
        """Return the part of ``chunk`` that this rank sums and that its optimizer updates."""
        rank, size = self.local.rank, (chunk.stop - chunk.start) // self.local.size
        return slice(chunk.start + rank * size, chunk.start + (rank + 1) * size)

    def host_range(self, name: str, host: int) -> slice:
        """Return the slice of array ``name`` that ``host`` updates: all if ``across`` is False."""
        length, count = self.params[name].size, len(self.hosts)
        if not self.across:
            return slice(0, length)
        return slice(length * host // count, length * (host + 1) // count)

    def staging(self, chunk: slice, total: Array, adds: bool) -> Array:
        """Return the array for this rank's gradients of ``chunk``, normally a staging buffer.

        If this rank is alone on its host and ``adds`` is False, it is ``total[chunk]`` itself.
        """
        if self._alone and not adds:
            return total[chunk]
        self._parity ^= 1
        return self.staging_of_ranks(chunk, total.dtype)[self.local.rank]

    def staging_of_ranks(self, chunk: slice, dtype: np.dtype[np.generic]) -> list[Array]:
        """Return the staging buffers that all ranks of this host use since the last ``staging``."""
        nbytes = (chunk.stop - chunk.start) * dtype.itemsize
        staging: list[Array] = [rank[self._parity, :nbytes].view(dtype) for rank in self._staging]
        return staging

    def add_up_chunk(self, name: str, chunk: slice, adds: bool) -> None:
        """Sum this rank's part of ``chunk``, plus the old sum if ``adds``. Collective, blocking."""
        part = self.rank_range(chunk)
        total = self.grads[name][part]
        if self._alone and not adds:
            internal.call_arrays.scale_in_place(total, self._scale)
            return
        host_memory.wait_for_ranks(self.local, BACKWARD)
        position = slice(part.start - chunk.start, part.stop - chunk.start)
        arrays = [array[position] for array in self.staging_of_ranks(chunk, total.dtype)]
        if not adds:
            host_memory.add_up(arrays, self._scale, total)
            return
        if len(self.hosts) > 1:  # all hosts add the earlier sum; the result must contain it once
            host_range = self.host_range(name, self.host)
            edges = (host_range.start - part.start, host_range.stop - part.start)
            low, high = (min(max(edge, 0), total.size) for edge in edges)
            total[:low] = total[high:] = 0
            kept = self.group.size if self.across else self.group.size / len(self.hosts)
            total[low:high] *= total.dtype.type(kept)
        total += host_memory.add_up(arrays, self._scale, np.empty_like(total))

    def check(self, operation: str) -> None:
        """Raise TornStateError if a rank of this host ended or failed while it changed parameters.

        If another thread of this rank is changing parameters, wait for the end of the change, which
        would look like a failure. If this thread is changing parameters, raise RuntimeError.
        """
        if not self._are_inconsistent():
            return
        group = self.group
        where = f"[{operation}] rank {group.rank} of {group.size}:"
        with self._lock:
            if self._change:
                raise RuntimeError(
                    f"{where} expected consistent parameters, got a call inside of "
                    f"{self._change}, which is changing them. Call it after {self._change}"
                )
            if self._are_inconsistent():
                raise TornStateError(
                    f"{where} expected consistent parameters, got a mix of two steps, because a "
                    "rank of this host ended or failed in the middle of a step. Load a checkpoint "
                    "with fl.load(path, module=..., optimizer=...), or start again"
                )

    # Each rank increases a counter in shared memory when a change begins and when it ends. If a
    # rank dies during a change, a counter is odd or differs from the others.
    def _are_inconsistent(self) -> bool:
        return bool((self._marks != self._marks[0]).any() or self._marks[0] % 2)

    @contextlib.contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """Return the context in which ranks change parameters. Collective; see ``Shards``."""
        local, marks = self.local, self._marks
        with self._lock:
            self.check(operation)
            self._change = operation
            try:
                host_memory.wait_for_ranks(local, STEP)
                self.protect(False)
                marks[local.rank] += 1
                yield
                if self.across:
                    host_memory.wait_for_ranks(local, STEP)
                    for between, host, part in self._exchanges(self.params):
                        between.broadcast(part, root=host)
                marks[local.rank] += 1
                self._unwritten = 0
                self.protect(True)
                host_memory.wait_for_ranks(local, STEP)
            finally:
                self._change = ""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let this rank set all parameters in the block. After it, ``check`` accepts them."""
        self.protect(False)
        yield
        self._marks[...] = 0
        self._unwritten = min(self._unwritten, sum(flat.nbytes for flat in self.grads.values()))
        self.protect(True)

    def protect(self, on: bool) -> None:
        """With FLASHLIGHT_DEBUG_SHARED=1: forbid parameter writes, or (``on=False``) allow them."""
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
        """Sum gradients over hosts. Sums are complete when all ranks of this host have returned."""
        if len(self.hosts) == 1:
            return
        host_memory.wait_for_ranks(self.local, BACKWARD)
        scale = 1.0 / self.group.size
        for between, host, part in self._exchanges(self.grads):
            if self.across:
                between.reduce(part, root=host, scale=scale)
            else:
                between.all_reduce(part, scale=scale)

    def _exchanges(self, flats: Mapping[str, Array]) -> Iterator[tuple[ProcessGroup, int, Array]]:
        """Yield (group, root, part) for each part that this rank exchanges with other hosts."""
        if self.between is None:
            return
        for name, flat in flats.items():
            for host in range(len(self.hosts)) if self.across else [self.host]:
                part = flat[self.host_range(name, host)]
                edges = [part.size * (self.local.rank + n) // self._leaders for n in (0, 1)]
                part = part[slice(*edges)]
                if part.size:
                    yield self.between, host, part
