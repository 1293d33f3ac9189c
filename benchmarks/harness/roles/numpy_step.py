"""The step written by hand: only the gradients that are needed, momentum updated in place."""

from __future__ import annotations

import numpy as np

from harness.role import Place
from harness.roles.perceptron import LR, MOMENTUM, Step, StepRole, parameters, sample


class HandWritten(StepRole):
    """One process."""

    rank, size = 0, 1

    def facts(self) -> dict[str, str]:
        return {"NumPy": np.__version__}

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def step(self, kind: str) -> Step:
        params = w1, b1, w2, b2 = parameters()
        velocities = [np.zeros_like(p) for p in params]
        x, target = sample()

        def step() -> float:
            hidden = x @ w1.T + b1
            active = np.maximum(hidden, 0)
            error = active @ w2.T + b2 - target
            loss = np.vdot(error, error) / error.size  # a fifth of the time of np.mean
            grad_out = error * (2 / error.size)
            grad_hidden = (grad_out @ w2) * (hidden > 0)
            grads = (grad_hidden.T @ x, grad_hidden.sum(0), grad_out.T @ active, grad_out.sum(0))
            for param, velocity, grad in zip(params, velocities, grads, strict=True):
                np.multiply(velocity, MOMENTUM, out=velocity)
                np.add(velocity, grad, out=velocity)
                np.subtract(param, LR * velocity, out=param)
            return float(loss)

        return step


def join(_: Place) -> HandWritten:
    """There is nobody to meet."""
    return HandWritten()
