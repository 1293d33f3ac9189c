"""How a sharded module's gradients are added up over the ranks, while a backward pass runs.

Units go in the order of the layout. A gradient that is complete before its turn waits as an array
of this rank's own. The product that is a large weight's gradient is computed into the buckets, when
it is its turn; then it never exists as a whole.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import GradSink, is_last_contribution
from flashlight_py.device import Array, array_module, to_device
from flashlight_py.distributed import InlineReducer, ProcessGroup
from flashlight_py.distributed.internal import meet, reject_together
from flashlight_py.errors import DistributedError
from flashlight_py.optim.cpu import BLOCK, sum_of_squares, sums_of_squares
from flashlight_py.optim.optimizer import FirstOrderOptimizer, Placement, Shards
from flashlight_py.parallel.failing import fail
from flashlight_py.parallel.gradient_pass import GradientPass, used_on_any_rank, weigh_in_place
from flashlight_py.parallel.shard_memory import FROZEN, HostMemory, HostUnit
from flashlight_py.structure import as_one

# A gradient, or the two matrices whose product it is.
Given: TypeAlias = "Array | tuple[Array, Array]"


class HostPlace(Placement, GradSink):
    """The place of one parameter in memory of its host, and what takes its gradient there.

    ``total``: where the ranks' sum lies. ``beside``: what this rank adds to a sum of earlier
    passes; else its own gradient is ``Variable.grad`` until it has been sent.
    """

    shards: HostSharder

    def __init__(self, shards: HostSharder, unit: HostUnit, position: int) -> None:
        param, start, memory = unit.params[position], unit.starts[position], shards.memory
        self.shards, self.unit = shards, unit
        self.shape, self.dtype = param.shape, param.dtype
        self._place = slice(start, start + param.size)
        # Of the parameter's elements: what this host steps, and what of it this rank.
        own = memory.own(unit.name, memory.host)
        low, high = (min(max(edge - start, 0), param.size) for edge in (own.start, own.stop))
        self._own = slice(low, high)
        parts = [memory.part(chunk) for chunk in unit.chunks]
        edges = [(max(part.start - start, low), min(part.stop - start, high)) for part in parts]
        self.mine = [slice(*each) for each in edges if each[0] < each[1]]
        self._data = memory.params[unit.name][self._place]
        self.total = self.view(memory.grads[unit.name])
        self.beside: Array | None = None

    def view(self, flat: Array) -> Array:
        """Return what of a flat array is this parameter's."""
        return flat[self._place].reshape(self.shape)

    def zeros(self, variable: Variable, dtype: DTypeLike) -> Array:
        return self.view(self.shards.new_state(self, dtype))

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        if self.unit.name.endswith(FROZEN):
            raise ValueError(
                f"a parameter of shape {self.shape} had no calc_grad when fully_shard was called, "
                "so its gradients are not summed; call fully_shard again to train it"
            )
        assert variable.grad is not None
        arrays = [self._data, *(each.reshape(-1) for each in (variable.grad, *states))]
        return [tuple([array[piece] for array in arrays]) for piece in self.mine]

    def sum_of_squares(self, variable: Variable) -> float:
        if self.shards.memory.across:
            return super().sum_of_squares(variable)
        assert variable.grad is not None
        return sum_of_squares(variable.grad)

    def whole(self, state: Array) -> Array:
        memory = self.shards.memory
        if not memory.across:
            return state
        mine = state.reshape(-1)[self._own if memory.local.rank == 0 else slice(0)]
        return self.shards.group.all_gather(mine).reshape(self.shape)

    def put(self, state: Array, value: Any) -> None:
        state.reshape(-1)[self._own] = to_device(value, "cpu").reshape(-1)[self._own]

    def add(self, leaf: Variable, contribution: Array, is_new: bool) -> None:
        own = self.own(leaf)
        if own is not None:
            own += contribution
        else:  # an array, where NumPy's own copy of what has no dimensions is a scalar
            own = contribution if is_new else array_module(contribution).array(contribution)
        if leaf.grad is self.total:
            self.beside = own
        else:
            leaf.grad = own

    def own(self, leaf: Variable) -> Array | None:
        """Return this rank's own gradient that was not sent yet, or None."""
        if leaf.grad is self.total:
            return self.beside
        self.beside = None  # of before a zero_grad
        return leaf.grad

    def product(self, leaf: Variable, a: Array, b: Array) -> Array | GradSink:
        """Compute ``a @ b`` into the buckets if it is its turn; see ``GradSink``."""
        fits = a.dtype == b.dtype == self.dtype and self.own(leaf) is None
        if fits and is_last_contribution(leaf) and self.shards.stream(self.unit, a, b):
            return self
        product: Array = a.dot(b)
        return product


