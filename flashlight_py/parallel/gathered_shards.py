"""Sharding (ZeRO-3): a rank stores a part of each parameter, and gathers parameters for use.

The method is for ranks that cannot read each other's memory, such as GPUs. When a module reads its
parameters, they are gathered. Then the parameters of the next module in the previous pass are
prefetched, and the parameters of earlier modules are freed. A backward pass reads parameters again.
The gradients of a module are reduced as soon as they are complete, and each rank keeps its part.

Modules are not wrapped: reading a parameter gathers it, so every module works. Memory is saved by
operations that read their operands again in the backward pass instead of keeping them: ``linear``,
``linear_relu`` and ``matmul``. After other operations, such as a product with a vector, parameters
stay in memory until the backward pass has used them. The results are the same.
"""

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
from flashlight_py.parallel import gradient_pass
from flashlight_py.parallel.synchronize import give_state

# The length of a part is rounded up to a multiple of this number of elements (64 bytes of float32).
GRAIN = 16


def shard_by_gathering(module: Module, group: ProcessGroup | None = None) -> "GatheringSharder":
    members = group_or_world(group)
    params = module.named_params()
    for name, param in params.items():
        if param.placement is not None:
            raise ValueError(f"fully_shard: got sharded parameter {name!r}. Call fully_shard once")
    gradient_pass.drop_pass(module)
    for name, param in params.items():
        if param.hook is not None or param.buffer is not None:
            raise ValueError(
                "fully_shard: expected parameters without gradient hook and buffer, got "
                f"{name!r} with one. Clear it first, for example with clear_grad_hook()"
            )
    sharder = GatheringSharder(members, _flats(module, members))
    if module.buffers:
        give_state(module, module.buffers, 0, members)
    return sharder


