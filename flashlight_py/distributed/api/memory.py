"""Arrays in shared memory of the ranks of a host."""

import contextlib
import logging
import math
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py import _native
from flashlight_py.checks import as_integer
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.api.verb_call import Group, reason_of, reject_together
from flashlight_py.distributed.backend import BackendStore
from flashlight_py.distributed.calls.arrays import dtype_code
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import combine_natively, combined
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.groups.membership import members_of
from flashlight_py.distributed.memory import memory_file
from flashlight_py.distributed.memory.topology import exchange_process_info, ranks_by_memory
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.verbs import BARRIER
from flashlight_py.errors import OutOfMemoryError, RankFailedError

if TYPE_CHECKING:
    from flashlight_py.distributed.api.group import ProcessGroup

__all__ = ["host_array", "shared_empty"]

# Maximum number of bytes that are copied in one step.
_PIECE_BYTES = 16 << 20

_log = logging.getLogger("flashlight_py")


def shared_empty(
    shape: int | Sequence[int], dtype: DTypeLike = np.float32, *, group: Group = None
) -> Array:
    """Return a new uninitialised NumPy array that collectives reduce without copies.

    The array is stored in memory that all ranks of a host share, so collectives need not copy the
    array or a view of it. If the ranks cannot share memory, the array is an ordinary array.
    Collective; blocks. Every rank must pass the same arguments.

    Args:
        shape: Dimensions of the array.
        dtype: Any dtype that :func:`all_reduce` accepts.
        group: The process group. Default: the world.

    Raises:
        ValueError: If a dimension is negative.
        TypeError: If :func:`all_reduce` does not accept the dtype.
        OutOfMemoryError: If the host or its container has too little free memory. Every rank raises
            it, before any memory is allocated.
        DistributedError: As for :func:`all_reduce`.
    """
    members = members_of(group)
    with reject_together(members, "shared_empty"):
        extents, kind = _extents("shared_empty", shape), np.dtype(dtype)
        dtype_code("shared_empty", kind)
        backend = members.backend()
        with members.journal.recording("shared_empty", like=(kind, extents)):
            nbytes = math.prod(extents) * kind.itemsize * backend.size
            if nbytes < memory_file.LITTLE:  # memory is not checked
                return memory_file.shared_array(backend, extents, kind)
            store = BackendStore(backend, "shared_empty")
            return memory_file.made_together(
                store, lambda: memory_file.shared_array(backend, extents, kind)
            )


def host_array(
    load: Callable[..., Any], shape: int | Sequence[int] | None = None,
    dtype: DTypeLike = np.float32, *, group: Group = None,
) -> Array:  # fmt: skip
    """Return a read-only array that one rank of each host loads and all ranks of the host share.

    Use it for data sets: eight ranks need one copy instead of eight. Writing to the array raises
    ValueError. The kernel frees the memory when no rank of the host has the array or a view of it
    any more, even if ranks were killed. The array remains valid after the group is closed. If ranks
    of one machine cannot share memory, they count as separate hosts, and a warning is logged.

    Collective; blocks. Other ranks wait while one rank loads, so loading must take less than the
    timeout of the group. ``load`` must not call a collective of the group.

    Args:
        load: Function that only the first rank of each host calls. Without ``shape`` it takes no
            argument, and returns an array or any other argument of ``numpy.asarray``. The array is
            copied, so the host needs memory for two copies. For a ``numpy.memmap`` of mode ``"r"``,
            it needs only one copy and 16 MB.
        shape: Shape of the array. If it is passed, ``load`` is called with a new C-ordered array of
            zeros and fills this array, so no second copy exists. ``load`` must not keep a reference
            to it.
        dtype: Dtype of the array of zeros. Used only with ``shape``.
        group: The process group. Default: the world.

    Returns:
        A C-ordered NumPy array, the same on all ranks of a host. Hosts may load different arrays.

    Raises:
        TypeError: If ``load`` is not callable, or the dtype contains Python objects.
        ValueError: If a dimension is negative.
        Exception: If ``load`` raises it, on the rank that loads. The group remains usable.
        OutOfMemoryError: If memory is insufficient. Every rank raises it. With ``shape``, memory is
            checked before ``load`` is called.
        RankFailedError: If ``load`` raises on another rank. The error names the rank.
        DistributedError: As for :func:`all_reduce`.

    Example:
        >>> images = fl.host_array(lambda: np.arange(6, dtype=np.float32).reshape(3, 2))
        >>> images[1], images.flags.writeable
        (array([2., 3.], dtype=float32), False)
    """
    members = members_of(group)
    with reject_together(members, "host_array"):
        if not callable(load):
            raise TypeError(
                f"host_array: load must be a function that returns an array, got "
                f"{type(load).__name__}. Pass the function, not its result."
            )
        layout = None
        if shape is not None:
            layout = Layout(_extents("host_array", shape), _check_dtype(np.dtype(dtype)))
        store = BackendStore(members.backend(), "host_array")
        with members.journal.recording("host_array"):
            return _array_of_host(store, load, layout)


