"""Steps in two copies, an eager and a captured one, to be compared bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import flashlight_py as fl


class Twin:
    """A step, and the variables and the optimizer that it changes."""

    def __init__(self, step: Any, variables: list[fl.Variable], optimizer: Any = None) -> None:
        self.step, self.variables, self.optimizer = step, variables, optimizer

    def state(self) -> list[Any]:
        """All that a step leaves behind."""
        found: list[Any] = [variable.array for variable in self.variables]
        found += [variable.grad for variable in self.variables]
        if self.optimizer is not None:
            found.append(self.optimizer.state_dict())
        return found

    def assert_replayed(self, calls: int, eager: int = 3) -> None:
        """All calls but the first ones were replays."""
        assert self.step.reason == ""
        assert self.step.replays == calls - eager


def twins(make: Callable[[], tuple[Any, ...]]) -> tuple[Twin, Twin]:
    """Return what ``make`` makes, eager and captured: (step, variables[, optimizer])."""
    eager, (step, *rest) = Twin(*make()), make()
    return eager, Twin(fl.capture(step), *rest)


def assert_same_bits(expected: Any, got: Any) -> None:
    """Both are nested in the same way, of arrays, variables and numbers with the same bits."""
    if isinstance(expected, fl.Variable):
        assert type(got) is fl.Variable
        assert got.calc_grad == expected.calc_grad
        expected, got = expected.array, got.array
    if isinstance(expected, np.ndarray):
        assert type(got) is np.ndarray
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert got.tobytes() == expected.tobytes(), f"{expected} {got}"
    elif isinstance(expected, dict):
        assert list(expected) == list(got)
        assert_same_bits(list(expected.values()), list(got.values()))
    elif isinstance(expected, (list, tuple)):
        assert type(expected) is type(got)
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            assert_same_bits(one, other)
    else:
        assert type(expected) is type(got)
        assert repr(expected) == repr(got)


def compare(step: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Any:
    """Call an eager and a captured step alike; return the captured one."""
    captured = fl.capture(step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "capture: .* stays eager", RuntimeWarning)
        for args in calls:
            memory: dict[int, Any] = {}  # with the same arrays in common, in a copy
            other = [_copied(arg, memory) for arg in args]
            assert_same_bits(step(*args), captured(*other))
            assert_same_bits(list(filter(_is_array, args)), list(filter(_is_array, other)))
    return captured


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _copied(value: Any, memory: dict[int, Any]) -> Any:
    if not _is_array(value):
        return value
    base = value if value.base is None else value.base
    if not _is_array(base) or base.dtype != value.dtype:
        return value.copy(order="K")
    copy = memory.setdefault(id(base), base.copy(order="K"))
    at = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return np.ndarray(value.shape, value.dtype, copy, at, value.strides)


def optimizers() -> dict[str, Callable[[list[fl.Variable]], Any]]:
    """Every optimizer, with options that use all of its rule."""
    optim = fl.optim
    return {
        "sgd": lambda p: optim.SGDOptimizer(p, 0.1),
        "sgd_decay": lambda p: optim.SGDOptimizer(p, 0.1, weight_decay=0.01),
        "momentum": lambda p: optim.SGDOptimizer(p, 0.1, momentum=0.9, weight_decay=0.01),
        "nesterov": lambda p: optim.SGDOptimizer(p, 0.1, momentum=0.9, nesterov=True),
        "adam": lambda p: optim.AdamOptimizer(p, 0.1, weight_decay=0.01),
        "adam_l2": lambda p: optim.AdamOptimizer(p, 0.1, weight_decay=0.01, decoupled=False),
        "adagrad": lambda p: optim.AdagradOptimizer(p, 0.1, weight_decay=0.01),
        "rmsprop": lambda p: optim.RMSPropOptimizer(p, 0.1),
        "rmsprop_centered": lambda p: optim.RMSPropOptimizer(p, 0.1, use_first=True),
        "adadelta": lambda p: optim.AdadeltaOptimizer(p, 0.1),
        "amsgrad": lambda p: optim.AMSgradOptimizer(p, 0.1),
        "novograd": lambda p: optim.NovogradOptimizer(p, 0.1),
    }
