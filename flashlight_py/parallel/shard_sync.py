"""How the gradients of a sharded module are added up over the ranks, while a backward pass runs.

Units go in the order of the layout. A gradient that is complete before its turn waits as an array
of this rank's own. The product that is a large weight's gradient is computed into the buckets, when
it is its turn; then it never exists as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import GradSink, after_node, is_last_contribution
from flashlight_py.device import Array, array_module, effect
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.api.running import refusing
from flashlight_py.distributed.reducers.host_memory import add_up, map_zeros, meet
from flashlight_py.distributed.reducers.reducer import InlineReducer
from flashlight_py.errors import DistributedError
from flashlight_py.optim.optimizer import FirstOrderOptimizer, RuleOptimizer
from flashlight_py.parallel.failing import fail
from flashlight_py.parallel.gradient_pass import (
    GradientPass,
    Unit,
    used_on_any_rank,
    weigh_in_place,
)
from flashlight_py.parallel.shard_memory import (
    BACKWARD,
    Buckets,
    Chunk,
    HostMemory,
    UnitPlan,
)

# Of a parameter: who steps it, and as which of its parameters.
Stepper = tuple[RuleOptimizer, int]


class Sink(GradSink):
    """Takes the gradient of one parameter.

    ``whole``: where the ranks' sum lies. ``beside``: what this rank adds to a sum of earlier
    passes; else its own gradient is ``Variable.grad`` until it has been sent.
    """

    __slots__ = ("beside", "dtype", "is_stepped", "shape", "sync", "unit", "whole")

    def __init__(self, sync: ShardSync, unit: ShardUnit, whole: Array) -> None:
        self.sync, self.unit, self.whole = sync, unit, whole
        self.shape, self.dtype, self.is_stepped = whole.shape, whole.dtype, sync.steps
        self.beside: Array | None = None

    def add(self, leaf: Variable, contribution: Array, is_new: bool) -> None:
        """Add a contribution to this rank's own gradient; see ``GradSink``."""
        own = self.own(leaf)
        if own is not None:
            own += contribution
        else:  # an array, where NumPy's own copy of what has no dimensions is a scalar
            own = contribution if is_new else array_module(contribution).array(contribution)
        if leaf.grad is self.whole:
            self.beside = own
        else:
            leaf.grad = own

    def own(self, leaf: Variable) -> Array | None:
        """Return this rank's own gradient that was not sent yet, or None."""
        if leaf.grad is self.whole:
            return self.beside
        self.beside = None  # of before a zero_grad
        return leaf.grad

    def product(self, leaf: Variable, a: Array, b: Array) -> Array | GradSink:
        """Compute ``a @ b`` into the buckets if it is its turn; see ``GradSink``."""
        fits = a.dtype == b.dtype == self.dtype and self.own(leaf) is None
        if fits and is_last_contribution(leaf) and self.sync.may_stream(self.unit):
            self.sync.stream(self.unit, leaf, a, b)
            return self
        product: Array = a.dot(b)
        return product


class ShardUnit(Unit):
    """Parameters that are sent together, and where."""

    __captured_state__ = ("pending", "wholes")

    def __init__(self, name: str, plan: UnitPlan, params: Sequence[Variable]) -> None:
        super().__init__(params)
        self.name, self.plan = name, plan
        self.wholes: list[Array] = []  # where the ranks' sums lie
        self.sinks: list[Sink] = []