class HostSharder(Shards, GradientPass[HostUnit]):
    """Sends units in order, as hooks complete them, into memory that the ranks of a host map.

    ``params``: in the order in which their gradients are sent.
    """

    group: ProcessGroup
    is_shared = True

    def __init__(self, params: Sequence[Variable], group: ProcessGroup, across_hosts: bool) -> None:
        self.group, self.memory = group, HostMemory(group, params, across_hosts)
        sent = [unit for unit in self.memory.units if not unit.name.endswith(FROZEN)]
        super().__init__(InlineReducer(1.0, group=group), sent)
        for unit in self.memory.units:
            unit.places = [HostPlace(self, unit, number) for number in range(len(unit.params))]
        self._states: dict[tuple[str, str, int], Array] = {}
        self._taken: Counter[tuple[int, str]] = Counter()
        # Those that ranks step together, in order.
        self._optimizers = weakref.WeakKeyDictionary[FirstOrderOptimizer, None]()
        self._error: Exception | None = None  # by which the pass fails, on this rank alone

    def take(self) -> None:
        """Move the parameters here, a unit at a time: those of rank 0. Collective, blocking.

        Until all are here each rank's module is as it was, but for where its arrays lie, and but
        for values of rank 0 on the first ranks of other hosts.
        """
        memory, local = self.memory, self.memory.local
        with memory.loading():
            if local.rank == 0:
                for unit in memory.units:
                    self._fill(unit)
            local.barrier()
            for param, place in _places(memory.units):
                param.data = place.view(memory.params[place.unit.name])
                param.data.flags.writeable = not memory.is_debugged
                param.placement = place
        for param, place in _places(self._units):
            param.buffer, param.grad = place, None
        self.install()

    def _fill(self, unit: HostUnit) -> None:
        """Set a unit's parameters on this host; former arrays are free, if nobody has them."""
        memory, flat = self.memory, self.memory.params[unit.name]
        for param, place in _places([unit]) if memory.host == 0 else ():
            place.view(flat)[...] = param.data
        every = flat[unit.starts[0] : unit.starts[-1] + unit.params[-1].size]
        if memory.between is not None and every.size:
            memory.between.broadcast(every, root=0)
        for param, place in _places([unit]):
            if param.placement is None:
                param.data = place.view(flat)

    def detach(self) -> None:
        """Let go of the parameters, whose gradients something else adds up from now on."""
        self.enabled = False
        for param, place in _places(self._units):
            if param.buffer is place:
                param.buffer = None
                param.clear_grad_hook()
        # Without cycles the memory, which may be most of what there is, is free at once.
        for unit in self.memory.units:
            unit.places = []

    def attach(self, optimizer: FirstOrderOptimizer) -> None:
        """Begin new state for an optimizer, and remember it; collective, see ``Shards``."""
        self.group.barrier()
        self._optimizers[optimizer] = None
        self._states, self._taken = {}, Counter()

    def making(self, name: str) -> AbstractContextManager[None]:
        return self.group.in_step(name)

    def new_state(self, place: HostPlace, dtype: DTypeLike) -> Array:
        """Return a flat array that has new state for a parameter. May be collective."""
        name, kind = place.unit.name, np.dtype(dtype).str
        key = name, kind, self._taken[id(place), kind]
        self._taken[id(place), kind] += 1
        if key not in self._states:
            self._states[key] = self.memory.new_flat(self.memory.params[name].size, kind)
        return self._states[key]

    def in_step(self, name: str) -> AbstractContextManager[None]:
        return (self.group if self.memory.across else self.memory.local).in_step(name)

    def sum_of_squares(self, variables: Sequence[Variable]) -> float:
        """Return that of all gradients, the same for any number of ranks; see ``Shards``."""
        if self.memory.across:
            return super().sum_of_squares(variables)
        local, parts = self.memory.local, [np.zeros(0)]
        for variable in variables:
            assert variable.grad is not None
            sums = np.zeros(-(-variable.size // BLOCK))
            mine = slice(local.rank, None, local.size)
            sums[mine] = sums_of_squares(variable.grad, mine)
            parts.append(sums)
        return float(sum(local.all_reduce(np.concatenate(parts)).tolist()))

    def meet(self) -> None:
        meet(self.memory.local, "clip_grad_norm of a sharded module")

    def changing(self, what: str) -> AbstractContextManager[None]:
        return self.memory.changing(what)

    @as_one
    def check(self, what: str) -> None:
        self.memory.check(what)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        params = [param for unit in self.memory.units for param in unit.params]
        with self.memory.loading():
            for param in params:
                param.data.flags.writeable = True
            yield
            for param in params:
                param.data.flags.writeable = not self.memory.is_debugged

    def stream(self, unit: HostUnit, a: Array, b: Array) -> bool:
        """Give ``a @ b``, the gradient of the unit's only parameter, if it is its turn."""
        is_next = self._units[self._given : self._given + 1] == [unit]
        if not (self.enabled and is_next and len(unit.params) == 1):
            return False
        if not self._running:
            self._begin()
        self._pack_weighed(unit, [(a, b)], self._next_weight())
        self._given += 1
        return True

    def _give(self, unit: HostUnit, weight: float) -> None:
        placed = list(_places([unit]))
        own = [place.own(param) for param, place in placed]
        self._pack_weighed(unit, own, 0.0 if self._error is not None else weight)
        for param, place in placed:
            place.beside = None
            if param.grad is not place.total:
                param.grad = None

    def _pack_weighed(self, unit: HostUnit, own: Sequence[Given | None], weight: float) -> None:
        if not weight:
            own = [None] * len(own)  # a batch of no samples may have nan for its mean
        self._unused.update(p for p, grad in zip(unit.params, own, strict=True) if grad is None)
        self._pack(unit, own, weight, self._adds(unit))

    def _adds(self, unit: HostUnit) -> bool:
        """Return whether a unit's sums are added to those of earlier passes."""
        kept = [param.grad is place.total for param, place in _places([unit])]
        for place, is_kept in zip(unit.places, kept, strict=True) if any(kept) else ():
            for piece in () if is_kept else place.mine:  # this rank's part of it is added to
                place.total.reshape(-1)[piece] = 0
        return any(kept)

    @as_one
    def _pack(self, unit: HostUnit, own: Sequence[Given | None], weight: float, adds: bool) -> None:
        for chunk in unit.chunks:
            bucket = self.memory.room(chunk, self.memory.grads[unit.name], adds)
            _fill(bucket, chunk, unit, own)
            weigh_in_place(bucket, weight)
            self.memory.add_rooms(unit.name, chunk, adds)

    def _finish(self) -> None:
        used = self._complete(self._used_here())
        for (param, place), anywhere in zip(_places(self._units), used, strict=True):
            if anywhere:
                param.grad = place.total

    @as_one
    def _complete(self, here: list[bool]) -> list[bool]:
        """Return which parameters a rank has used, when the sums are complete on this host."""
        self.memory.sum_between_hosts()
        # As all ranks pass their flags when their parts are complete, the sums are, too.
        return used_on_any_rank(here, self.group)

    def give_zeros(self) -> None:
        """Take part in a pass of the other ranks with zeros, and in the step after it."""
        for param in self._params:
            param.grad = None
        super().give_zeros()
        for optimizer in list(self._optimizers):
            optimizer.step()

    def join_failed(self) -> None:
        if self._failure() is not None:
            super().join_failed()

    def _failure(self) -> Exception | None:
        """Return what ends the pass here, if no other rank knows of it."""
        error, group = sys.exc_info()[1], self.group
        if isinstance(error, Exception):
            return None if group.size == 1 or group.journal.has_recorded(error) else error
        fail(group, error)
        return None

    def fail(self) -> None:
        """Get to the end of a pass that fails here, by zeros: there all ranks find out."""
        if not self._running:
            super().fail()
            return
        self._has_failed, self._error = True, self._failure()
        if self._error is None:
            return
        try:
            self._give_rest()
        except Exception as error:  # the pass fails by what is raised already
            self._error = None
            if not isinstance(error, DistributedError):
                raise

    def end_failed(self) -> None:
        """Let the other ranks raise where they exchange what they have used."""
        error, self._error, self._has_failed = self._error, None, False
        if error is not None:
            with contextlib.suppress(DistributedError):
                self.memory.sum_between_hosts()
                reject_together(self.group, "backward", outcome="failed").refuse(error)


def _places(units: Iterable[HostUnit]) -> Iterator[tuple[Variable, HostPlace]]:
    """Yield the parameters of units, and where they lie."""
    for unit in units:
        yield from zip(unit.params, unit.places, strict=True)


def _fill(bucket: Array, chunk: slice, unit: HostUnit, own: Sequence[Given | None]) -> None:
    """Copy into ``bucket`` what it has of the gradients; zeros where there is none."""
    end = chunk.start
    for start, size, grad in zip(unit.starts, unit.sizes, own, strict=True):
        low, high = max(start, chunk.start), min(start + size, chunk.stop)
        if low >= high:
            continue
        room = bucket[low - chunk.start : high - chunk.start]
        if isinstance(grad, tuple):
            _product_into(room, *grad, low - start)
        else:
            room[...] = 0 if grad is None else grad.reshape(-1)[low - start : high - start]
        end = high
    bucket[end - chunk.start :] = 0


def _product_into(room: Array, a: Array, b: Array, low: int) -> None:
    """Write the elements from ``low`` on, in row-major order, of ``a @ b`` to ``room``."""
    at, end, columns = low, low + room.size, b.shape[1]
    while at < end:
        row, column = divmod(at, columns)
        if column or end - at < columns:  # a part of one row
            stop = min(end, (row + 1) * columns)
            part = room[at - low : stop - low]
            part[...] = a[row].dot(b[:, column : column + part.size])
        else:
            rows = (end - at) // columns
            stop = at + rows * columns
            block = room[at - low : stop - low].reshape(rows, columns)
            np.dot(a[row : row + rows], b, out=block)
        at = stop
