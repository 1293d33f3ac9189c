"""When a module's gradients travel: in a fixed order, while the backward pass goes on.

Ranks may finish their gradients in different orders, or not have some at all; what is sent must
be the same sequence everywhere. So gradients are cut into units by a plan that all ranks share,
and a unit that is complete waits until those before it were given to the reducer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from flashlight_py.autograd import Variable, on_backward_end
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed import shared_empty
from flashlight_py.distributed.buckets import plan_buckets
from flashlight_py.distributed.reducer import Reducer

__all__ = ["GradientSync", "buffers_of", "flat_buckets", "gradient_of", "one_by_one"]


class Unit:
    """Gradients that travel as one array, which ``collect`` returns once they are complete."""

    def __init__(self, params: Sequence[Variable], collect: Callable[[], Array]) -> None:
        self.params = params
        self.collect = collect
        self.pending = len(params)


def gradient_of(param: Variable) -> Array:
    """Return the gradient; zeros take the place of one that this rank did not compute."""
    if param.grad is None:
        param.grad = array_module(param.data).zeros_like(param.data)
    return param.grad


def one_by_one(params: Sequence[Variable]) -> list[Unit]:
    """Let every gradient travel as it is; for reducers that pack by themselves."""
    return [Unit([param], functools.partial(gradient_of, param)) for param in params]


def flat_buckets(params: Sequence[Variable], limit: int) -> list[Unit]:
    """Make all gradients views into flat buckets of at most ``limit`` bytes.

    The backward pass accumulates straight into them, so that nothing is packed or unpacked. A
    bucket holds one dtype on one device.
    """
    return [
        _flat_bucket([same[index] for index in bucket])
        for same in _runs_of_one_kind(params)
        for bucket in plan_buckets([param.data.nbytes for param in same], limit)
    ]


def _runs_of_one_kind(params: Sequence[Variable]) -> list[list[Variable]]:
    runs: list[list[Variable]] = []
    for param in params:
        if runs and runs[-1][-1].dtype == param.dtype:
            runs[-1].append(param)
        else:
            runs.append([param])
    return runs


def _new_flat(size: int, like: Array) -> Array:
    """Return zeros, on the CPU in memory that needs no copy to be reduced. Collective."""
    if is_cupy(like):
        flat: Array = array_module(like).zeros(size, like.dtype)
    else:
        flat = shared_empty(size, like.dtype)
        flat[...] = 0
    return flat


def _flat_bucket(params: list[Variable]) -> Unit:
    data = params[0].data
    flat = _new_flat(sum(param.size for param in params), data)
    start = 0
    for param in params:
        param.grad_buffer = flat[start : start + param.size].reshape(param.shape)
        start += param.size

    def collect() -> Array:
        for param in params:
            _bring_home(param)
        return flat

    return Unit(params, collect)


def buffers_of(params: Sequence[Variable]) -> list[Array]:
    """Return where the gradients of these parameters lie in their bucket."""
    return [param.buffer for param in params if param.buffer is not None]


def _bring_home(param: Variable) -> None:
    """Make the gradient its part of the bucket, also if the pass left it out or a user set it."""
    grad, home = param.grad, param.buffer
    if grad is home or home is None:
        return
    home[...] = 0 if grad is None else grad
    param.grad = home


def is_synchronised(param: Variable) -> bool:
    """Tell whether a ``GradientSync`` reduces the gradient of ``param`` in every pass."""
    hook = param.hook
    owner = hook.func if isinstance(hook, functools.partial) else None
    return isinstance(getattr(owner, "__self__", None), GradientSync)


class GradientSync:
    """Gives units to ``reducer`` in order, as hooks complete them, and finishes with the pass.

    ``averages``: the reducer leaves the mean over the ranks. ``prepare(array, first)``, where it
    is set, may change each array in place before it is given; ``first``: it begins a pass.
    """

    def __init__(self, units: list[Unit], reducer: Reducer, averages: bool = False) -> None:
        self.enabled = True
        self.averages = averages
        self.reducer = reducer
        self.prepare: Callable[[Array, bool], None] | None = None
        self._units = units
        self._given = 0  # units that this pass has given to the reducer
        self._touched: list[Unit] | None = None  # with gradients in this pass; None between passes
        for unit in units:
            for param in unit.params:
                param.register_grad_hook(functools.partial(self._on_ready, unit))

    def _on_ready(self, unit: Unit, _: Variable) -> None:
        """Autograd: the gradient of one of the unit's parameters is complete."""
        if not self.enabled:
            return
        if self._touched is None:
            self._touched = []
            on_backward_end(self._on_end)
        self._touched.append(unit)
        unit.pending -= 1
        if unit.pending:
            return
        units = self._units
        while self._given < len(units) and not units[self._given].pending:
            self._give_next()

    def _on_end(self, completed: bool) -> None:
        """Autograd: the pass is over. Give what is left, and wait for everything."""
        try:
            if completed:
                while self._given < len(self._units):
                    self._give_next()
                self.reducer.finalize()
            else:
                self.reducer.abandon()
        finally:
            for unit in self._touched or ():
                unit.pending = len(unit.params)
            self._touched = None
            self._given = 0

    def _give_next(self) -> None:
        array = self._units[self._given].collect()
        if self.prepare is not None:
            self.prepare(array, self._given == 0)
        self._given += 1
        self.reducer.add(array)

    def give_zeros(self) -> None:
        """Take part in a pass of the other ranks: the gradients become what they get. Blocks.

        Raises:
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        for unit in self._units:
            array = unit.collect()
            array[...] = 0
            self.reducer.add(array)
        self.reducer.finalize()
