"""The step with JAX: one compiled function that reuses the memory of its arguments."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from harness.role import RankSetup
from harness.roles.perceptron import (
    BETAS,
    EPS,
    LR,
    MOMENTUM,
    Recipe,
    Step,
    StepRole,
    batches,
    parameters,
)


class Jax(StepRole):
    """One process."""

    rank, size = 0, 1

    def __init__(self) -> None:
        jax.config.update("jax_enable_x64", True)  # float32 arrays stay float32

    def facts(self) -> dict[str, str]:
        return {"JAX": jax.__version__}

    def barrier(self) -> None:
        """Return, because there is no other rank."""

    def step(self, recipe: Recipe, kind: str) -> Step:
        loss_of = _LOSSES[recipe.loss]
        coming = itertools.cycle([(jnp.asarray(x), jnp.asarray(y)) for x, y in batches(recipe)])
        params: Any = [jnp.asarray(p) for p in parameters(recipe)]
        moments: Any = [[jnp.zeros_like(p) for p in params] for _ in _MOMENTS[recipe.rule]]
        count = jnp.zeros((), recipe.dtype)
        rule = _RULES[recipe.rule]
        forward = jax.jit(loss_of)

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def update(params: Any, moments: Any, count: Any, x: Any, y: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(params, x, y)
            return *rule(params, moments, grads, count + 1), count + 1, loss

        def evaluate() -> float:
            return float(forward(params, *next(coming)))

        def step() -> float:
            nonlocal params, moments, count
            params, moments, count, loss = update(params, moments, count, *next(coming))
            return float(loss)

        return step if recipe.trains else evaluate


def _result(params: Any, x: Any) -> Any:
    for weight, bias in zip(params[:-2:2], params[1:-2:2], strict=True):
        x = jnp.maximum(x @ weight.T + bias, 0)
    return x @ params[-2].T + params[-1]


def _mean_squared_error(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((_result(params, x) - y) ** 2)


def _cross_entropy(params: Any, x: Any, y: Any) -> Any:
    scores = jax.nn.log_softmax(_result(params, x))
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))


def _sgd(params: Any, moments: Any, grads: Any, _: Any) -> Any:
    velocities = [MOMENTUM * v + g for v, g in zip(moments[0], grads, strict=True)]
    return [p - LR * v for p, v in zip(params, velocities, strict=True)], [velocities]


def _adam(params: Any, moments: Any, grads: Any, time: Any) -> Any:
    beta1, beta2 = BETAS
    means = [beta1 * m + (1 - beta1) * g for m, g in zip(moments[0], grads, strict=True)]
    squares = [beta2 * s + (1 - beta2) * g * g for s, g in zip(moments[1], grads, strict=True)]
    rate, root = LR / (1 - beta1**time), jnp.sqrt(1 - beta2**time)
    changes = [m / (jnp.sqrt(s) / root + EPS) for m, s in zip(means, squares, strict=True)]
    return [p - rate * c for p, c in zip(params, changes, strict=True)], [means, squares]


_LOSSES = {"mse": _mean_squared_error, "cross entropy": _cross_entropy}
_RULES = {"sgd": _sgd, "adam": _adam}
_MOMENTS = {"sgd": ["velocity"], "adam": ["mean", "square"]}


def join(_: RankSetup) -> Jax:
    """Return the role of the only rank."""
    return Jax()
