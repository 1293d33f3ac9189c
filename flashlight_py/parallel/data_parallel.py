"""Data-parallel training: where a module's gradients meet communication.

Each rank computes gradients on its own share of the data; here they are reduced over the ranks
while the backward pass still goes on. Autograd calls a parameter's hook when its gradient is
complete; the hook hands the gradient to a reducer; when the pass ends, what is left is finished.
So after ``loss.backward()`` the gradients are the reduced ones.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from flashlight_py.autograd import Variable
from flashlight_py.device import Array
from flashlight_py.distributed import DistributedConstants, get_world_size
from flashlight_py.distributed.hook_reducer import HookReducer
from flashlight_py.distributed.hooks import CommunicationHook
from flashlight_py.distributed.reducer import CoalescingReducer, EagerReducer, Reducer
from flashlight_py.nn import Module
from flashlight_py.parallel.agreement import check_modules_agree
from flashlight_py.parallel.gradient_sync import (
    GradientSync,
    buffers_of,
    flat_buckets,
    gradient_of,
    one_by_one,
)

__all__ = [
    "all_reduce_gradients",
    "all_reduce_parameters",
    "distribute_module_grads",
    "gradient_sync_of",
    "no_sync",
]


# Which modules are distributed; a module that is gone takes its entry along.
_synchronizers: weakref.WeakKeyDictionary[Module, GradientSync] = weakref.WeakKeyDictionary()


def distribute_module_grads(
    module: Module,
    scale: float | None = None,
    reducer: Reducer | None = None,
    hook: CommunicationHook | None = None,
) -> None:
    """Reduce the module's gradients over the ranks in every backward pass from now on.

    Collective. Afterwards, when ``backward()`` returns, every parameter's gradient is ``scale``
    times the sum over ranks, in place; a parameter that took no part on a rank counts as zeros
    there. At least one parameter must take part on each rank. Gradients become views into flat
    buckets, which travel while the pass goes on. Calling it again replaces what was installed
    before; it uses the parameters' gradient hooks.

    Several synchronised passes without ``zero_grad`` between them reduce the sum so far again:
    right with the default scale, else use :func:`no_sync` for all passes but the last.

    Args:
        module: the same on every rank.
        scale: factor of the sums, default 1 / world size: the mean.
        reducer: is given each gradient by itself, instead of the buckets; it brings its own
            scale.
        hook: reduces the buckets in a way of its own, such as ``fl.Float16Compression()``; made
            alike on every rank, and for this module alone.

    Raises:
        TypeError: ``module`` is no Module, ``hook`` is not callable or compresses other dtypes.
        ValueError: both ``scale`` and ``reducer`` are given, or ``hook`` and ``reducer``, or there
            is nothing to train.
        MismatchError: ranks' modules differ; names the first parameter that does.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    params = _trainable(module)
    if scale is not None and reducer is not None:
        raise ValueError("distribute_module_grads: a reducer has its own scale; give one of both")
    if hook is not None and reducer is not None:
        raise ValueError("distribute_module_grads: give the hook to the reducer, not beside it")
    if not params:
        raise ValueError("distribute_module_grads: the module has no parameter with calc_grad")
    check_modules_agree(module)
    in_order = params[::-1]  # about the order in which a backward pass completes them
    if reducer is not None:
        _synchronizers[module] = GradientSync(one_by_one(in_order), reducer)
        return
    factor = 1.0 / get_world_size() if scale is None else scale
    units = flat_buckets(in_order, DistributedConstants.COALESCE_CACHE_SIZE)
    if hook is None:
        reducer = EagerReducer(factor)
    else:
        reducer = HookReducer(factor, hook, [buffers_of(unit.params) for unit in units])
    _synchronizers[module] = GradientSync(units, reducer, averages=scale is None)


def gradient_sync_of(module: Module, caller: str) -> GradientSync:
    """Return what :func:`distribute_module_grads` has installed.

    Raises:
        ValueError: nothing; the message says that ``caller`` needs it.
    """
    sync = _synchronizers.get(module)
    if sync is None:
        raise ValueError(f"{caller}: call distribute_module_grads on this module first")
    return sync


@contextlib.contextmanager
def no_sync(module: Module) -> Iterator[None]:
    """Within the context, backward passes only accumulate this rank's own gradients.

    The next backward pass outside reduces everything that has accumulated. Not collective by
    itself, but every rank must leave out the same passes.

    Raises:
        ValueError: ``distribute_module_grads`` was not called for this module.
    """
    sync = gradient_sync_of(module, "no_sync")
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
    _reduce_all([gradient_of(param) for param in _trainable(module)], scale)


def _reduce_all(arrays: list[Array], scale: float) -> None:
    reducer = CoalescingReducer(scale)
    for array in arrays:
        reducer.add(array)
    reducer.finalize()


def _trainable(module: Module) -> list[Variable]:
    _require_module(module)
    return [param for param in module.params() if param.calc_grad]


def _require_module(module: Module) -> None:
    if not isinstance(module, Module):
        raise TypeError(f"expected a flashlight_py.nn.Module, got {type(module).__name__}")