class ShardSync(GradientPass[ShardUnit]):
    """Sends units in order, as hooks complete them, and finishes with the pass.

    Args:
        group: all ranks.
        memory: what this host's ranks have in common, and how it is summed with other hosts'.
        buckets: this rank's.
        units: in the order in which they are sent.
    """

    __captured_state__ = (
        *("weigh", "ignored", "enabled", "is_shared"),
        *("_units", "_params", "_sinks", "_given", "_running", "_unused", "_has_failed"),
    )

    def __init__(
        self, group: ProcessGroup, memory: HostMemory, buckets: Buckets, units: Sequence[ShardUnit]
    ) -> None:
        super().__init__(InlineReducer(1.0, group=group), units)
        self.is_shared = True
        self._group, self._memory, self._buckets = group, memory, buckets
        for unit in units:
            unit.sinks = [Sink(self, unit, whole) for whole in unit.wholes]
        self._sinks = [sink for unit in units for sink in unit.sinks]
        self.optimizers: list[weakref.ref[FirstOrderOptimizer]] = []  # that ranks step together
        self._error: Exception | None = None  # by which the pass fails, on this rank alone

    def install(self) -> None:
        """Make the parameters' gradients go here."""
        for unit in self._units:
            for param, sink in zip(unit.params, unit.sinks, strict=True):
                param.buffer = sink
                param.grad = None
        super().install()

    def detach(self) -> None:
        """Let go of the parameters, whose gradients something else adds up from now on."""
        self.enabled = False
        for param, sink in zip(self._params, self._sinks, strict=True):
            if param.buffer is sink:
                param.buffer = None
                param.clear_grad_hook()
        # Without cycles the memory, which may be most of what there is, is free at once.
        self._sinks = []
        for unit in self._units:
            unit.sinks = []

    def _adds(self, unit: ShardUnit) -> bool:
        """Return whether a unit's sums are added to those of earlier passes."""
        kept = [p.grad is whole for p, whole in zip(unit.params, unit.wholes, strict=True)]
        for position, whole in enumerate(unit.wholes if any(kept) else ()):
            if not kept[position]:  # this rank's part of it is added to
                for piece in self._memory.pieces(unit.name, unit.plan, position):
                    whole.reshape(-1)[piece] = 0
        return any(kept)

    # What hooks and sinks ask ------------------------------------------------------------------

    def may_stream(self, unit: ShardUnit) -> bool:
        """Return whether a product can be computed into the buckets now."""
        return (
            self.enabled
            and len(unit.plan.numbers) == 1
            and self._given < len(self._units)
            and self._units[self._given] is unit
        )

    def stream(self, unit: ShardUnit, leaf: Variable, a: Array, b: Array) -> None:
        """Compute ``a @ b``, the gradient of the unit's only parameter, into the buckets."""
        if not self._running:
            self._begin()
        weight = 1.0 if self.weigh is None else self.weigh(self._given == 0)
        adds = self._adds(unit)
        if not weight:
            self._unused.add(leaf)
        self._multiply(unit, a, b, weight, adds)
        self._given += 1

    @effect
    def _multiply(self, unit: ShardUnit, a: Array, b: Array, weight: float, adds: bool) -> None:
        start, columns = unit.plan.starts[0], b.shape[1]
        for chunk in unit.plan.chunks:
            bucket = self._buckets.next(chunk, self._memory.grads[unit.name], adds)
            low = chunk.start - start
            high = min(chunk.stop - start, unit.plan.sizes[0])
            _product_into(bucket[: high - low], a, b, low, columns)
            bucket[high - low :] = 0
            self._send(unit, chunk, bucket, weight, adds)

    # Sending -----------------------------------------------------------------------------------

    def _give(self, unit: ShardUnit, weight: float) -> None:
        if self._error is not None:
            weight = 0.0
        own = [sink.own(param) for param, sink in zip(unit.params, unit.sinks, strict=True)]
        if not weight:
            own = [None] * len(own)  # a batch of no samples may have nan for its mean
        self._unused.update(p for p, grad in zip(unit.params, own, strict=True) if grad is None)
        self._pack(unit, own, weight, self._adds(unit))
        for param, sink in zip(unit.params, unit.sinks, strict=True):
            sink.beside = None
            if param.grad is not sink.whole:
                param.grad = None

    @effect
    def _pack(
        self, unit: ShardUnit, own: Sequence[Array | None], weight: float, adds: bool
    ) -> None:
        for chunk in unit.plan.chunks:
            bucket = self._buckets.next(chunk, self._memory.grads[unit.name], adds)
            _fill(bucket, chunk, unit.plan, own)
            self._send(unit, chunk, bucket, weight, adds)

    def _send(
        self, unit: ShardUnit, chunk: Chunk, bucket: Array, weight: float, adds: bool
    ) -> None:
        weigh_in_place(bucket, weight)
        old = functools.partial(self._memory.weigh_old, unit.name) if adds else None
        self._buckets.send(chunk, self._memory.grads[unit.name], old)

    def join_failed(self) -> None:
        """Autograd: the pass fails; see ``InPasses``."""
        if self._failure() is not None:
            super().join_failed()

    def _failure(self) -> Exception | None:
        """Return what ends the pass here, if no other rank knows of it."""
        error, group = sys.exc_info()[1], self._group
        if isinstance(error, Exception):
            return None if group.size == 1 or group.journal.has_noted(error) else error
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
                self._memory.sum_between_hosts()
                refusing(self._group, "backward", how="failed").refuse(error)

    def _finish(self) -> None:
        """Wait for all ranks' sums; parameters that no rank used have no gradient then."""
        used = self._complete(self._used_here())
        for param, sink, anywhere in zip(self._params, self._sinks, used, strict=True):
            if anywhere:
                param.grad = sink.whole

    @effect
    def _complete(self, here: list[bool]) -> list[bool]:
        """Return which parameters a rank has used, when the sums are complete on this host."""
        self._memory.sum_between_hosts()
        # As all ranks pass their flags when their parts are complete, the sums are, too.
        return used_on_any_rank(here, self._group)

    @effect
    def check(self, what: str) -> None:
        """Refuse ``what`` where a rank has ended in the middle of a step."""
        self._memory.check(what)

    def give_zeros(self) -> None:
        """Take part in a pass of the other ranks with zeros, and in the step after it."""
        for param in self._params:
            param.grad = None
        super().give_zeros()
        for ref in self.optimizers:
            optimizer = ref()
            if optimizer is not None:
                optimizer.step()


