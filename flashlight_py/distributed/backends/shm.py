"""NumPy arrays between the processes of one host, through memory that they share.

The native side is csrc/shm. Operations run on the caller's thread, asynchronous ones on threads of
the group's own: collectives in turn, messages beside them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed.backends.callers import answer_where
from flashlight_py.distributed.backends.exchange import BackendStore
from flashlight_py.distributed.backends.native import NativeBackend
from flashlight_py.distributed.backends.native_work import NativeWork, freed_by, keeping
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.memory.memory_file import (
    made_together,
    map_together,
    needs_names,
    open_memory,
)
from flashlight_py.distributed.memory.memory_room import LITTLE, ordinary_empty, reserve
from flashlight_py.distributed.rendezvous.store import Kin, Store
from flashlight_py.errors import BackendUnavailableError, OutOfMemoryError

_PAGE = 4096

# In the number of a group, which has 32 bits: which rank of the world there may be.
_RANK_BITS = 12

_log = logging.getLogger("flashlight_py")


class ShmBackend(NativeBackend):
    """The ranks of ``store``, which must all run on this host; collective, blocking.

    ``timeout`` (seconds) bounds each wait of an operation. With ``at_once`` no call ends before all
    ranks have made it. Messages go through the memory of a larger group, if there is one
    (``Store.near``).

    Raises:
        BackendUnavailableError: the native extension is missing, or the shared memory cannot be
            had (too small, not writable); raised on every rank.
    """

    kind = DistributedBackend.SHM
    path = "shared memory"
    asks_for_sites = True
    packed_bytes = 8 << 10, 0  # to begin a call takes no longer than to copy its array
    steps = ("fl_begin", "fl_ready", "fl_finish", "fl_post", "fl_deliver")

    def __init__(self, store: Store, timeout: float, at_once: bool = False) -> None:
        native = _native.load("shm")
        super().__init__(native, store, timeout)
        self.hosts = [range(self.size)]
        self._named = needs_names(store.spaces)
        self._kin = store.near if store.near and min(store.near.ranks) >= 0 else None
        self.memory = self
        self.places = list(range(self.size) if self._kin is None else self._kin.ranks)
        self.memory_ranks = self.places
        self._begin(native, map_together(store, self._map, self._named), at_once)
        self._do("on_mismatch", self.group, answer_where(native))

    def kin(self, ranks: Sequence[int], count: int, first: int) -> Kin | None:
        """Return ``ranks`` of the memory as a group, numbered by ``count`` of its first rank."""
        number = (count << _RANK_BITS | first) << 1
        fits = first >> _RANK_BITS == 0 and number < 1 << 32
        return Kin(self, ranks, number, False) if fits else None

    def _map(self, path: str, create: bool) -> Any:
        place = path.encode(), create, self._named, self.rank, self.size
        if self._kin is None:
            group = self.lib.fl_shm_open(*place)
        else:
            ranks = self.ffi.new("int[]", self._kin.ranks)
            whole = self._kin.whole._open("new_group")
            group = self.lib.fl_shm_part(whole, ranks, self._kin.number, *place)
        if group == self.ffi.NULL:
            raise OSError(self.reason())
        return self._owned(group)

    def look_back(self, name: str, seconds: float) -> bool:
        """Compare the calls that this rank made ahead; see ``ComparesAhead``."""
        if (group := self.group) is None:
            return True  # it has ended, and whoever waits raises why
        is_behind = self.ffi.new("int *")
        handle = self.lib.fl_look_back(group, seconds, is_behind)
        if handle != self.ffi.NULL:
            NativeWork(self, name, handle, (), seconds).wait()
        return not is_behind[0]

    def shared_by_all(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
        """Return the array of each rank, in memory that all have mapped; see ``shared_arrays``.

        If there is not enough shared memory, every rank warns and gets ordinary memory. If there is
        not enough of that, every rank raises OutOfMemoryError.
        """
        count = math.prod(shape)
        stride = max(_PAGE, -(-count * dtype.itemsize // _PAGE) * _PAGE)
        store = BackendStore(self, "shared_empty")

        def add(path: str, create: bool) -> Any:
            group, where = self._open("shared_empty"), path.encode()
            large = create and stride * self.size >= LITTLE
            if large:
                what = f"shared_empty, {self.size} arrays of {dtype} {shape}"
                with open_memory(path) as fd:
                    reserve(fd, stride * self.size, what)
            region = self.lib.fl_add_region(group, where, create + large, stride)
            if region == self.ffi.NULL:
                raise OSError(self.reason())
            return region

        try:
            region = map_together(store, add, self._named)
        except OutOfMemoryError:
            raise
        except BackendUnavailableError as error:
            _log.warning("shared_empty%s returns ordinary memory: %s", shape, error)
            return [made_together(store, lambda: ordinary_empty(shape, dtype, self.size))]
        pointer = self.ffi.cast("char *", self.lib.fl_region_array(region))
        # Collected in the middle of a wait, where the group may hold its lock: freed before the
        # next operation.
        parts_of = (
            freed_by(self.ffi, pointer, self._first.append),
            freed_by(self.ffi, region, self.lib.fl_free_region),
        )
        begin = keeping(self.ffi, pointer - self.rank * stride, parts_of)
        whole = self.ffi.buffer(begin, stride * self.size)
        return [np.ndarray(shape, dtype, whole, rank * stride) for rank in range(self.size)]
