"""Arrays whose elements a step reads by ways of their own: it stays eager, and nothing is stale."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl

X = np.random.default_rng(0).random((12, 4, 3))


def times(held: np.ndarray, x: np.ndarray) -> Any:
    return x * float(held[0])


def by_name(x: np.ndarray, held: np.ndarray) -> Any:
    return x * float(held[0])


def in_a_proxy(held: np.ndarray) -> Callable[[np.ndarray], Any]:
    proxy = types.MappingProxyType({"held": held})
    return lambda x: x * float(proxy["held"][0])


STEPS: dict[str, Callable[[np.ndarray], Callable[[np.ndarray], Any]]] = {
    "partial": lambda held: functools.partial(times, held),
    "partial by name": lambda held: functools.partial(by_name, held=held),
    "proxy": in_a_proxy,
    "memory": lambda held: lambda x: x * held.data[0],
    "repeat": lambda held: lambda x: np.repeat(x, held.astype(int), axis=1),
    "bytes": lambda held: lambda x: x * bytes(held)[6],
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_read_is_never_stale(name: str) -> None:
    held = np.ones(3)
    step = STEPS[name](held)
    captured = fl.capture(step)

    def steps() -> None:
        for number, x in enumerate(X):
            held[...] = max(1, number - 5)
            assert np.array_equal(captured(x), step(x))

    with pytest.warns(RuntimeWarning, match="stays eager") as caught:
        steps()
    assert len(caught) == 1
    assert captured.replays == 0
