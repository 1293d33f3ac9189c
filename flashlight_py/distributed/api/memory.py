"""Arrays in memory that the ranks of a host share."""

from __future__ import annotations

import logging
import math
import mmap
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.api.verb_call import Group, reason_of, refusing
from flashlight_py.distributed.backends.exchange import BackendStore
from flashlight_py.distributed.calls.arrays import dtype_code
from flashlight_py.distributed.calls.checks import whole
from flashlight_py.distributed.groups.membership import of
from flashlight_py.distributed.memory.memory_file import MemoryFile, made_together, open_memory
from flashlight_py.distributed.memory.memory_room import LITTLE, reserve, shared_array
from flashlight_py.distributed.memory.topology import exchange_process_info, ranks_by_memory
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import OutOfMemoryError, RankFailedError

__all__ = ["host_array", "shared_empty"]

# So much is copied at once: large for a disk, small beside a data set.
_PIECE_BYTES = 16 << 20

_log = logging.getLogger("flashlight_py")


def shared_empty(
    shape: int | Sequence[int], dtype: DTypeLike = np.float32, *, group: Group = None
) -> Array:
    """Return a new NumPy array, not initialised, that collectives reduce where it is.

    Its memory is shared by the ranks of a host, so nothing is copied on the way; where there is
    no such memory it is an ordinary array. Views of it count as well. Collective, blocking: every
    rank must call it, with the same shape and dtype.

    Args:
        shape: the dimensions.
        dtype: any that :func:`all_reduce` takes.
        group: the process group, default the world.

    Raises:
        ValueError: a dimension is negative.
        TypeError: the dtype cannot be sent.
        OutOfMemoryError: there is not enough memory, of this host or its container, for an ordinary
            array either; raised on every rank, before anything is taken.
        DistributedError: as for :func:`all_reduce`.
    """
    members = of(group)
    with refusing(members, "shared_empty"):
        extents, kind = _extents("shared_empty", shape), np.dtype(dtype)
        dtype_code("shared_empty", kind)
        backend = members.backend()
        with members.journal.recording("shared_empty", like=(kind, extents)):
            if math.prod(extents) * kind.itemsize * backend.size < LITTLE:  # never refused
                return shared_array(backend, extents, kind)
            store = BackendStore(backend, "shared_empty")
            array: Array = made_together(store, lambda: shared_array(backend, extents, kind))
            return array


def host_array(
    load: Callable[..., Any],
    shape: int | Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
    *,
    group: Group = None,
) -> Array:
    """Return one read-only array per host: one rank loads it, all ranks of the host map it.

    For data sets: eight ranks hold one copy instead of eight. The memory is anonymous: it is freed
    when the last rank has dropped the last array or view of it, or has ended, however it ended.
    Writing to the array raises ValueError, and no rank has it mapped writable. It outlives the
    group. Ranks that cannot share memory count as hosts of their own, with a warning where they
    run on one machine.

    Collective, blocking: every rank calls it, and the others wait while one loads, which must not
    take longer than the group's timeout. ``load`` itself must not call a collective of the group.

    Args:
        load: called on the first rank of each host, and on no other. Without ``shape`` it takes
            nothing and returns an array of any shape and dtype, or what ``numpy.asarray`` makes one
            of; that is copied, and not kept. While it is copied there are two; of a
            ``numpy.memmap`` that was opened with mode ``"r"`` only 16 MB of the second.
        shape: with a shape, ``load`` is called with a new array of zeros, writable and C-ordered,
            and fills it in place: there is one copy at any time. It must not keep it.
        dtype: of that array; counts with ``shape`` only.
        group: the process group, default the world.

    Returns:
        A C-ordered NumPy array, the same on all ranks of a host. Hosts may load different ones.

    Raises:
        TypeError: ``load`` is not callable, or the dtype holds Python objects.
        ValueError: a dimension is negative.
        Exception: what ``load`` raises, on the rank where it does. The group goes on.
        OutOfMemoryError: there is not enough memory; raised on every rank, as soon as it is known:
            with ``shape`` before ``load`` is called. The group goes on.
        RankFailedError: ``load`` raised on another rank (named).
        DistributedError: as for :func:`all_reduce`.

    Example:
        >>> images = fl.host_array(lambda: np.arange(6, dtype=np.float32).reshape(3, 2))
        >>> images[1], images.flags.writeable
        (array([2., 3.], dtype=float32), False)
    """
    members = of(group)
    with refusing(members, "host_array"):
        if not callable(load):
            raise TypeError(
                f"host_array: load must be a function that returns an array, got "
                f"{type(load).__name__}; only one rank of each host calls it"
            )
        layout = None
        if shape is not None:
            layout = Layout(_extents("host_array", shape), _checked(np.dtype(dtype)))
        store = BackendStore(members.backend(), "host_array")
        with members.journal.recording("host_array"):
            return _array_of_host(store, load, layout)


