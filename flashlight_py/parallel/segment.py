"""What the ranks of a host have in common of a sharded module: parameters, gradients, state.

Each lies once, as flat arrays in memory that all of them map. Between hosts it is summed, and sent,
by the first ranks of each, which all see the whole of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.host_memory import hosts_of, map_zeros, meet
from flashlight_py.errors import TornStateError
from flashlight_py.parallel.shard_buckets import BACKWARD
from flashlight_py.parallel.shard_layout import Chunk, Layout, UnitPlan, pieces_of

DEBUG = "FLASHLIGHT_DEBUG_SHARED"
STEP = "optimizer.step of a sharded module"


class Hosts:
    """The ranks of ``group`` by host: ``local`` joins this host's, ``between`` counterparts.

    Collective, blocking. ``between`` is None where there is one host, and on ranks that have no
    counterpart on each host.
    """

    def __init__(self, group: ProcessGroup) -> None:
        hosts = hosts_of(group)
        self.group, self.count = group, len(hosts)
        self.index = next(i for i, host in enumerate(hosts) if group.rank in host)
        self.leaders = min(len(host) for host in hosts)
        self.sizes = [len(host) for host in hosts]
        self.first_ranks = [host[0] for host in hosts]
        self.local, self.between = group, None
        if self.count > 1:
            place = hosts[self.index].index(group.rank)
            self.local = group.split(self.index)
            leads = place < self.leaders
            between = group.split(place if leads else None)
            self.between = between if leads else None


class HostMemory:
    """Flat arrays by dtype for ``layouts``; collective, blocking.

    Args:
        hosts: the ranks.
        layouts: of each dtype, by its name, where what lies.
        across_hosts: each host steps a part of its own, and sends it to the others.
    """

    __captured_state__ = ("params",)

    def __init__(self, hosts: Hosts, layouts: Mapping[str, Layout], across_hosts: bool) -> None:
        self.hosts, self._layouts = hosts, layouts
        self.across = across_hosts and hosts.count > 1
        dtypes = {name: name.partition(" ")[0] for name in layouts}
        self.params = {name: self.new_flat(name, dtype) for name, dtype in dtypes.items()}
        self.grads = {name: self.new_flat(name, dtype) for name, dtype in dtypes.items()}
        # How often each rank has begun and ended to change parameters: odd while it does.
        self._marks = map_zeros(hosts.local, hosts.local.size * 64).view(np.int64)[::8]
        self.is_debugged = os.environ.get(DEBUG, "0") == "1"
        self.protect(True)

    def new_flat(self, name: str, dtype: DTypeLike) -> Array:
        """Return zeros of ``dtype``, as many as layout ``name`` has. Collective, blocking."""
        kind, length = np.dtype(dtype), self._layouts[name].length
        flat: Array = map_zeros(self.hosts.local, length * kind.itemsize)
        return flat.view(kind) if length else np.zeros(0, kind)

    def pieces(self, name: str, unit: UnitPlan, position: int) -> list[slice]:
        """Return which elements of a parameter this rank steps."""
        within = self.own(name, self.hosts.index) if self.across else None
        return list(pieces_of(unit, position, self.hosts.local.rank, within))

    def own(self, name: str, host: int) -> slice:
        """Return what of a flat array ``host`` steps, where each has a part of its own."""
        length, count = self._layouts[name].length, self.hosts.count
        return slice(length * host // count, length * (host + 1) // count)

    # Changes, and whether one was left half done ----------------------------------------------

    def check(self, what: str) -> None:
        """Refuse ``what`` where a rank has ended while it changed parameters.

        Raises:
            TornStateError: it has.
        """
        marks = self._marks
        if (marks != marks[0]).any() or marks[0] % 2:
            group = self.hosts.group
            raise TornStateError(
                f"[{what}] rank {group.rank} of {group.size}: a rank of this host ended in the "
                "middle of an optimizer's step, so some of the module's parameters are a step "
                "further than others. Go back to the checkpoint: fl.load(path, module=..., "
                "optimizer=...), or start again"
            )

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Return the context in which ranks change parameters; collective, see ``Shards``."""
        self.check(what)
        local, marks = self.hosts.local, self._marks
        meet(local, STEP)
        self.protect(False)
        marks[local.rank] += 1
        yield
        if self.across:
            meet(local, STEP)
            self._share_between_hosts(self.params)
        marks[local.rank] += 1
        self.protect(True)
        meet(local, STEP)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return the context in which this rank sets all parameters; they are whole then."""
        self.protect(False)
        yield
        self._marks[...] = 0
        self.protect(True)

    def protect(self, on: bool) -> None:
        """Where that is asked for, have every write to parameters end the process, or allow it."""
        if not self.is_debugged:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        mode = mmap.PROT_READ if on else mmap.PROT_READ | mmap.PROT_WRITE
        for flat in self.params.values():
            address, nbytes = flat.ctypes.data, flat.nbytes
            if nbytes and libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mode):
                code = ctypes.get_errno()
                raise OSError(code, f"{DEBUG}: mprotect: {os.strerror(code)}")

    # Between hosts ----------------------------------------------------------------------------

    def weigh_old(self, name: str, part: Array, chunk: Chunk) -> None:
        """Scale this rank's part of a sum of earlier passes, which is summed between hosts anew."""
        if self.hosts.count == 1:
            return
        ranks = self.hosts.group.size
        if not self.across:
            part *= part.dtype.type(ranks / self.hosts.count)
            return
        start = chunk.part_of(self.hosts.local.rank).start
        own = self.own(name, self.hosts.index)
        low, high = (min(max(edge - start, 0), part.size) for edge in (own.start, own.stop))
        part[:low] = part[high:] = 0
        part[low:high] *= part.dtype.type(ranks)

    def sum_between_hosts(self) -> None:
        """Add up the hosts' gradients; complete on this host when all its ranks have returned."""
        if self.hosts.count == 1:
            return
        meet(self.hosts.local, BACKWARD)
        between = self.hosts.between
        if between is None:
            return
        scale = 1.0 / self.hosts.group.size
        for name, flat in self.grads.items():
            if not self.across:
                part = flat[self._led(0, flat.size)]
                if part.size:
                    between.all_reduce(part, scale=scale)
                continue
            for host, part in enumerate(self._led_by_host(name, flat)):
                if part.size:
                    between.reduce(part, root=host, scale=scale)

    def _share_between_hosts(self, flats: Mapping[str, Array]) -> None:
        """Send each host's part of ``flats``, arrays of layouts by name, to the others."""
        between = self.hosts.between
        for name, flat in flats.items():
            for host, part in enumerate(self._led_by_host(name, flat)):
                if between is not None and part.size:
                    between.broadcast(part, root=host)

    def _led(self, start: int, stop: int) -> slice:
        """Return what of these elements this rank exchanges between hosts."""
        leaders, index, count = self.hosts.leaders, self.hosts.local.rank, stop - start
        return slice(start + count * index // leaders, start + count * (index + 1) // leaders)

    def _led_by_host(self, name: str, flat: Array) -> Sequence[Array]:
        parts = [self.own(name, host) for host in range(self.hosts.count)]
        if self.hosts.between is None:
            return []
        return [flat[self._led(part.start, part.stop)] for part in parts]
