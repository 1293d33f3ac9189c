"""Sharding by gathering (ZeRO-3): each rank keeps a part of everything, and gathers what it uses.

For ranks that cannot read each other's memory, such as GPUs. When a module reads its parameters
they are gathered, and in the meantime those that were read next in the last pass; parameters that
were read before are let go of. A backward pass reads them again. The gradients of a module are
reduced as soon as they are complete, and each rank keeps its part of them.

Nothing is wrapped: reading a parameter is what gathers it, so any module will do. The saving
depends on operations that read their operands again in the backward pass instead of keeping them:
``linear``, ``linear_relu`` and ``matmul`` do. After others, such as a product with a vector, the
module's parameters stay until the backward pass has used them; the numbers are the same.

The arrays may be NumPy's or CuPy's: both can do all that is done with them here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import GradSink, in_backward
from flashlight_py.device import Array, array_module, device_of, is_cupy, is_floating, to_device
from flashlight_py.distributed import InlineReducer, ProcessGroup, Work
from flashlight_py.distributed.internal import group_or_world
from flashlight_py.nn import Module
from flashlight_py.optim.optimizer import Placement, Shards
from flashlight_py.parallel.gradient_pass import GradientPass, Unit, release, used_on_any_rank
from flashlight_py.parallel.synchronize import give_state

# Parts begin at multiples of so many elements: 64 bytes of float32.
GRAIN = 16


def shard_by_gathering(module: Module, group: ProcessGroup | None = None) -> GatheringSharder:
    """Shard the floating parameters of ``module``; see ``fully_shard``."""
    members = group_or_world(group)
    params = module.named_params()
    for name, param in params.items():
        if param.placement is not None:
            raise ValueError(f"fully_shard: {name!r} is sharded already; call it once")
    release(module)
    for name, param in params.items():
        if param.hook is not None or param.buffer is not None:
            raise ValueError(
                f"fully_shard: {name!r} has a gradient hook or buffer, and sharding needs its own; "
                "clear it before"
            )
    sharder = GatheringSharder(members, _flats(module, members))
    if module.buffers:
        give_state(module, module.buffers, 0, members)
    return sharder


def _flats(module: Module, group: ProcessGroup) -> Iterator[Flat]:
    """Yield flats of the floating parameters that a module has itself, by dtype and device."""
    met: set[Variable] = set()
    rows: set[int] = set()
    for _, each in module._walk():
        kinds: dict[tuple[str, str], list[Variable]] = {}
        for _, param in each._own_params():
            if param not in met and is_floating(param.dtype):
                met.add(param)
                kinds.setdefault((param.dtype.name, device_of(param.data)), []).append(param)
        for together in kinds.values():
            elements = sum(param.size for param in together)
            least = max(1, -(-elements // (group.size * GRAIN))) * GRAIN
            row = next(row for row in itertools.count(least, GRAIN) if row not in rows)
            rows.add(row)
            yield Flat(together, group, row)


class Flat(Unit):
    """The parameters of one module and dtype in one array of shape ``(ranks, row)``.

    Rank r keeps row r, ``part``. All of it is there between ``start`` and ``release``, as
    ``arrays``.

    ``row`` must differ from that of every other flat: then the shapes that collectives compare say
    which flat is meant, and ranks that use different modules get an error instead of a mixture.
    """

    def __init__(self, params: Sequence[Variable], group: ProcessGroup, row: int) -> None:
        super().__init__(params)
        self.group, self.row = group, row
        self.shapes = [param.shape for param in params]
        self.starts = [0, *itertools.accumulate(param.size for param in params)]
        self._library = array_module(params[0].data)
        self.dtype = params[0].dtype
        self.arrays: list[Array] | None = None
        self._whole: Array | None = None  # arrives while there is work
        self._work: Work | None = None
        self.opened: Reduction | None = None  # of this pass
        whole = self.empty()
        for array, param in zip(self.views(whole), params, strict=True):
            array[...] = param.data
        group.broadcast(whole, 0)
        self.part: Array = whole[group.rank].copy()

    def empty(self) -> Array:
        """Return memory for all of it, with zeros behind the last parameter."""
        whole: Array = self._library.empty((self.group.size, self.row), self.dtype)
        whole.reshape(-1)[self.starts[-1] :] = 0
        return whole

    def views(self, whole: Array) -> list[Array]:
        """Return the parameters' places in such memory."""
        line = whole.reshape(-1)
        return [
            line[start:stop].reshape(shape)
            for start, stop, shape in zip(self.starts, self.starts[1:], self.shapes, strict=False)
        ]

    def cut(self, position: int) -> tuple[slice, slice]:
        """Return what this rank has of a parameter: in its part, and in the whole parameter."""
        first = self.group.rank * self.row
        start, stop = self.starts[position : position + 2]
        begin, end = (min(max(edge, first), first + self.row) for edge in (start, stop))
        return slice(begin - first, end - first), slice(begin - start, end - start)

    def start(self) -> None:
        """Begin to gather the parameters, unless they are here. Collective."""
        if self._whole is None:
            whole, row = self.empty(), self.part.reshape(1, -1)
            self._work = self.group.all_gather(row, out=whole, async_op=True)
            self._whole = whole

    def finish(self) -> list[Array]:
        """Wait until the parameters are here; return them, not to be written to."""
        if self.arrays is None:
            whole, work = self._whole, self._work
            self._whole = self._work = None
            assert whole is not None
            assert work is not None
            work.wait()
            if not is_cupy(whole):
                whole.flags.writeable = False  # it is a copy: what is written there would be lost
            self._whole, self.arrays = whole, self.views(whole)
        return self.arrays

    def release(self, wait: bool = True) -> None:
        """Let go of the parameters; with ``wait``, of those on their way when they are here."""
        work = self._work
        self._whole = self._work = self.arrays = None
        if wait and work is not None:
            work.wait()


