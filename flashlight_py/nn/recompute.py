"""Modules that keep their inputs alone, and compute again what a backward pass needs."""

from collections.abc import Callable
from typing import Any

from flashlight_py import random
from flashlight_py.autograd import precision
from flashlight_py.autograd.graph import Outline, Part, recording
from flashlight_py.autograd.variable import Variable
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.nn.module import Module, SomeModule


# A recomputed module leaves placeholders in the graph, with edges to what it was found to lead
# to; when the walk gets to the first, its graph takes their place in the same walk. A backward
# pass of its own inside would fire the hooks of shared parameters early and add gradients in
# another order.
def recompute(module: SomeModule) -> SomeModule:
    """Have ``module`` keep no intermediate results: the backward pass computes them again.

    In place: parameters, buffers, their names and the state dict stay as they are; copies and
    pickles recompute as well. Returns the module. For the blocks of a deep network, one by one:
    then the memory for activations is that of the blocks' inputs and of one block, for a second
    forward pass of each. Modules inside may be recomputed themselves.

    Gradients are the same to the last bit, and hooks fire when they would have. Random numbers from
    ``fl.random``, by dropout for example, are drawn again; buffers (running statistics) are changed
    by the first forward pass alone. If nothing needs a gradient, nothing is computed twice.

    The module, whose ``forward`` returns a variable, or a tuple, list or dict of them, must do the
    same the second time: what else it reads must not change between the forward and the backward
    pass, and it must return a variable that is later used in a loss, not leave it in an attribute.
    ``before_forward`` of the module is called in the first pass only, that of modules in it in
    both.

    Raises:
        TypeError: ``module`` is no Module.
        RuntimeError: in the backward pass: it did something else the second time, or was switched
            between ``train()`` and ``eval()`` in between.

    Example:
        >>> block = fl.nn.Sequential(fl.nn.Linear(4, 4), fl.nn.Tanh(), fl.nn.Dropout(0.5))
        >>> model = fl.nn.Sequential(fl.recompute(block), fl.nn.Linear(4, 1))
        >>> model(fl.input(np.ones((2, 4), np.float32))).sum().backward()
    """
    if not isinstance(module, Module):
        raise TypeError(f"recompute takes a Module, got {type(module).__name__}")
    module._instead = _run
    return module


def _run(module: Module, *inputs: Any, **options: Any) -> Any:
    """Return what ``module.forward`` does, without what it has computed on the way."""
    if recording.is_outline:  # for a module around this one, which computes this one again
        return module.forward(*inputs, **options)
    inside = [each for _, each in module._walk()]
    modes = [each.training for each in inside]
    buffers: dict[tuple[Module, str], Array] = {
        (each, name): getattr(each, name).copy() for each in inside for name in each._buffer_names
    }
    dtype = precision.here.dtype
    recording.is_outline = True
    try:
        with random.noting() as drawn, precision.casting(dtype):
            result = module.forward(*inputs, **options)
    finally:
        recording.is_outline = False
    before = {place: array for place, array in buffers.items() if _has_changed(array, *place)}

    # Not by setattr, which would say that modules compute something else from now on.
    def set_buffers(arrays: dict[tuple[Module, str], Array]) -> None:
        for (each, name), array in arrays.items():
            object.__setattr__(each, name, array)

    def repeat() -> list[Variable]:
        if [each.training for _, each in module._walk()] != modes:
            raise RuntimeError(
                "backward: a recomputed module was switched between train() and eval() after its "
                "forward pass; call backward() before"
            )
        now = {(each, name): getattr(each, name) for each, name in before}
        with random.replaying(drawn), precision.casting(dtype):
            try:
                set_buffers({place: array.copy() for place, array in before.items()})
                return _variables(module.forward(*inputs, **options))
            finally:
                set_buffers(now)

    return _with_repetition(result, repeat)


def _has_changed(before: Array, module: Module, name: str) -> bool:
    """Return whether a buffer is not what it was; of a GPU's, not to wait for it, it is True."""
    now: Array = getattr(module, name)
    return is_cupy(now) or not array_module(now).array_equal(now, before)


def _with_repetition(result: Any, repeat: Callable[[], list[Variable]]) -> Any:
    """Return ``result`` with variables whose backward pass calls ``repeat`` first.

    It is a variable, or a tuple, list or dict of variables and anything else, nested or not.
    """
    variables = _variables(result)
    targets = {
        id(variable): (place, *variable.node.targets())
        for place, variable in enumerate(variables)
        if isinstance(variable.node, Outline)
    }
    ordered = any(each for _, _, each in targets.values())
    with_parts: dict[int, Variable] = {}
    for number, (place, its_targets, _) in targets.items():
        with_parts[number] = found = Variable(variables[place].data)
        found.node = Part(found.data, repeat, place, its_targets, ordered)
        found._calc_grad = True
    # The others are passed through, or need no gradient.
    return _mapped(result, lambda variable: with_parts.get(id(variable), variable))


def _variables(result: Any) -> list[Variable]:
    if isinstance(result, Variable):
        return [result]
    inside = result.values() if isinstance(result, dict) else result
    each = inside if isinstance(result, (dict, list, tuple)) else ()
    return [variable for one in each for variable in _variables(one)]


def _mapped(result: Any, change: Callable[[Variable], Variable]) -> Any:
    """Return ``result`` with every variable replaced."""
    if isinstance(result, Variable):
        return change(result)
    if isinstance(result, dict):
        return {name: _mapped(each, change) for name, each in result.items()}
    if isinstance(result, (list, tuple)):
        each = [_mapped(one, change) for one in result]
        return type(result)(*each) if hasattr(result, "_fields") else type(result)(each)
    return result
