"""The step with JAX: one compiled function, whose arrays are given back to it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from harness.role import Place
from harness.roles.perceptron import LR, MOMENTUM, Step, StepRole, parameters, sample


class Jax(StepRole):
    """One process."""

    rank, size = 0, 1

    def facts(self) -> dict[str, str]:
        return {"JAX": jax.__version__}

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def step(self, kind: str) -> Step:
        state: Any = [jnp.asarray(p) for p in parameters()]
        velocities: Any = [jnp.zeros_like(p) for p in state]
        x, target = map(jnp.asarray, sample())

        def step() -> float:
            nonlocal state, velocities
            state, velocities, loss = _update(state, velocities, x, target)
            return float(loss)

        return step


def _loss(params: Any, x: Any, target: Any) -> Any:
    w1, b1, w2, b2 = params
    hidden = jnp.maximum(x @ w1.T + b1, 0)
    return jnp.mean((hidden @ w2.T + b2 - target) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _update(params: Any, velocities: Any, x: Any, target: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, x, target)
    velocities = [MOMENTUM * v + g for v, g in zip(velocities, grads, strict=True)]
    return [p - LR * v for p, v in zip(params, velocities, strict=True)], velocities, loss


def join(_: Place) -> Jax:
    """There is nobody to meet."""
    return Jax()
