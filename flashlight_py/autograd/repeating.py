"""Computations whose intermediate results are not kept, but computed again when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashlight_py.autograd.graph import Outline, Part, Repeated, recording
from flashlight_py.autograd.variable import Variable


def is_outlining() -> bool:
    """Return whether this thread is in a computation whose intermediate results are not kept."""
    return recording.is_outline


def outline(compute: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``compute(*inputs)``, of which no intermediate result is kept.

    The variables in it have no gradient until ``with_repetition`` gives them one.
    """
    before, recording.is_outline = recording.is_outline, True
    try:
        return compute(*inputs)
    finally:
        recording.is_outline = before


def with_repetition(result: Any, repeat: Callable[[], Any]) -> Any:
    """Return what ``outline`` returned with variables whose backward pass calls ``repeat`` first.

    That computes the same again. The result is a variable, or a tuple, list or dict of variables
    and anything else, nested or not.
    """
    whole = Repeated(lambda: _variables(repeat()))
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
        found.node = Part(found.data, whole, place, its_targets, ordered)
        found._calc_grad = True
    # The others are passed through, or need no gradient.
    return _mapped(result, lambda variable: with_parts.get(id(variable), variable))


def _variables(result: Any) -> list[Variable]:
    found: list[Variable] = []

    def keep(variable: Variable) -> Variable:
        found.append(variable)
        return variable

    _mapped(result, keep)
    return found


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