def _flats(module: Module, group: ProcessGroup) -> "Iterator[Flat]":
    """Yield a ``Flat`` for each submodule, dtype and device with floating-point parameters."""
    seen: set[Variable] = set()
    rows: set[int] = set()
    for _, submodule in module._walk():
        kinds: dict[tuple[str, str], list[Variable]] = {}
        for _, param in submodule._own_params():
            if param not in seen and is_floating(param.dtype):
                seen.add(param)
                kinds.setdefault((param.dtype.name, device_of(param.data)), []).append(param)
        for params in kinds.values():
            least = max(1, -(-sum(param.size for param in params) // (group.size * GRAIN))) * GRAIN
            row = next(row for row in itertools.count(least, GRAIN) if row not in rows)
            rows.add(row)
            yield Flat(params, group, row)


class Flat(gradient_pass.PassBucket):
    """The parameters of one module and dtype in one array of shape ``(ranks, row)``.

    Rank r keeps row r as ``part``. ``arrays`` has all parameters after ``finish``, else None.

    Each flat has a different ``row``, so collectives for different modules have different shapes.
    If ranks call them together, they get an error instead of mixed data.
    """

    def __init__(self, params: Sequence[Variable], group: ProcessGroup, row: int) -> None:
        super().__init__(params)
        self.group, self.row = group, row
        self.shapes = [param.shape for param in params]
        self.starts = [0, *itertools.accumulate(param.size for param in params)]
        self._library = array_module(params[0].data)
        self.dtype = params[0].dtype
        self.arrays: list[Array] | None = None
        self._full: Array | None = None  # the gathered parameters, incomplete while _work is set
        self._work: Work | None = None
        self.reduction: Reduction | None = None  # None until this pass creates it
        full = self.empty()
        for view, param in zip(self.views(full), params, strict=True):
            view[...] = param.data
        group.broadcast(full, 0)
        self.part: Array = full[group.rank].copy()

    def empty(self) -> Array:
        """Return memory for all parameters, with zeros after the last parameter."""
        full: Array = self._library.empty((self.group.size, self.row), self.dtype)
        full.reshape(-1)[self.starts[-1] :] = 0
        return full

    def views(self, full: Array) -> list[Array]:
        return [
            full.reshape(-1)[start:stop].reshape(shape)
            for start, stop, shape in zip(self.starts, self.starts[1:], self.shapes, strict=False)
        ]

    def cut(self, position: int) -> tuple[slice, slice]:
        """Return slices of ``part`` and of parameter ``position`` that select the same elements."""
        first = self.group.rank * self.row
        start, stop = self.starts[position : position + 2]
        begin, end = (min(max(edge, first), first + self.row) for edge in (start, stop))
        return slice(begin - first, end - first), slice(begin - start, end - start)

    def start(self) -> None:
        """Start to gather the parameters, unless they are gathered already. Collective."""
        if self._full is None:
            full, row = self.empty(), self.part.reshape(1, -1)
            self._work = self.group.all_gather(row, out=full, async_op=True)
            self._full = full

    def finish(self) -> list[Array]:
        """Wait until the parameters are gathered, and return them; do not write to them."""
        if self.arrays is None:
            full, work = self._full, self._work
            self._full = self._work = None
            assert full is not None
            assert work is not None
            work.wait()
            if not is_cupy(full):
                full.flags.writeable = False  # a write to this copy would be lost
            self._full, self.arrays = full, self.views(full)
        return self.arrays

    def release(self, wait: bool = True) -> None:
        """Free the gathered parameters. With ``wait``, first wait for a gather that still runs."""
        work = self._work
        self._full = self._work = self.arrays = None
        if wait and work is not None:
            work.wait()


class Reduction:
    """Average of the gradients of one flat in one pass. Rank r receives row r of the mean.

    ``buffers`` contain the gradients until ``send``. ``used`` are parameters with a gradient here.
    """

    _part: Array  # this rank's row of the mean; set by send()

    def __init__(self, flat: Flat) -> None:
        self.flat, gradients = flat, flat.empty()
        self.buffers = flat.views(gradients)
        self.used: set[Variable] = set()
        self._gradients: Array | None = gradients
        self._work: Work | None = None
        flat.pending = sum(param.calc_grad for param in flat.params)

    def send(self) -> None:
        """Start to average the gradients over the ranks, with zeros for missing gradients."""
        for param, buffer in zip(self.flat.params, self.buffers, strict=True):
            if param not in self.used:
                buffer[...] = 0
        group, part = self.flat.group, self.flat.part
        self._part = array_module(part).empty_like(part)
        options: Any = {"scale": 1.0 / group.size, "out": self._part.reshape(1, -1)}
        self._work = group.reduce_scatter(self._gradients, **options, async_op=True)
        self._gradients, self.buffers = None, []  # the work keeps the memory alive

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def add(self, used: Collection[Variable]) -> None:
        """Add this rank's part of the mean to ``grad`` of each parameter in ``used``."""
        for param in self.flat.params:
            if param in used:
                part = self._part[param.placement.local_range]
                if param.grad is not None:
                    param.grad += part
                else:
                    param.grad = part


class PartPlacement(Placement, GradSink):
    """Placement of a parameter if this rank stores only a part of it and of its optimizer state."""

    shards: "GatheringSharder"

    def __init__(self, shards: "GatheringSharder", flat: Flat, position: int) -> None:
        self.shards, self.flat, self.position = shards, flat, position
        self.shape, self.dtype = flat.shapes[position], flat.dtype
        self.local_range, self._range_in_param = flat.cut(position)

    def add(self, leaf: Variable, contribution: Array, is_new: bool) -> None:
        reduction = self.shards.reduction_of(self.flat)
        buffer = reduction.buffers[self.position]
        if leaf in reduction.used:
            buffer += contribution
        else:
            buffer[...] = contribution
            reduction.used.add(leaf)

    def product(self, leaf: Variable, a: Array, b: Array) -> Array | GradSink:
        reduction = self.shards.reduction_of(self.flat)
        if leaf in reduction.used or not a.dtype == b.dtype == self.dtype:
            product: Array = a.dot(b)
            return product
        a.dot(b, out=reduction.buffers[self.position])
        reduction.used.add(leaf)
        return self

    def zeros(self, variable: Variable, dtype: DTypeLike) -> Array:
        part = self.flat.part[self.local_range]
        return array_module(part).zeros(part.size, dtype)  # type: ignore[no-any-return]

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        assert variable.grad is not None
        part = self.flat.part[self.local_range]
        return [(part, variable.grad, *states)] if part.size else []

    def full_state(self, state: Array) -> Array:
        return self.shards.group.all_gather(state).reshape(self.shape)

    def put(self, state: Array, value: Any) -> None:
        state[...] = to_device(value.reshape(-1)[self._range_in_param], device_of(state))


class PartedVariable(Variable):
    """A parameter that is gathered when its array is read.

    Its gradient is this rank's part, with one dimension. Reading ``array`` is collective. Existing
    parameters get this class in place, so references to them stay valid.
    """

    __slots__ = ()
    placement: PartPlacement

    @property
    def data(self) -> Array:
        """The full parameter, read-only in NumPy. Reading other parameters may free it."""
        placement = self.placement
        return placement.shards.arrays_of(placement.flat)[placement.position]

    @data.setter
    def data(self, value: Array) -> None:
        raise ValueError(
            "Variable.array: expected a parameter that is not sharded, got one of fully_shard, "
            "whose array cannot be replaced. Call load_state_dict to copy values into it"
        )

    def assign(self, value: Array) -> None:
        """Store this rank's part of ``value``. Every rank must pass the same array."""
        placement = self.placement
        placement.flat.release()
        placement.put(placement.flat.part[placement.local_range], value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.placement.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.placement.dtype

    def __repr__(self) -> str:
        return f"Variable(sharded, shape={self.shape}, dtype={self.dtype})"


class GatheringSharder(Shards, gradient_pass.GradientPass[Flat]):
    """Schedule of gathering and freeing flats, and of reducing their gradients.

    At most two flats are gathered at a time: the flat that was read last, and the flat that
    followed it in the previous pass. Forward and backward passes have separate schedules. Gradients
    are reduced in the order in which a pass completes them, which is the same on all ranks.
    """

    not_joined = (
        "expected a module whose parameters are not gathered, got one of fully_shard on GPUs, "
        "where a rank without data cannot join a pass. Use equally many batches on every rank"
    )

    group: ProcessGroup

    def __init__(self, group: ProcessGroup, flats: Iterator[Flat]) -> None:
        self.group = group
        super().__init__(InlineReducer(1.0, group=group), map(self._shard_params, flats))
        self._gathered: set[Flat] = set()  # gathered, or being gathered
        self._last_read: tuple[bool, Flat] | None = None  # last read: (in a backward pass, flat)
        self._next: dict[tuple[bool, Flat], Flat] = {}
        self._reductions: list[Reduction] = []  # of this pass
        self._settled = 0  # number of reductions that have been waited for

    def _shard_params(self, flat: Flat) -> Flat:
        for position, param in enumerate(flat.params):
            param.data = flat.part[:0]  # no reference to the full array
            param.grad = None
            param.placement = param.buffer = PartPlacement(self, flat, position)
            param.__class__ = PartedVariable
            param.register_grad_hook(functools.partial(self._on_ready, flat))
        return flat

    @contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """Free the gathered parameters, because the block makes them obsolete."""
        self._release()
        self._last_read = None
        yield

    def arrays_of(self, flat: Flat) -> list[Array]:
        """Return ``flat``'s full parameters. Collective, unless the last read was of ``flat``."""
        now = in_backward(), flat
        if now != self._last_read or flat.arrays is None:
            self._gather(now)
        return flat.finish()

    def _gather(self, now: tuple[bool, Flat]) -> None:
        backward, flat = now
        if backward:
            self.join_failed()
        last, self._last_read = self._last_read, now
        if last is not None and last[0] is not backward:
            self._next.pop(last, None)
        elif last is not None and last != now:
            self._next[last] = flat
        expected = self._next.get(now)
        self._release(flat, expected)
        for following in (flat, expected):
            if following is not None:
                self._gathered.add(following)
                following.start()

    def _release(self, *but: Flat | None, wait: bool = True) -> None:
        for flat in self._gathered.difference(but):
            self._gathered.discard(flat)
            flat.release(wait)

    def reduction_of(self, flat: Flat) -> Reduction:
        """Return the reduction of ``flat`` in this pass; create it at the first call."""
        if flat.reduction is None:
            self.join_failed()
            self._settle(but=1)  # frees the memory of earlier reductions first
            flat.reduction = Reduction(flat)
        return flat.reduction

    def join_failed(self) -> None:
        if not self._running:
            self._join()

    def _on_ready(self, flat: Flat, _: object = None) -> None:
        flat.pending -= 1
        if not flat.pending:
            self._send_bucket(flat, 1.0)

    def _send_bucket(self, flat: Flat, weight: float) -> None:
        assert flat.reduction is not None
        flat.reduction.send()
        self._reductions.append(flat.reduction)
        flat.reduction = None
        self._sent += 1

    def _send_remaining(self) -> None:
        for flat in self._buckets:
            if flat.reduction is not None:
                self._send_bucket(flat, 1.0)

    def _settle(self, but: int = 0) -> None:
        while self._settled < len(self._reductions) - but:
            reduction = self._reductions[self._settled]
            self._settled += 1
            reduction.wait()

    def _finish(self) -> None:
        self._settle()
        local = set().union(*(reduction.used for reduction in self._reductions))
        used_anywhere = gradient_pass.used_on_any_rank(
            (param in local for param in self._params), self.group
        )
        used = set(itertools.compress(self._params, used_anywhere))
        for reduction in self._reductions:
            reduction.add(used)

    def _next_arrays(self) -> list[Array]:
        return [flat.part for flat in self._buckets]

    def _clear_gradients(self) -> None:
        for flat in self._buckets:
            flat.reduction = None
        self._release(wait=False)

    def _reset(self) -> None:
        super()._reset()
        self._reductions, self._settled = [], 0
        self._last_read = None
        self._release()
