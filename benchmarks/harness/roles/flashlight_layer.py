"""A layer of fl.nn or a function, forward and backward.

Images have channels last in memory, as the layer before would produce them, except the input of the
first layer.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.autograd.variable import record
from harness.role import Prepared, RankSetup, Role
from harness.roles import flashlight
from harness.roles.layer_works import Work, arrays_of, fill, need_gradient, sample, weights_of


class Flashlight(Role):
    """One process."""

    def __init__(self, setup: RankSetup) -> None:
        self.rank, self.size = setup.rank, setup.size

    def facts(self) -> dict[str, str]:
        return flashlight.facts()

    def barrier(self) -> None:
        pass

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        work = Work(**task["work"])
        layer = eval(work.ours, {"nn": fl.nn, "F": fl.autograd.functions})
        params = layer.params() if isinstance(layer, fl.nn.Module) else []
        fill([param.array for param in params])
        grads: dict[int, Any] = {}  # by position of the input
        below = [fl.param(np.zeros(1, np.float32)) for _ in work.inputs]

        def source(position: int, array: Any, needs_gradient: bool) -> Callable[[], Any]:
            """Return a function that returns the input, as the layer before would."""

            def take(grad: Any) -> Any:
                """Keep the gradient without a copy. A leaf would copy it."""
                grads[position] = grad
                return np.zeros(1, np.float32)

            if not needs_gradient:
                return lambda: fl.input(array)
            array = last(array) if work.has_images() else array
            return lambda: record(array, (below[position], take))

        inputs = map(source, itertools.count(), arrays_of(work), need_gradient(work))
        sources = [*inputs]

        def forward() -> Any:
            y = layer(*[source() for source in sources])
            return y[0] if isinstance(y, tuple) else y

        grad = weights_of(forward().shape)
        grad = last(grad) if work.has_images() else grad

        def step() -> Any:
            for variable in (*below, *params):
                variable.grad = None
            y = forward()
            y.backward(grad)
            return y

        y = step()
        of_inputs = [grads[position] for position in sorted(grads)]
        results = [y.array, *of_inputs, *(variable.grad for variable in params)]
        return Prepared(step, sample(results), clock=time.process_time)


def last(array: Any) -> Any:
    """Return images with channels last in memory."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def join(setup: RankSetup) -> Flashlight:
    """Return the role of the only rank."""
    return Flashlight(setup)
