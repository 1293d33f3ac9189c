"""Memory of zeros that the ranks of one host share. It is freed when no rank uses it any more.

Pages that no rank has written use no memory.
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
from flashlight_py.distributed.backend import BackendStore
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import combine_natively, combined
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.memory import memory_file
from flashlight_py.distributed.memory.topology import exchange_process_info
from flashlight_py.distributed.verbs import BARRIER


def hosts_of(group: ProcessGroup) -> list[list[int]]:
    """Return the ranks of ``group`` that share memory with each other, one list for each host.

    If the backend uses only a network, each rank is treated as a host.
    """
    hosts = group.backend().hosts or [[rank] for rank in range(group.size)]
    return [list(host) for host in hosts]


def store_of(group: ProcessGroup) -> BackendStore:
    return BackendStore(group.backend(), "shared_empty")


def wait_for_ranks(group: ProcessGroup, doing: str) -> None:
    """Wait for all ranks of ``group``. Collective. ``doing`` names the operation in ``COMPOSED``.

    Afterwards ranks see earlier writes of other ranks to shared memory. Raises DistributedError
    like :func:`flashlight_py.barrier`. A MismatchError closes the group.
    """
    group.run(Call(BARRIER, part_of=doing)).wait()


def add_up(arrays: Sequence[Array], scale: float, out: Array) -> Array:
    """Write the sum of ``arrays``, in their order, times ``scale`` to ``out``. Return ``out``.

    All arrays are flat, contiguous, and of the same size and dtype. Nothing is sent.
    """
    module = _native.optional("shm", "ranks of a host add up gradients with NumPy, more slowly")
    if module is None:
        out[...] = combined(arrays, ReduceOp.SUM, scale)
        return out
    combine_natively(module, arrays, ReduceOp.SUM, scale, out)
    return out


def map_zeros(group: ProcessGroup, nbytes: int, purpose: str, unwritten: int = 0) -> Array:
    """Return ``nbytes`` zeros (uint8) that all ranks of ``group`` map. Collective, blocking.

    The ranks must be able to share memory. A rank sees writes of other ranks at any time, so the
    caller must wait for the ranks between writes and reads. Errors contain ``purpose``.
    ``unwritten`` is the number of bytes of earlier mappings that are still unwritten: the host must
    have memory for them too. Every rank raises OutOfMemoryError or UnavailableEverywhereError like
    ``map_together``, or DistributedError like ``all_reduce``.
    """
    nbytes = max(nbytes, 1)
    if group.size == 1:
        memory_file.require_memory(nbytes + unwritten, purpose)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # the kernel may lack large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)
    store = store_of(group)
    exchange_process_info(store, checks=True)  # distributed_init has compared FLASHLIGHT_CHECKS

    def map_path(path: str, create: bool) -> Array:
        try:
            with memory_file.open_memory(path) as fd:
                if create:
                    memory_file.require_memory(nbytes + unwritten, purpose)
                if create and store.named:
                    # Otherwise a write beyond the file system's limit would kill the process.
                    memory_file.reserve(fd, nbytes, purpose)
                elif create:
                    os.ftruncate(fd, nbytes)
                return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        except OSError as error:
            raise OSError(error.errno, f"{purpose}, {nbytes:,} bytes: {error}") from error

    mapped: Array = memory_file.map_together(store, map_path, store.named)
    return mapped
