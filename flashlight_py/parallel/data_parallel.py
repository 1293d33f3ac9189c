"""Data-parallel training: where a module's gradients meet communication.

Each rank computes gradients on its own share of the data; here they are reduced over the ranks
while the backward pass still goes on. Autograd calls a parameter's hook when its gradient is
complete; the hook hands the gradient to a reducer; when the pass ends, what is left is finished.
So after ``loss.backward()`` the gradients are the reduced ones.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator

from flashlight_py.autograd import Variable, on_backward_end
from flashlight_py.device import Array, array_module
from flashlight_py.distributed import get_world_size
from flashlight_py.distributed.reducer import CoalescingReducer, Reducer
from flashlight_py.nn import Module
from flashlight_py.parallel.agreement import check_modules_agree

__all__ = [
    "all_reduce_gradients",
    "all_reduce_parameters",
    "distribute_module_grads",
    "no_sync",
]


class _GradientSync:
    """Reduces a module's gradients, always in the same order: that of the last parameter first.

    Ranks may finish their gradients in different orders, or not have some at all; the reducer
    must see the same sequence everywhere. So a gradient waits until those before it were given.
    """

    def __init__(self, params: list[Variable], reducer: Reducer) -> None:
        self.params = params[::-1]  # about the order in which a backward pass completes them
        self.reducer = reducer
        self.enabled = True
        self._ready: set[int] = set()
        self._given = 0
        for index, param in enumerate(self.params):
            param.register_grad_hook(functools.partial(self._on_ready, index))

    def _on_ready(self, index: int, _: Variable) -> None:
        """Autograd: the gradient of the parameter ``index`` is complete."""
        if not self.enabled:
            return
        if not self._ready:
            on_backward_end(self._on_end)
        self._ready.add(index)
        while self._given in self._ready:
            self._give(self.params[self._given])

    def _on_end(self, completed: bool) -> None:
        """Autograd: the backward pass is over. Give what is left, and wait for all."""
        try:
            while completed and self._given < len(self.params):
                self._give(self.params[self._given])
            if completed:
                self.reducer.finalize()
        finally:
            self.reducer.abandon()
            self._ready.clear()
            self._given = 0

    def _give(self, param: Variable) -> None:
        self._given += 1
        self.reducer.add(_gradient(param))


# Which modules are distributed; a module that is gone takes its entry along.
_synchronizers: weakref.WeakKeyDictionary[Module, _GradientSync] = weakref.WeakKeyDictionary()


def distribute_module_grads(
    module: Module, scale: float | None = None, reducer: Reducer | None = None
) -> None:
    """Reduce the module's gradients over the ranks in every backward pass from now on.

    Collective. Afterwards, when ``backward()`` returns, every parameter's gradient is ``scale``
    times the sum over ranks, in place; a parameter that took no part on a rank counts as zeros
    there. At least one parameter must take part on each rank. Gradients travel in buckets while
    the pass goes on. Calling it again replaces what was installed before; it uses the parameters'
    gradient hooks.

    Several synchronised passes without ``zero_grad`` between them reduce the sum so far again:
    right with the default scale, else use :func:`no_sync` for all passes but the last.

    Args:
        module: the same on every rank.
        scale: factor of the sums, default 1 / world size: the mean.
        reducer: default ``CoalescingReducer(scale)``; it brings its own scale.

    Raises:
        TypeError: ``module`` is no Module.
        ValueError: both ``scale`` and ``reducer`` are given, or there is nothing to train.
        MismatchError: ranks' modules differ; names the first parameter that does.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    params = _trainable(module)
    if scale is not None and reducer is not None:
        raise ValueError("distribute_module_grads: a reducer has its own scale; give one of both")
    if not params:
        raise ValueError("distribute_module_grads: the module has no parameter with calc_grad")
    if reducer is None:
        reducer = CoalescingReducer(1.0 / get_world_size() if scale is None else scale)
    check_modules_agree(module)
    _synchronizers[module] = _GradientSync(params, reducer)


@contextlib.contextmanager
def no_sync(module: Module) -> Iterator[None]:
    """Within the context, backward passes only accumulate this rank's own gradients.

    The next backward pass outside reduces everything that has accumulated. Not collective by
    itself, but every rank must leave out the same passes.

    Raises:
        ValueError: ``distribute_module_grads`` was not called for this module.
    """
    sync = _synchronizers.get(module)
    if sync is None:
        raise ValueError("no_sync: call distribute_module_grads on this module first")
    before, sync.enabled = sync.enabled, False
    try:
        yield
    finally:
        sync.enabled = before


def all_reduce_parameters(module: Module) -> None:
    """Average every parameter over the ranks, in place: the start of data-parallel training.

    Collective, blocking. As in flashlight it averages, so that differently seeded ranks agree.

    Raises:
        TypeError: ``module`` is no Module.
        MismatchError: ranks' modules differ; names the first parameter that does.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    _require_module(module)
    check_modules_agree(module)
    _reduce_all([param.array for param in module.params()], 1.0 / get_world_size())


def all_reduce_gradients(module: Module, scale: float = 1.0) -> None:
    """Sum every gradient over the ranks and multiply by ``scale``, in place, after ``backward()``.

    The same by hand as :func:`distribute_module_grads` does in every pass. Collective, blocking.
    A gradient that is None counts as zeros, and is an array afterwards.

    Raises:
        TypeError: ``module`` is no Module.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    _reduce_all([_gradient(param) for param in _trainable(module)], scale)


def _reduce_all(arrays: list[Array], scale: float) -> None:
    reducer = CoalescingReducer(scale)
    for array in arrays:
        reducer.add(array)
    reducer.finalize()


def _gradient(param: Variable) -> Array:
    """Return the gradient; zeros take the place of one that this rank did not compute."""
    if param.grad is None:
        param.grad = array_module(param.array).zeros_like(param.array)
    return param.grad


def _trainable(module: Module) -> list[Variable]:
    _require_module(module)
    return [param for param in module.params() if param.calc_grad]


def _require_module(module: Module) -> None:
    if not isinstance(module, Module):
        raise TypeError(f"expected a flashlight_py.nn.Module, got {type(module).__name__}")