def _extents(caller: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape, as NumPy lets it be written, as a tuple."""
    alone = whole(shape)
    given = tuple(shape) if alone is None else (alone,)  # type: ignore[arg-type]
    extents = tuple(extent for extent in map(whole, given) if extent is not None and extent >= 0)
    if len(extents) < len(given):
        raise ValueError(
            f"{caller}: a shape consists of integers that are not negative, got {given}"
        )
    return extents


class Layout(NamedTuple):
    """The shape and the dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _array_of_host(store: Store, load: Callable[..., Any], layout: Layout | None) -> Array:
    """Return what ``load`` makes on the first of those ranks that share memory. Collective.

    With a ``layout`` it fills the array that it is given, else it returns one.
    """
    exchange_process_info(store, checks=True)  # all ranks have agreed on that already
    sharing = ranks_by_memory(store)
    if sharing.apart and store.rank == 0:
        _log.warning("host_array: there is more than one copy on a host: %s", sharing.apart)
    loader = sharing.groups[sharing.of[store.rank]][0]
    file, path, error, words = None, "", None, ""
    try:
        if loader == store.rank:
            try:
                file, layout = _load(load, layout, store.named)
            except Exception as failure:  # noqa: BLE001  (it may be any; every rank raises it)
                error, words = failure, reason_of(failure)
        mine = words, "" if file is None else file.path, layout
        offers = [pickle.loads(each) for each in store.exchange(pickle.dumps(mine))]
        _, path, layout = offers[loader]
        _raise_first(store, "while it made it", [problem for problem, _, _ in offers], error)
        try:
            array = _array_at(path, layout)
        except OSError as failure:
            error, words = failure, reason_of(failure)
        problems = [text.decode() for text in store.exchange(words.encode())]
        _raise_first(store, "while it mapped it", problems, error)
    finally:  # also where a rank was lost meanwhile, or a signal handler raised
        del error  # whose traceback has this frame
        if file is not None:
            file.close()
        elif path and store.named:
            Path(path).unlink(missing_ok=True)  # for a rank that has died
    return array


def _load(
    load: Callable[..., Any], layout: Layout | None, named: bool
) -> tuple[MemoryFile, Layout]:
    """Return a file with the array, and the array's layout."""
    source = None
    if layout is None:
        source = load()
        if is_cupy(source):
            raise TypeError("host_array: load returned a CuPy array; return array.get()")
        source = np.asarray(source)
        layout = Layout(source.shape, _checked(source.dtype))
    file = MemoryFile(named)
    try:
        target = _array_at(file.path, layout, new=True)
        if source is None:
            load(target)
        else:
            _copy(source, target)
    except BaseException:
        file.close()
        raise
    return file, layout


def _array_at(path: str, layout: Layout, new: bool = False) -> Array:
    """Return an array in the memory at ``path``, which is mapped until it is dropped."""
    nbytes = max(1, int(np.prod(layout.shape, dtype=object)) * layout.dtype.itemsize)
    with open_memory(path) as fd:
        if new:
            try:
                reserve(fd, nbytes, f"host_array, {layout.dtype} {layout.shape}")
            except MemoryError as error:
                raise OutOfMemoryError(error) from None
        memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | new * mmap.PROT_WRITE)
    return np.ndarray(layout.shape, layout.dtype, buffer=memory)


def _checked(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.hasobject:
        raise TypeError(
            f"host_array: {dtype} holds Python objects, which other processes cannot read; "
            "use numbers, or bytes of a fixed length"
        )
    return dtype


def _copy(source: Array, target: Array) -> None:
    """Copy in pieces, and let go of the pages of a file, which cannot have changed, at once."""
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


def _raise_first(store: Store, doing: str, problems: Sequence[str], own: Exception | None) -> None:
    """Raise this rank's own exception, else RankFailedError for the first rank that has one.

    Where a rank lacks memory every rank raises an OutOfMemoryError.
    """
    lacking = f"{OutOfMemoryError.__name__}: "
    for rank, problem in enumerate(problems):
        if problem.startswith(lacking):
            raise OutOfMemoryError(
                f"[host_array] rank {store.rank} of {store.size}: there is not enough memory on "
                f"rank {rank}. {problem.removeprefix(lacking)}"
            )
    try:
        if own is not None:
            raise own
    finally:
        del own
    for rank, problem in enumerate(problems):
        if problem:
            raise RankFailedError(
                f"[host_array] rank {store.rank} of {store.size}: rank {rank}, raised {doing}: "
                f"{problem}. No rank has an array; the group goes on",
                rank,
            )
