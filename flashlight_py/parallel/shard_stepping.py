"""Optimizer steps inside the backward pass: gradients are summed and used up where they are made.

When all ranks have filled a bucket, each steps its part of those elements by the sum of the ranks'
buckets, which it reads where they lie.

A weight is changed only when no rank needs it any more: the gradient of a layer's input is computed
before that of its weight, and other gradients are sent when the operation is done with its inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import after_node
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.calls.running import refusing
from flashlight_py.distributed.memory.host_memory import add_up, map_zeros, meet
from flashlight_py.parallel.gradient_pass import weigh_in_place
from flashlight_py.parallel.shard_buckets import BACKWARD, Buckets
from flashlight_py.parallel.shard_layout import Chunk
from flashlight_py.parallel.shard_sync import ShardSync, ShardUnit, Sink

if TYPE_CHECKING:
    from flashlight_py.optim.optimizer import RuleOptimizer
    from flashlight_py.parallel.segment import HostMemory

# Of a parameter: who steps it, and as which of its parameters.
Stepper = tuple["RuleOptimizer", int]


class SteppedSink(Sink):
    """Takes a gradient that changes its parameter at once."""

    __slots__ = ()
    is_stepped = True


class StepSync(ShardSync):
    """Steps parameters while the pass goes on.

    Args:
        group: all ranks, of one host.
        memory: what they have in common.
        buckets: theirs.
        units: in the order in which they are stepped.
        stepper_of: returns who steps a parameter; None: nobody does.
    """

    sink_type = SteppedSink
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
        places = {param: place for place, param in enumerate(self._params)}
        self._places = places
        flags = map_zeros(group, group.size * len(places)).view(np.bool_)
        self._flags = flags.reshape(group.size, len(places))
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
        for position, param in enumerate(unit.params):
            stepper = self._stepper_of(param)
            if stepper is not None and self._flags[:, self._places[param]].any():
                self._step(unit, position, stepper, part, (chunk.start, rooms), is_first)

    def _step(
        self,
        unit: ShardUnit,
        position: int,
        stepper: Stepper,
        part: slice,
        rooms: tuple[int, list[Array]],
        is_first: bool,
    ) -> None:
        """Step what ``part`` has of the unit's parameter ``position``, which may be nothing."""
        optimizer, number = stepper
        start, size = unit.plan.starts[position], unit.plan.sizes[position]
        low, high = max(part.start, start), min(part.stop, start + size)
        pieces, scale = [], 1.0 / self._group.size
        if low < high:
            begin, buckets = rooms
            own = slice(low - start, high - start)
            grads = [bucket[low - begin : high - begin] for bucket in buckets]
            states = [state.reshape(-1)[own] for state in optimizer.states_of(number)]
            param = self._memory.params[unit.name][low:high]
            if param.itemsize == 2:  # a gradient that is an array is rounded before the step
                grads, scale = [add_up(grads, scale, np.empty_like(param))], 1.0
            pieces = [(param, grads, *states)]
        step = optimizer.step_pieces if is_first else optimizer.step_more_pieces
        step(number, pieces, scale)

    def _finish(self) -> None:
        """Let the ranks go on together, unless one has failed; there are no gradients."""
        self._complete([])
        self._change.close()
        self.is_done = True

    def _reset(self) -> None:
        super()._reset()
        self._change.pop_all()  # a pass that has failed leaves its marks, and nothing to the next
