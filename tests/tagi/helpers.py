"""Shared helpers of the TAGI tests: numbers, steps, comparisons, and NumPy instead of kernels."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from flashlight_py.tagi.states import tagi_kernels

needs_kernels = pytest.mark.skipif(
    tagi_kernels() is None, reason="the native kernels are not built"
)


def in_numpy(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of fl.tagi as if the kernels were not built."""
    with mock.patch("flashlight_py._native.optional", return_value=None):
        return function(*args)


def network(layers: str, seed: int = 0) -> nn.Sequential:
    """Create a network from ``layers``, an expression with the names of ``nn``."""
    tagi.manual_seed(seed)
    net: nn.Sequential = eval(f"Sequential({layers})", dict(vars(nn)))
    return net


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def channels_first(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) for a in arrays)


def observe(net: nn.Sequential, y: Any, errors: Any = 0.1) -> None:
    """Observe the last outputs and set the sums of all parameters."""
    nn.OutputUpdater(net.device).update(net.output_z_buffer, y, errors, net.input_delta_z_buffer)
    net.backward()


def learn(net: nn.Sequential, x: Any, y: Any, errors: Any = 0.1) -> None:
    """Run one training step."""
    net(x)
    observe(net, y, errors)
    net.step()


def equal(actual: Any, expected: Any, rtol: float = 0, atol: float = 0, message: str = "") -> None:
    """Compare arrays, or equally structured dictionaries, tuples and lists of arrays."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            equal(actual[key], value, rtol, atol, f"{message} {key}")
    elif isinstance(expected, np.ndarray) or not isinstance(expected, Iterable):
        np.testing.assert_allclose(actual, expected, rtol, atol, err_msg=message)
    else:
        for one, other in zip(actual, expected, strict=True):
            equal(one, other, rtol, atol, message)
