"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashlight_py import kernels
from flashlight_py.autograd import Variable
from flashlight_py.device import Array, is_cupy
from flashlight_py.optim.optimizer import (
    FirstOrderOptimizer,
    check_at_least_zero,
    constants_like,
    zeros_like,
)


class SGDOptimizer(FirstOrderOptimizer):
    """Stochastic gradient descent with momentum, weight decay and Nesterov's variant.

    ``g = grad + weight_decay * p``; ``v = momentum * v + g``; then ``p -= lr * v``, or with
    Nesterov ``p -= lr * (g + momentum * v)`` (Sutskever et al., ICML 2013, in the form of
    flashlight and torch). Without momentum ``p -= lr * g``.

    Args:
        params: the variables to change.
        lr: the learning rate, at least 0.
        momentum: how much of the last step is kept, at least 0.
        weight_decay: the factor of the L2 penalty's gradient, at least 0.
        nesterov: look ahead; needs momentum.

    Raises:
        TypeError: ``params`` is not an iterable of variables, or a number is none.
        ValueError: a number is negative, ``params`` is empty, or Nesterov without momentum.
    """

    def __init__(
        self,
        params: Iterable[Variable],
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr)
        self.momentum = check_at_least_zero("momentum", momentum)
        self.weight_decay = check_at_least_zero("weight_decay", weight_decay)
        self.nesterov = nesterov
        if nesterov and not momentum:
            raise ValueError("nesterov=True needs a momentum above 0")
        self._momenta = constants_like(self.params, self.momentum)
        self._velocity = [zeros_like(p) for p in self.params] if momentum else []

    def step(self) -> None:
        """Change every parameter that has a gradient, in place; gradients stay as they are."""
        for position, variable in enumerate(self.params):
            if variable.grad is None:
                continue
            array = variable.data
            if is_cupy(array):
                self._fused(position, array, variable.grad)
            else:
                array -= self._direction(position, array, variable.grad) * self._rates[position]

    def _fused(self, position: int, array: Array, grad: Array) -> None:
        velocity = self._velocity[position] if self.momentum else None
        decay = self.weight_decay
        kernels.sgd(array, grad, velocity, self._lr, self.momentum, decay, self.nesterov)

    def _direction(self, position: int, array: Array, grad: Array) -> Array:
        """Fold ``grad`` into the velocity; return the direction of the step."""
        if self.weight_decay:
            grad = grad + array * self.weight_decay
        if not self.momentum:
            return grad
        momentum, velocity = self._momenta[position], self._velocity[position]
        velocity *= momentum
        velocity += grad
        return grad + velocity * momentum if self.nesterov else velocity

    def _state(self) -> dict[str, list[Any]]:
        return {"velocity": self._velocity}
