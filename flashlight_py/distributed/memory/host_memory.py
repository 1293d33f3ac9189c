"""Memory that the ranks of one host map: anonymous, zeros at first, gone with the last of them.

Pages that nobody has written take no memory.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.arrays import dtype_code, scale_in_place
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.groups.group import ProcessGroup
from flashlight_py.distributed.memory.memory_file import (
    MemoryFile,
    needs_names,
    open_memory,
    process_space,
)
from flashlight_py.distributed.start.exchange import Steps, exchange_bytes
from flashlight_py.distributed.verbs import BARRIER
from flashlight_py.errors import UnavailableEverywhereError


def hosts_of(group: ProcessGroup) -> list[list[int]]:
    """Return the ranks of ``group`` that share memory with each other, host by host.

    Ranks that a backend joins by a network alone are each a host of their own.
    """
    return [list(host) for host in group.backend().hosts]


def meet(group: ProcessGroup, doing: str) -> None:
    """Wait until all ranks are at the same place of what they do, one of ``COMPOSED``. Collective.

    What a rank has written to common memory before, the others read afterwards.

    Raises:
        MismatchError: a rank does something else; the group is closed then.
        DistributedError: as :func:`flashlight_py.barrier`.
    """
    group.run(Call(BARRIER, part_of=doing)).wait()


def add_up(arrays: Sequence[Array], scale: float, out: Array) -> Array:
    """Return ``out`` as the sum of ``arrays`` in their order, times ``scale``: as ``all_reduce``.

    All are flat, contiguous, of one size and dtype. Not collective.
    """
    module = _native.optional("shm", "ranks of a host add up gradients with NumPy, more slowly")
    if module is None:
        return _add_up_in_numpy(arrays, scale, out)
    address = module.ffi.from_buffer
    sources = module.ffi.new("const void *[]", [address(each) for each in arrays])
    code = dtype_code("add_up", out.dtype)
    where = address("char[]", out, require_writable=True)
    module.lib.fl_reduce(code, ReduceOp.SUM, scale, where, sources, len(arrays), out.size)
    return out


def _add_up_in_numpy(arrays: Sequence[Array], scale: float, out: Array) -> Array:
    wide = np.float32 if out.dtype.itemsize == 2 else out.dtype  # rounded once, in the end
    total = np.array(arrays[0], wide)
    for array in arrays[1:]:
        total += array
    scale_in_place(total, scale)
    out[...] = total
    return out


def map_zeros(group: ProcessGroup, nbytes: int) -> Array:
    """Return ``nbytes`` zeros (uint8) that all ranks of ``group`` map. Collective, blocking.

    The ranks must share memory. What one writes the others read; nothing orders the two but what
    the ranks do besides.

    Raises:
        UnavailableEverywhereError: a rank cannot map it; raised on every rank.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    nbytes = max(nbytes, 1)
    if group.size == 1:
        own = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages: nothing is lost
            own.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(own, np.uint8)
    backend = Steps(group.backend(), "shared_empty")
    spaces = [text.decode() for text in exchange_bytes(backend, process_space().encode())]
    file: MemoryFile | None = None
    mapped: Array | None = None
    path, error = "", ""
    try:
        if backend.rank == 0:
            file, error = _made(needs_names(spaces), nbytes)
        offer = json.dumps(["" if file is None else file.path, error])
        path, error = json.loads(exchange_bytes(backend, offer.encode())[0])
        if not error:
            mapped, error = _mapped(path if file is None else file.own_path, nbytes)
        _raise_on_all(backend, error)
    finally:
        if file is not None:
            file.close()
        elif path and needs_names(spaces):
            Path(path).unlink(missing_ok=True)  # for a rank 0 that has died
    assert mapped is not None
    return mapped


def _made(named: bool, nbytes: int) -> tuple[MemoryFile | None, str]:
    """Return a file of ``nbytes``, or the reason why there is none."""
    try:
        file = MemoryFile(named)
    except (OSError, MemoryError) as error:
        return None, str(error) or repr(error)
    try:
        if named:  # its file system has a size; what is missing later would end the process
            os.posix_fallocate(file.fd, 0, nbytes)
        else:
            os.ftruncate(file.fd, nbytes)
    except OSError as error:
        file.close()
        return None, f"{nbytes:,} bytes: {error}"
    return file, ""


def _mapped(path: str, nbytes: int) -> tuple[Array | None, str]:
    try:
        fd = open_memory(path)
        try:
            return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8), ""
        finally:
            os.close(fd)
    except (OSError, MemoryError) as error:
        return None, str(error) or repr(error)


def _raise_on_all(backend: Backend, error: str) -> None:
    errors = [text.decode() for text in exchange_bytes(backend, error.encode())]
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    if failed:
        raise UnavailableEverywhereError(
            f"rank {backend.rank} of {backend.size}: memory for all ranks of this host cannot be "
            f"mapped: {'; '.join(failed)}. Give it more room (a container needs more memory, or "
            "its /dev/shm more space: docker run --shm-size=1g)"
        )
