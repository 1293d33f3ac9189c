"""One array per host: made by one rank, mapped read-only by all that share memory with it."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.exchange import BackendStore
from flashlight_py.distributed.memory.memory_file import MemoryFile, needs_names, open_memory
from flashlight_py.distributed.memory.topology import exchange_process_info, ranks_by_memory
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import RankFailedError

# What is copied at once: large for a disk, small beside a data set.
_PIECE_BYTES = 16 << 20

_log = logging.getLogger("flashlight_py")


class Layout(NamedTuple):
    """The shape and the dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes, at least one: nothing cannot be mapped."""
        return max(1, int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize)


def array_of_host(backend: Backend, load: Callable[..., Any], layout: Layout | None) -> Array:
    """Return what ``load`` makes on the first of those ranks that share memory. Collective.

    With a ``layout`` it fills the array that it is given, else it returns one.

    Raises:
        Exception: what ``load`` raises, where it was called.
        RankFailedError: on the others; names the rank.
    """
    store = BackendStore(backend)
    exchange_process_info(store, checks=True)  # all ranks have agreed on that already
    hosts, apart = ranks_by_memory(store)
    if apart and store.rank == 0:
        _log.warning("host_array: there is more than one copy on a host: %s", apart)
    loader = next(host[0] for host in hosts if store.rank in host)
    named = needs_names(store.spaces)
    file, path, error = None, "", None
    try:
        if loader == store.rank:
            file, layout, error = _load(load, layout, named)
        mine = _words(error), "" if file is None else file.path, layout
        offers = [pickle.loads(each) for each in store.exchange(pickle.dumps(mine))]
        _, path, layout = offers[loader]
        _raise_first(store, "while it made it", [problem for problem, _, _ in offers], error)
        array, error = _map(path if file is None else file.own_path, layout)
        problems = [text.decode() for text in store.exchange(_words(error).encode())]
        _raise_first(store, "while it mapped it", problems, error)
    finally:  # also where a rank was lost meanwhile, or a signal handler raised
        if file is not None:
            file.close()
        elif path and named:
            Path(path).unlink(missing_ok=True)  # for a rank that has died
    return array


def _load(
    load: Callable[..., Any], layout: Layout | None, named: bool
) -> tuple[MemoryFile | None, Layout | None, Exception | None]:
    """Return a file with the array, and the array's layout; or the exception of ``load``."""
    file = None
    try:
        source = None if layout is not None else _checked(load())
        if source is not None:
            layout = Layout(source.shape, source.dtype)
        assert layout is not None
        file = MemoryFile(named)
        fd = open_memory(file.own_path)
        try:
            # Reserved now, a lack of memory is an error here; later it would be a SIGBUS.
            os.posix_fallocate(fd, 0, layout.nbytes)
            target = _array_in(mmap.mmap(fd, layout.nbytes), layout)
        finally:
            os.close(fd)
        if source is None:
            load(target)
        else:
            _copy(source, target)
    except BaseException as error:
        if file is not None:
            file.close()
        if not isinstance(error, Exception):
            raise
        return None, None, error  # load may raise anything; every rank raises it
    return file, layout, None


def _checked(loaded: Any) -> Array:
    """Return what ``load`` has returned as a NumPy array, without a copy where it is one."""
    if is_cupy(loaded):
        raise TypeError("host_array: load returned a CuPy array; return array.get()")
    array = np.asarray(loaded)
    check_dtype(array.dtype)
    return array


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Refuse a dtype whose elements are addresses.

    Raises:
        TypeError: it holds Python objects, which other processes cannot read.
    """
    if dtype.hasobject:
        raise TypeError(
            f"host_array: {dtype} holds Python objects, which other processes cannot read; "
            "use numbers, or bytes of a fixed length"
        )


def _copy(source: Array, target: Array) -> None:
    """Copy in pieces, and let go of the pages of a file as soon as they are copied."""
    if source.ndim == 0:
        target[...] = source
        return
    rows = max(1, _PIECE_BYTES * len(source) // max(1, source.nbytes))
    pages = _pages_of(source)
    for start in range(0, len(source), rows):
        target[start : start + rows] = source[start : start + rows]
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)


def _pages_of(source: Array) -> mmap.mmap | None:
    """Return what maps the file of ``source``; None where it has none, or may have changed it."""
    base: Any = source
    is_unchanged = False
    while isinstance(base, np.ndarray):
        is_unchanged |= isinstance(base, np.memmap) and base.mode == "r"
        base = base.base
    return base if is_unchanged and isinstance(base, mmap.mmap) else None


def _map(path: str, layout: Layout) -> tuple[Array, Exception | None]:
    """Return the array at ``path``, read-only, or why it cannot be mapped."""
    try:
        fd = open_memory(path)
        try:
            memory = mmap.mmap(fd, layout.nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except OSError as error:
        return np.empty(0), error
    return _array_in(memory, layout), None


def _array_in(memory: mmap.mmap, layout: Layout) -> Array:
    """Return an array that keeps ``memory`` mapped until it is dropped."""
    array: Array = np.ndarray(layout.shape, layout.dtype, buffer=memory)
    return array


def _words(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _raise_first(store: Store, doing: str, problems: Sequence[str], own: Exception | None) -> None:
    """Raise this rank's own exception, else that of the first rank which has one.

    Raises:
        RankFailedError: the exception was raised on another rank.
    """
    if own is not None:
        raise own
    for rank, problem in enumerate(problems):
        if problem:
            raise RankFailedError(
                f"[host_array] rank {store.rank} of {store.size}: rank {rank}, raised "
                f"{doing}: {problem}. No rank has an array; the group "
                "goes on",
                rank,
            )