class StepSync(ShardSync):
    """Steps parameters while the pass goes on.

    All ranks are of one host. ``stepper_of`` returns who steps a parameter; None: nobody does.
    """

    steps = True

    def __init__(
        self,
        group: ProcessGroup,
        memory: HostMemory,
        buckets: Buckets,
        units: Sequence[ShardUnit],
        stepper_of: Callable[[Variable], Stepper | None],
    ) -> None:
        super().__init__(group, memory, buckets, units)
        self._stepper_of = stepper_of
        # Whether a rank has a gradient of a parameter, in this pass.
        self._places = {param: place for place, param in enumerate(self._params)}
        flags = map_zeros(group, group.size * len(self._places)).view(np.bool_)
        self._flags = flags.reshape(group.size, len(self._places))
        self._change = contextlib.ExitStack()
        self.is_done = False  # a pass has stepped, and optimizer.step() was not called since

    def _on_ready(self, unit: ShardUnit, _: object = None) -> None:
        after_node(lambda: super(StepSync, self)._on_ready(unit))

    def _enter(self) -> None:
        with refusing(self._group, BACKWARD):
            if self.is_done:
                raise ValueError(
                    "fully_shard(step_in_backward=True): a second backward pass without "
                    "optimizer.step(); every pass is a step, so gradients cannot add up"
                )
        self._change.enter_context(self._memory.changing("backward"))

    def _send(
        self, unit: ShardUnit, chunk: Chunk, bucket: Array, weight: float, adds: bool
    ) -> None:
        weigh_in_place(bucket, weight)
        is_first = chunk is unit.plan.chunks[0]
        if is_first:
            for param in unit.params:
                self._flags[self._group.rank, self._places[param]] = param not in self._unused
        meet(self._group, BACKWARD)
        rooms = self._buckets.of_ranks(chunk, unit.params[0].dtype)
        part = chunk.part_of(self._group.rank)
        for param, start, size in zip(unit.params, unit.plan.starts, unit.plan.sizes, strict=True):
            stepper = self._stepper_of(param)
            if stepper is None or not self._flags[:, self._places[param]].any():
                continue
            optimizer, number = stepper
            # What this rank has of the parameter, which may be nothing.
            low, high = max(part.start, start), min(part.stop, start + size)
            pieces, scale = [], 1.0 / self._group.size
            if low < high:
                grads = [room[low - chunk.start : high - chunk.start] for room in rooms]
                own = slice(low - start, high - start)
                states = [state.reshape(-1)[own] for state in optimizer.states_of(number)]
                data = self._memory.params[unit.name][low:high]
                if data.itemsize == 2:  # a gradient that is an array is rounded before the step
                    grads, scale = [add_up(grads, scale, np.empty_like(data))], 1.0
                pieces = [(data, grads, *states)]
            optimizer.step_pieces(number, pieces, scale, is_first)

    def _finish(self) -> None:
        """Let the ranks go on together, unless one has failed; there are no gradients."""
        self._complete([])
        self._change.close()
        self.is_done = True

    def _reset(self) -> None:
        super()._reset()
        self._change.pop_all()  # a pass that has failed leaves its marks, and nothing to the next


def _fill(bucket: Array, chunk: Chunk, plan: UnitPlan, own: Sequence[Array | None]) -> None:
    """Copy into ``bucket`` what it has of the gradients; zeros where there is none."""
    end = chunk.start
    for start, size, grad in zip(plan.starts, plan.sizes, own, strict=True):
        low, high = max(start, chunk.start), min(start + size, chunk.stop)
        if low >= high:
            continue
        room = bucket[low - chunk.start : high - chunk.start]
        room[...] = 0 if grad is None else grad.reshape(-1)[low - start : high - start]
        end = high
    bucket[end - chunk.start :] = 0


def _product_into(room: Array, a: Array, b: Array, low: int, columns: int) -> None:
    """Write the elements from ``low`` on, in row-major order, of ``a @ b`` to ``room``."""
    at, end = low, low + room.size
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