class Reduction:
    """The gradients of one flat in one pass, of which each rank gets the mean of its row.

    ``homes``: where they belong until they are sent. ``used``: the parameters that have one here.
    """

    _part: Array  # from when they are sent

    def __init__(self, flat: Flat) -> None:
        self.flat, whole = flat, flat.empty()
        self.homes = flat.views(whole)
        self.used: set[Variable] = set()
        self._whole: Array | None = whole
        self._work: Work | None = None
        flat.pending = sum(param.calc_grad for param in flat.params)

    def send(self) -> None:
        """Begin to average over the ranks; zeros for those not there."""
        for param, home in zip(self.flat.params, self.homes, strict=True):
            if param not in self.used:
                home[...] = 0
        group, part = self.flat.group, self.flat.part
        self._part = array_module(part).empty_like(part)
        out = self._part.reshape(1, -1)
        self._work = group.reduce_scatter(
            self._whole, scale=1.0 / group.size, out=out, async_op=True
        )
        self._whole, self.homes = None, []  # the work keeps them

    def wait(self) -> None:
        """Block until it has ended, and free the gradients that were reduced."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def add(self, used: Collection[Variable]) -> None:
        """Add this rank's part to the parameters' gradients: of those that were ``used``."""
        for param in self.flat.params:
            if param in used:
                piece = self._part[param.placement.here]
                if param.grad is not None:
                    param.grad += piece
                else:
                    param.grad = piece


class PartPlace(Placement, GradSink):
    """A parameter of which this rank has a part, and a part of its gradient and of its state."""

    shards: GatheringSharder

    def __init__(self, shards: GatheringSharder, flat: Flat, position: int) -> None:
        self.shards, self.flat, self.position = shards, flat, position
        self.shape, self.dtype = flat.shapes[position], flat.dtype
        self.here, self._of_all = flat.cut(position)

    def add(self, leaf: Variable, contribution: Array, is_new: bool) -> None:
        gradients = self.shards.opened(self.flat)
        home = gradients.homes[self.position]
        if leaf in gradients.used:
            home += contribution
        else:
            home[...] = contribution
            gradients.used.add(leaf)

    def product(self, leaf: Variable, a: Array, b: Array) -> Array | GradSink:
        gradients = self.shards.opened(self.flat)
        if leaf in gradients.used or not a.dtype == b.dtype == self.dtype:
            product: Array = a.dot(b)
            return product
        a.dot(b, out=gradients.homes[self.position])
        gradients.used.add(leaf)
        return self

    def zeros(self, variable: Variable, dtype: DTypeLike) -> Array:
        part = self.flat.part[self.here]
        return array_module(part).zeros(part.size, dtype)  # type: ignore[no-any-return]

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        assert variable.grad is not None
        part = self.flat.part[self.here]
        return [(part, variable.grad, *states)] if part.size else []

    def whole(self, state: Array) -> Array:
        return self.shards.group.all_gather(state).reshape(self.shape)

    def put(self, state: Array, value: Any) -> None:
        state[...] = to_device(value.reshape(-1)[self._of_all], device_of(state))


class PartedVariable(Variable):
    """A parameter that is gathered when its array is read, as the modules of a model do.

    Its gradient is the part of this rank, of one dimension. To read ``array`` is collective.
    Parameters become this class in place, so that whoever holds one need not know.
    """

    __slots__ = ()
    placement: PartPlace

    @property
    def data(self) -> Array:
        """All of the parameter; read-only where NumPy can say so, and freed when others follow."""
        placement = self.placement
        return placement.shards.arrays_of(placement.flat)[placement.position]

    @data.setter
    def data(self, value: Array) -> None:
        raise ValueError(
            "this parameter is sharded, so there is no array of this process to replace; "
            "load_state_dict copies values into it"
        )

    def assign(self, value: Array) -> None:
        """Set the parameter, of which this rank keeps its part. Every rank passes the same."""
        place = self.placement
        place.flat.release()
        place.put(place.flat.part[place.here], value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.placement.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.placement.dtype

    def __repr__(self) -> str:
        return f"Variable(sharded, shape={self.shape}, dtype={self.dtype})"


class GatheringSharder(Shards, GradientPass[Flat]):
    """When flats are gathered and let go of, and when their gradients are reduced.

    At most two flats are gathered at a time: the one that was read last, and the one that was read
    after it the last time. Forward and backward passes are remembered apart. Gradients are reduced
    in the order in which a pass completes them, the same on all ranks.
    """

    not_joined = (
        "the module's parameters are gathered from all ranks in every pass, in which a rank "
        "without data has no part; give every rank the same number of batches"
    )

    group: ProcessGroup

    def __init__(self, group: ProcessGroup, flats: Iterator[Flat]) -> None:
        self.group = group
        super().__init__(InlineReducer(1.0, group=group), map(self._take, flats))
        self._here: set[Flat] = set()  # gathered, or on their way
        self._read: tuple[bool, Flat] | None = None  # last; whether in a backward pass
        self._next: dict[tuple[bool, Flat], Flat] = {}
        self._reductions: list[Reduction] = []  # of this pass
        self._settled = 0  # of those

    def _take(self, flat: Flat) -> Flat:
        """Have the parameters of ``flat`` sharded from now on."""
        for position, param in enumerate(flat.params):
            param.data = flat.part[:0]  # nothing is to keep the memory of the whole
            param.grad = None
            param.placement = param.buffer = PartPlace(self, flat, position)
            param.__class__ = PartedVariable
            param.register_grad_hook(functools.partial(self._on_ready, flat))
        return flat

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Let go of what is gathered, as it will be old; the parts are this process's own."""
        self._release()
        self._read = None
        yield

    def arrays_of(self, flat: Flat) -> list[Array]:
        """Return the whole parameters of ``flat``. Collective, unless it was read last."""
        now = in_backward(), flat
        if now != self._read or flat.arrays is None:
            self._turn_to(now)
        return flat.finish()

    def _turn_to(self, now: tuple[bool, Flat]) -> None:
        backward, flat = now
        if backward:
            self.join_failed()
        last, self._read = self._read, now
        if last is not None and last[0] is not backward:
            self._next.pop(last, None)
        elif last is not None and last != now:
            self._next[last] = flat
        expected = self._next.get(now)
        self._release(flat, expected)
        for each in (flat, expected):
            if each is not None:
                self._here.add(each)
                each.start()

    def _release(self, *but: Flat | None, wait: bool = True) -> None:
        for flat in self._here.difference(but):
            self._here.discard(flat)
            flat.release(wait)

    def opened(self, flat: Flat) -> Reduction:
        """Return this pass's gradients of ``flat``."""
        if flat.opened is None:
            self.join_failed()
            self._settle(but=1)  # frees the memory of an earlier reduction before it takes more
            flat.opened = Reduction(flat)
        return flat.opened

    def join_failed(self) -> None:
        if not self._running:
            self._join()

    def _on_ready(self, flat: Flat, _: object = None) -> None:
        flat.pending -= 1
        if not flat.pending:
            self._give(flat, 1.0)

    def _give(self, flat: Flat, weight: float) -> None:
        """Begin to reduce the gradients of ``flat``."""
        assert flat.opened is not None
        flat.opened.send()
        self._reductions.append(flat.opened)
        flat.opened = None
        self._given += 1

    def _give_rest(self) -> None:
        for flat in self._units:
            if flat.opened is not None:
                self._give(flat, 1.0)

    def _settle(self, but: int = 0) -> None:
        """Wait for all reductions but the last ``but`` ones."""
        while self._settled < len(self._reductions) - but:
            reduction = self._reductions[self._settled]
            self._settled += 1
            reduction.wait()

    def _finish(self) -> None:
        self._settle()
        here = set().union(*(reduction.used for reduction in self._reductions))
        anywhere = used_on_any_rank((param in here for param in self._params), self.group)
        used = set(itertools.compress(self._params, anywhere))
        for reduction in self._reductions:
            reduction.add(used)

    def _sent_next(self) -> list[Array]:
        return [flat.part for flat in self._units]

    def _forget(self) -> None:
        for flat in self._units:
            flat.opened = None
        self._release(wait=False)

    def _reset(self) -> None:
        super()._reset()
        self._reductions, self._settled = [], 0
        self._read = None
        self._release()