def _extents(caller: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    length = as_integer(shape)
    values = tuple(shape) if length is None else (length,)  # type: ignore[arg-type]
    extents = tuple(n for n in map(as_integer, values) if n is not None and n >= 0)
    if len(extents) < len(values):
        raise ValueError(f"{caller}: shape must consist of non-negative integers, got {values}")
    return extents


class Layout(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _array_of_host(store: Store, load: Callable[..., Any], layout: Layout | None) -> Array:
    """Load an array on the first rank of each host, and map it on all ranks. Collective.

    With a ``layout``, ``load`` fills an array of this layout. Otherwise ``load`` returns an array.
    """
    exchange_process_info(store, checks=True)  # distributed_init has compared FLASHLIGHT_CHECKS
    sharing = ranks_by_memory(store)
    if sharing.apart and store.rank == 0:
        _log.warning("host_array: a host has more than one copy of the array: %s", sharing.apart)
    loader = sharing.groups[sharing.of[store.rank]][0]
    file, path, error, words = None, "", None, ""
    try:
        if loader == store.rank:
            try:
                file, layout = _load(load, layout, store.named)
            except Exception as failure:  # noqa: BLE001 (any type; every rank raises an error)
                error, words = failure, reason_of(failure)
        offer = words, "" if file is None else file.path, layout
        offers = [pickle.loads(data) for data in store.exchange(pickle.dumps(offer))]
        _, path, layout = offers[loader]
        _raise_first(store, [problem for problem, _, _ in offers], error)
        return memory_file.made_together(store, lambda: _map_array(path, layout))
    finally:  # runs even if another rank dies or a signal handler raises
        del error  # its traceback refers to this frame
        if file is not None:
            file.close()
        elif path and store.named:
            Path(path).unlink(missing_ok=True)  # the loading rank may have died


def _load(
    load: Callable[..., Any], layout: Layout | None, named: bool
) -> tuple[memory_file.MemoryFile, Layout]:
    source = None
    if layout is None:
        source = load()
        if is_cupy(source):
            raise TypeError(
                "host_array: load must return a NumPy array, got a CuPy array. Return array.get()."
            )
        source = np.asarray(source)
        layout = Layout(source.shape, _check_dtype(source.dtype))
    file = memory_file.MemoryFile(named)
    try:
        target = _map_array(file.path, layout, new=True)
        if source is None:
            load(target)
        else:
            _copy(source, target)
    except BaseException:
        file.close()
        raise
    return file, layout


def _map_array(path: str, layout: Layout, new: bool = False) -> Array:
    nbytes = max(1, int(np.prod(layout.shape, dtype=object)) * layout.dtype.itemsize)
    with memory_file.open_memory(path) as fd:
        if new:
            try:
                memory_file.reserve(fd, nbytes, f"host_array, {layout.dtype} {layout.shape}")
            except MemoryError as error:
                raise OutOfMemoryError(error) from None
        memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | new * mmap.PROT_WRITE)
    return np.ndarray(layout.shape, layout.dtype, buffer=memory)


def _check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.hasobject:
        raise TypeError(
            f"host_array: dtype must not contain Python objects, got {dtype}. Use a numeric dtype "
            "or bytes of fixed length."
        )
    return dtype


def _copy(source: Array, target: Array) -> None:
    """Copy ``source`` in steps. If it is a read-only ``numpy.memmap``, free its copied pages."""
    source, target = np.atleast_1d(source, target)
    rows = max(1, _PIECE_BYTES * len(source) // max(1, source.nbytes))
    base: Any = source
    is_unchanged = False
    while isinstance(base, np.ndarray):
        is_unchanged |= isinstance(base, np.memmap) and base.mode == "r"
        base = base.base
    for start in range(0, len(source), rows):
        target[start : start + rows] = source[start : start + rows]
        if is_unchanged and isinstance(base, mmap.mmap):
            base.madvise(mmap.MADV_DONTNEED)


def _raise_first(store: Store, problems: list[str], failure: Exception | None) -> None:
    """Raise an error if a rank failed. ``problems`` has one text for each rank, "" for success."""
    where, lacking = f"[host_array] rank {store.rank} of {store.size}", "OutOfMemoryError: "
    failed = [(rank, problem) for rank, problem in enumerate(problems) if problem]
    for rank, problem in failed:
        if problem.startswith(lacking):
            reason = problem.removeprefix(lacking)
            raise OutOfMemoryError(f"{where}: rank {rank} has not enough memory. {reason}")
    try:
        if failure is not None:
            raise failure
    finally:
        del failure
    for rank, problem in failed:
        raise RankFailedError(
            f"{where}: rank {rank} raised while loading: {problem}. No rank has an array. The "
            "group remains usable.",
            rank,
        )


def hosts_of(group: "ProcessGroup") -> list[list[int]]:
    """Return the ranks of ``group`` that share memory with each other, one list for each host.

    If the backend uses only a network, each rank is treated as a host.
    """
    hosts = group.backend().hosts or [[rank] for rank in range(group.size)]
    return [list(host) for host in hosts]


def store_of(group: "ProcessGroup") -> BackendStore:
    return BackendStore(group.backend(), "shared_empty")


def wait_for_ranks(group: "ProcessGroup", doing: str) -> None:
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


def map_zeros(group: "ProcessGroup", nbytes: int, purpose: str, unwritten: int = 0) -> Array:
    """Return ``nbytes`` zeros (uint8) that all ranks of ``group`` map. Collective, blocking.

    Unwritten pages use no memory, and the memory is freed after its last use. The ranks must be
    able to share memory. A rank sees writes of other ranks at any time, so the caller must wait for
    the ranks between writes and reads. Errors contain ``purpose``.
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

    return memory_file.map_together(store, map_path, store.named)
