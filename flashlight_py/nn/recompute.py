"""Modules that keep only their inputs, and repeat their forward pass in the backward pass."""

from collections.abc import Callable
from typing import Any

from flashlight_py import random
from flashlight_py.autograd import precision
from flashlight_py.autograd.graph import Outline, Part, this_thread
from flashlight_py.autograd.variable import Variable
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.nn.module import Module, SomeModule


# A recomputed module leaves ``Part`` nodes in the graph (see ``autograd.graph``). A nested backward
# pass would call hooks of shared parameters too early and reorder sums.
def recompute(module: SomeModule) -> SomeModule:
    """Make ``module`` keep no intermediate results. The backward pass computes them again.

    The module is changed in place and returned. Parameters, buffers, names and the state dict are
    not changed. Copies and pickles recompute as well. Apply this to each block of a deep network.
    Memory is then needed for the inputs of all blocks and the activations of one block. Each block
    runs a second forward pass. A submodule of a recomputed module may also be recomputed.

    Gradients are identical to the last bit, and hooks run in the same order. Random numbers from
    ``fl.random``, for example for dropout, are repeated. Buffers (running statistics) are updated
    only by the first forward pass. Without a backward pass there is no second forward pass.

    ``forward`` must return a variable, or a tuple, list or dict of variables, and must repeat the
    same operations. Other data that it reads must not change between the forward and the backward
    pass. A variable that the loss uses must be returned, not stored in an attribute.
    ``before_forward`` of the module is called in the first pass only. ``before_forward`` of its
    submodules is called in both passes.

    Raises:
        TypeError: If ``module`` is not a Module.
        RuntimeError: If the second pass does other operations, or if ``train()`` or ``eval()`` was
            called between the passes. ``backward()`` raises the error.

    Example:
        >>> block = fl.nn.Sequential(fl.nn.Linear(4, 4), fl.nn.Tanh(), fl.nn.Dropout(0.5))
        >>> model = fl.nn.Sequential(fl.recompute(block), fl.nn.Linear(4, 1))
        >>> model(fl.input(np.ones((2, 4), np.float32))).sum().backward()
    """
    if not isinstance(module, Module):
        raise TypeError(f"recompute: expected a Module, got {type(module).__name__}")
    module._instead = _run
    return module


def _run(module: Module, *inputs: Any, **options: Any) -> Any:
    if this_thread.is_outline:  # the module is inside a recomputed module
        return module.forward(*inputs, **options)
    inside = [inner for _, inner in module._walk()]
    modes = [inner.training for inner in inside]
    buffers: dict[tuple[Module, str], Array] = {
        (m, name): getattr(m, name).copy() for m in inside for name in m._buffer_names
    }
    dtype = precision.active_precision.dtype
    this_thread.is_outline = True
    try:
        with random.noting() as drawn, precision.casting(dtype):
            result = module.forward(*inputs, **options)
    finally:
        this_thread.is_outline = False
    before = {key: array for key, array in buffers.items() if _has_changed(array, *key)}

    # setattr() would report a change of structure, after which captured steps are recorded again.
    def set_buffers(arrays: dict[tuple[Module, str], Array]) -> None:
        for (inner, name), array in arrays.items():
            object.__setattr__(inner, name, array)

    def repeat() -> list[Variable]:
        if [inner.training for _, inner in module._walk()] != modes:
            raise RuntimeError(
                "backward: train() or eval() was called on a recomputed module after its forward "
                "pass. Call backward() first"
            )
        now = {(inner, name): getattr(inner, name) for inner, name in before}
        with random.replaying(drawn), precision.casting(dtype):
            try:
                set_buffers({key: array.copy() for key, array in before.items()})
                return _variables(module.forward(*inputs, **options))
            finally:
                set_buffers(now)

    return _with_repetition(result, repeat)


def _has_changed(before: Array, module: Module, name: str) -> bool:
    """Return whether buffer ``name`` differs from ``before``. On a GPU, assume that it does."""
    now: Array = getattr(module, name)
    return is_cupy(now) or not array_module(now).array_equal(now, before)


def _with_repetition(result: Any, repeat: Callable[[], list[Variable]]) -> Any:
    """Return ``result`` with new variables, each with a ``Part`` that can call ``repeat``."""
    variables = _variables(result)
    targets = {
        id(variable): (position, *variable.node.targets())
        for position, variable in enumerate(variables)
        if isinstance(variable.node, Outline)
    }
    ordered = any(is_ordered for _, _, is_ordered in targets.values())
    with_parts: dict[int, Variable] = {}
    for number, (position, its_targets, _) in targets.items():
        with_parts[number] = repeated = Variable(variables[position].data)
        repeated.node = Part(repeated.data, repeat, position, its_targets, ordered)
        repeated._calc_grad = True
    # Inputs that the module returns, and variables without gradient, are returned unchanged.
    return _mapped(result, lambda variable: with_parts.get(id(variable), variable))


def _variables(result: Any) -> list[Variable]:
    variables: list[Variable] = []
    _mapped(result, variables.append)
    return variables


def _mapped(result: Any, change: Callable[[Variable], Any]) -> Any:
    if isinstance(result, Variable):
        return change(result)
    if isinstance(result, dict):
        return {name: _mapped(item, change) for name, item in result.items()}
    if isinstance(result, (list, tuple)):
        items = [_mapped(item, change) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result
