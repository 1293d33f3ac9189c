"""Communication of NumPy arrays between the processes of one host, through shared memory.

The native code is in csrc/shm. A blocking operation runs on the thread of the caller. Other
operations run on threads of the group: collectives one after another, messages in parallel.
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed.backend import BackendStore
from flashlight_py.distributed.backends import native
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.memory import memory_file
from flashlight_py.distributed.rendezvous.store import Store, Subgroup
from flashlight_py.errors import BackendUnavailableError, OutOfMemoryError

_PAGE = 4096

# Number of bits for a rank in the 32-bit number of a subgroup; see ``ShmBackend.subgroup``.
_RANK_BITS = 12

_log = logging.getLogger("flashlight_py")


class ShmBackend(native.NativeBackend):
    """Backend for the ranks of ``store``, all on this host. Creation is collective and blocks.

    ``timeout`` (seconds) bounds each wait of an operation. If ``at_once``, no call returns before
    all ranks have made the call. If the ranks share the memory of a larger group
    (``Store.memory_subgroup``), messages use that memory.

    Raises BackendUnavailableError on every rank if the native extension is missing, or shared
    memory is too small or not writable.
    """

    kind = DistributedBackend.SHM
    path = "shared memory"
    asks_for_sites = True
    packed_bytes = 8 << 10, 0  # see ``Backend``: copying 8 KiB takes as long as one more call
    steps = ("fl_begin", "fl_ready", "fl_finish", "fl_post", "fl_deliver")

    def __init__(self, store: Store, timeout: float, at_once: bool = False) -> None:
        extension = _native.load_extension("shm")
        super().__init__(extension, store, timeout)
        self.hosts = [range(self.size)]
        self._named = memory_file.needs_names(store.spaces)
        subgroup = store.memory_subgroup
        self._subgroup = subgroup if subgroup and min(subgroup.ranks) >= 0 else None
        self.memory = self
        ranks = range(self.size) if self._subgroup is None else self._subgroup.ranks
        self.memory_ranks = self.network_ranks = list(ranks)
        self._begin(extension, memory_file.map_together(store, self._map, self._named), at_once)
        self._do("on_mismatch", self.group, native.call_site_callback(extension))

    def subgroup(self, ranks: Sequence[int], count: int, first: int) -> Subgroup | None:
        """Return a ``Subgroup`` of ``ranks``; None if its number would exceed 32 bits."""
        number = (count << _RANK_BITS | first) << 1
        fits = first >> _RANK_BITS == 0 and number < 1 << 32
        return Subgroup(self, ranks, number, False) if fits else None

    def _map(self, path: str, create: bool) -> Any:
        common = path.encode(), create, self._named, self.rank, self.size
        if self._subgroup is None:
            group = self.lib.fl_shm_open(*common)
        else:
            ranks = self.ffi.new("int[]", self._subgroup.ranks)
            parent = self._subgroup.parent._open("new_group")
            group = self.lib.fl_shm_part(parent, ranks, self._subgroup.number, *common)
        if group == self.ffi.NULL:
            raise OSError(self.reason())
        return self._owned(group)

    def look_back(self, name: str, seconds: float) -> bool:
        """Return whether all ranks have joined the calls that this rank made ahead. Does not block.

        Such calls (``Call.is_ahead``) return before other ranks join. ``name`` is the name of the
        last call, for errors. Raises MismatchError if the ranks made different calls, and
        CollectiveTimeoutError if a rank is late by more than ``seconds``.
        """
        if (group := self.group) is None:
            return True  # the next wait raises the error
        is_behind = self.ffi.new("int *")
        handle = self.lib.fl_look_back(group, seconds, is_behind)
        if handle != self.ffi.NULL:
            native.NativeWork(self, name, handle, (), seconds).wait()
        return not is_behind[0]

    def shared_by_all(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
        """Return one array for each rank, in memory that all ranks map; see ``shared_arrays``.

        If there is too little shared memory, every rank warns and returns ordinary memory. If there
        is too little ordinary memory, every rank raises OutOfMemoryError.
        """
        stride = max(_PAGE, -(-math.prod(shape) * dtype.itemsize // _PAGE) * _PAGE)
        store = BackendStore(self, "shared_empty")

        def add(path: str, create: bool) -> Any:
            group, name = self._open("shared_empty"), path.encode()
            large = create and stride * self.size >= memory_file.LITTLE
            if large:
                purpose = f"shared_empty, {self.size} arrays of {dtype} {shape}"
                with memory_file.open_memory(path) as fd:
                    memory_file.reserve(fd, stride * self.size, purpose)
            region = self.lib.fl_add_region(group, name, create + large, stride)
            if region == self.ffi.NULL:
                raise OSError(self.reason())
            return region

        try:
            region = memory_file.map_together(store, add, self._named)
        except OutOfMemoryError:
            raise
        except BackendUnavailableError as error:
            _log.warning("shared_empty%s returns ordinary memory: %s", shape, error)
            make = partial(memory_file.ordinary_empty, shape, dtype, self.size)
            return [memory_file.made_together(store, make)]
        pointer = self.ffi.cast("char *", self.lib.fl_region_array(region))
        # The array may be collected during a wait that holds the lock of the group. The next
        # operation therefore frees the memory.
        owners = (
            native.freed_by(self.ffi, pointer, self.unused.append),
            native.freed_by(self.ffi, region, self.lib.fl_free_region),
        )
        begin = native.keeping(self.ffi, pointer - self.rank * stride, owners)
        memory = self.ffi.buffer(begin, stride * self.size)
        return [np.ndarray(shape, dtype, memory, rank * stride) for rank in range(self.size)]
