"""Memory that the ranks of one host map: anonymous, zeros at first, gone with the last of them.

Pages that nobody has written take no memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.backends.exchange import BackendStore
from flashlight_py.distributed.calls.arrays import dtype_code
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import combined
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.memory.memory_file import map_together, open_memory
from flashlight_py.distributed.memory.memory_room import require_memory, reserve
from flashlight_py.distributed.memory.topology import exchange_process_info
from flashlight_py.distributed.verbs import BARRIER


def hosts_of(group: ProcessGroup) -> list[list[int]]:
    """Return the ranks of ``group`` that share memory with each other, host by host.

    Ranks that a backend joins by a network alone are each a host of their own.
    """
    hosts = group.backend().hosts or [[rank] for rank in range(group.size)]
    return [list(host) for host in hosts]


def store_of(group: ProcessGroup) -> BackendStore:
    """Return a store between the ranks of ``group``, for what they make together."""
    return BackendStore(group.backend(), "shared_empty")


def meet(group: ProcessGroup, doing: str) -> None:
    """Wait until all ranks are at the same place of what they do, one of ``COMPOSED``. Collective.

    The others read afterwards what a rank has written to common memory before. Raises
    DistributedError like :func:`flashlight_py.barrier`. A MismatchError closes the group.
    """
    group.run(Call(BARRIER, part_of=doing)).wait()


def add_up(arrays: Sequence[Array], scale: float, out: Array) -> Array:
    """Return ``out`` as the sum of ``arrays`` in their order, times ``scale``: as ``all_reduce``.

    All are flat, contiguous, of one size and dtype. Not collective.
    """
    module = _native.optional("shm", "ranks of a host add up gradients with NumPy, more slowly")
    if module is None:
        out[...] = combined(arrays, ReduceOp.SUM, scale)
        return out
    address = module.ffi.from_buffer
    sources = module.ffi.new("const void *[]", [address(each) for each in arrays])
    code = dtype_code("add_up", out.dtype)
    where = address("char[]", out, require_writable=True)
    module.lib.fl_reduce(code, ReduceOp.SUM, scale, where, sources, len(arrays), out.size)
    return out


def map_zeros(group: ProcessGroup, nbytes: int, what: str, unwritten: int = 0) -> Array:
    """Return ``nbytes`` zeros (uint8) that all ranks of ``group`` map. Collective, blocking.

    The ranks must share memory. All ranks read what one rank writes; the caller must order reads
    and writes. ``what`` names the purpose in errors. The host must also have ``unwritten`` bytes,
    the part of its other mappings that no rank has written yet. Every rank raises OutOfMemoryError
    or UnavailableEverywhereError like ``map_together``, or DistributedError like ``all_reduce``.
    """
    nbytes = max(nbytes, 1)
    if group.size == 1:
        require_memory(nbytes + unwritten, what)
        own = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages: nothing is lost
            own.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(own, np.uint8)
    store = store_of(group)
    exchange_process_info(store, checks=True)  # all ranks have agreed on that already

    def map_path(path: str, create: bool) -> Array:
        try:
            with open_memory(path) as fd:
                if create:
                    require_memory(nbytes + unwritten, what)
                if create and store.named:
                    # Its file system has a size; what is missing later would end the process.
                    reserve(fd, nbytes, what)
                elif create:
                    os.ftruncate(fd, nbytes)
                return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        except OSError as error:
            raise OSError(error.errno, f"{what}, {nbytes:,} bytes: {error}") from error

    mapped: Array = map_together(store, map_path, store.named)
    return mapped
