"""Memory that the ranks of a host share of a sharded module: parameters, gradients, state.

Each lies once, as flat arrays in memory that all of them map. Between hosts it is summed, and sent,
by the first ranks of each, which all see the whole of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, to_device
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.calls.running import refusing
from flashlight_py.distributed.memory.host_memory import hosts_of, map_zeros, meet
from flashlight_py.errors import TornStateError, UnavailableEverywhereError
from flashlight_py.optim.cpu import sum_of_squares
from flashlight_py.optim.optimizer import Placement
from flashlight_py.parallel.agreement import of_all_ranks
from flashlight_py.parallel.shard_buckets import BACKWARD
from flashlight_py.parallel.shard_layout import Chunk, Layout, UnitPlan, pieces_of

if TYPE_CHECKING:
    from flashlight_py.parallel.fully_sharded import HostShards

DEBUG = "FLASHLIGHT_DEBUG_SHARED"
STEP = "optimizer.step of a sharded module"
# What ends the name of a layout of parameters that do not learn; before it stands their dtype.
FROZEN = " frozen"


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

    @contextlib.contextmanager
    def together(self, verb: str) -> Iterator[None]:
        """Return a block of ``verb`` that either ends on all ranks or raises on all. Collective.

        Raises:
            MismatchError, UnavailableEverywhereError: another rank has failed; with its reason.
        """
        try:
            with refusing(self.local, verb, how="failed"):
                yield
                self.local.barrier()
        except Exception as error:
            if self.count > 1:
                of_all_ranks(f"{type(error).__name__}: {error}", self.group)
            raise
        failed = of_all_ranks("", self.group) if self.count > 1 else []
        for rank, reason in enumerate(failed):
            if reason:
                raise UnavailableEverywhereError(
                    f"[{verb}] rank {self.group.rank} of {self.group.size}: rank {rank} has failed "
                    f"({reason}), so no rank has changed anything; mend that and call it again"
                )


class EachOnce:
    """Sums over ranks what each host has as a whole, ``copies`` in all; the same on every rank."""

    def __init__(self, members: ProcessGroup, copies: int) -> None:
        self._members, self._copies = members, copies

    def all_reduce(self, x: Any) -> Any:
        """Sum ``x`` over the ranks, in place; see ``Summing``."""
        return self._members.all_reduce(x, scale=1.0 / self._copies)


class HostMemory:
    """Flat arrays by dtype for ``layouts``; collective, blocking.

    Args:
        hosts: the ranks.
        layouts: the layout of each dtype, by its name.
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
        self._lock = threading.RLock()  # of the thread that changes parameters
        self._change = ""  # what does
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

        While marks differ, all ranks are in ``changing``, or were when one ended: so another thread
        of this rank is waited for, if that is it.

        Raises:
            TornStateError: it has.
            RuntimeError: this thread itself is changing them.
        """
        if not self._are_torn():
            return
        group = self.hosts.group
        where = f"[{what}] rank {group.rank} of {group.size}:"
        with self._lock:
            if self._change:
                raise RuntimeError(
                    f"{where} called inside of {self._change}, which changes the module's "
                    "parameters: some are a step further than others. Call it afterwards"
                )
            if self._are_torn():
                raise TornStateError(
                    f"{where} a rank of this host ended or failed in the middle of a step, so some "
                    "of the module's parameters are a step further than others. Go back to "
                    "the checkpoint: fl.load(path, module=..., optimizer=...), or start again"
                )

    def _are_torn(self) -> bool:
        return bool((self._marks != self._marks[0]).any() or self._marks[0] % 2)

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Return the context in which ranks change parameters; collective, see ``Shards``."""
        local, marks = self.hosts.local, self._marks
        with self._lock:
            self.check(what)
            self._change = what
            try:
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
            finally:
                self._change = ""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return the context in which this rank sets all parameters; they are whole then."""
        self.protect(False)
        yield
        self._marks[...] = 0
        self.protect(True)

    def protect(self, on: bool) -> None:
        """Have every write to parameters end the process, or allow it, if that is asked for."""
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


class HostPlacement(Placement):
    """The place of one parameter in flat arrays of layout ``name``: at ``position`` of ``unit``."""

    shards: HostShards
    __captured_state__ = ("shards",)

    def __init__(
        self, shards: HostShards, name: str, unit: UnitPlan, position: int, shape: tuple[int, ...]
    ) -> None:
        self.shards, self._name, self._shape = shards, name, shape
        start = unit.starts[position]
        self._place = slice(start, start + unit.sizes[position])
        self._number = unit.numbers[position]
        self._pieces = shards.memory.pieces(name, unit, position)
        self.replays = not shards.steps

    def view(self, flat: Array) -> Array:
        """Return what of a flat array is this parameter's."""
        return flat[self._place].reshape(self._shape)

    def zeros(self, dtype: DTypeLike) -> Array:
        """Return new state for the parameter, zeros; see ``Placement``."""
        flat = self.shards.new_state(self._name, self._number, dtype)
        return self.view(flat)

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        """Return what this process steps; see ``Placement``."""
        memory = self.shards.memory
        data = memory.params[self._name][self._place]
        if self._name.endswith(FROZEN):
            raise ValueError(
                f"a parameter of shape {self._shape} had no calc_grad when fully_shard was called, "
                "so its gradients are not summed; call fully_shard again to train it"
            )
        assert variable.grad is not None
        arrays = [data, *(each.reshape(-1) for each in (variable.grad, *states))]
        return [tuple([array[piece] for array in arrays]) for piece in self._pieces]

    def sum_of_squares(self, variable: Variable) -> float:
        """Return that of the whole gradient; collective across hosts. See ``Placement``."""
        if not self.shards.memory.across:
            return super().sum_of_squares(variable)
        parts = [sum_of_squares(grad) for _, grad in self.pieces(variable, ())]
        return float(self.shards.members.all_reduce(np.array([sum(parts)], np.float64))[0])

    def whole(self, state: Array) -> Array:
        """Return ``state`` in the parameter's shape; collective across hosts."""
        whole = np.array(state) if self.shards.memory.across else state
        for host, part in self._parts():
            root = self.shards.memory.hosts.first_ranks[host]
            self.shards.members.broadcast(whole.reshape(-1)[part], root=root)
        return whole

    def put(self, state: Array, value: Any) -> None:
        """Set what this host keeps of ``state`` to ``value``; see ``Placement``."""
        memory = self.shards.memory
        flat, new = state.reshape(-1), to_device(value, "cpu").reshape(-1)
        parts = dict(self._parts()) if memory.across else {memory.hosts.index: slice(None)}
        own = parts.get(memory.hosts.index)
        if own is not None:
            flat[own] = new[own]

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """Yield which of the parameter's elements which host steps, where each has a part."""
        memory, place = self.shards.memory, self._place
        for host in range(memory.hosts.count if memory.across else 0):
            own = memory.own(self._name, host)
            low, high = max(own.start, place.start), min(own.stop, place.stop)
            if low < high:
                yield host, slice(low - place.start, high - place.start)
