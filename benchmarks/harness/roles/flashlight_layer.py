"""A layer of fl.nn, forward and backward.

Images have channels last in memory, as the layer before would produce them, except the input of the
first layer.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.autograd.variable import record
from harness.role import Prepared, RankSetup, Role
from harness.roles import flashlight
from harness.roles.layer_works import WORKS, fill, input_of, sample, weights_of


class Flashlight(Role):
    """One process."""

    def __init__(self, setup: RankSetup) -> None:
        self.rank, self.size = setup.rank, setup.size

    def facts(self) -> dict[str, str]:
        return flashlight.facts()

    def barrier(self) -> None:
        pass

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        work = WORKS[task["work"]]
        layer = eval(work.ours, {"nn": fl.nn})
        params = layer.params()
        fill([param.array for param in params])
        array = input_of(work) if work.is_first else last(input_of(work))
        inputs: list[Any] = []
        below = fl.param(np.zeros(1, np.float32))

        def take(grad: Any) -> Any:
            """Keep the gradient without a copy, as the layer before would; a leaf would copy it."""
            inputs[:] = [grad]
            return np.zeros(1, np.float32)

        def forward() -> Any:
            is_data = work.most or work.is_first
            y = layer(fl.input(array) if is_data else record(array, (below, take)))
            return y[0] if isinstance(y, tuple) else y

        grad = last(weights_of(forward().shape))

        def step() -> Any:
            for variable in (below, *params):
                variable.grad = None
            y = forward()
            y.backward(grad)
            return y

        y = step()
        grads = [*inputs, *(variable.grad for variable in params)]
        return Prepared(step, sample(work, [y.array, *grads]), clock=time.process_time)


def last(array: Any) -> Any:
    """Return images with channels last in memory, and other arrays unchanged."""
    if array.ndim != 4:
        return array
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def join(setup: RankSetup) -> Flashlight:
    """Return the role of the only rank."""
    return Flashlight(setup)
