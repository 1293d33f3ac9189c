"""Adam (Kingma and Ba, ICLR 2015), with weight decay decoupled or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashlight_py import kernels
from flashlight_py.autograd import Variable
from flashlight_py.autograd.narrow import widened
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.optim.optimizer import (
    FirstOrderOptimizer,
    check_at_least_zero,
    check_below_one,
    zeros_like,
)


class AdamOptimizer(FirstOrderOptimizer):
    """Adam: steps scaled by running means of the gradient and of its square.

    ``m = beta1 * m + (1 - beta1) * g``; ``v = beta2 * v + (1 - beta2) * g * g``; then
    ``p -= lr * m' / (sqrt(v') + eps)`` where ``m'`` and ``v'`` are ``m / (1 - beta1 ** t)`` and
    ``v / (1 - beta2 ** t)`` at the parameter's own step ``t``: algorithm 1 of the paper. ``m`` and
    ``v`` of float16 parameters are float32.

    Args:
        params: the variables to change.
        lr: the learning rate, at least 0.
        beta1: decay of the mean of gradients, in ``0 <= beta1 < 1``.
        beta2: decay of the mean of squares, in ``0 <= beta2 < 1``.
        eps: keeps the divisor from 0, at least 0.
        weight_decay: at least 0.
        decoupled: shrink parameters by ``lr * weight_decay`` before the step (AdamW, Loshchilov
            and Hutter, ICLR 2019; flashlight's way); else add ``weight_decay * p`` to ``g``.

    Raises:
        TypeError: ``params`` is not an iterable of variables, or a number is none.
        ValueError: a number is outside its range, or ``params`` is empty.
    """

    def __init__(
        self,
        params: Iterable[Variable],
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        decoupled: bool = True,
    ) -> None:
        super().__init__(params, lr)
        self.beta1 = check_below_one("beta1", beta1)
        self.beta2 = check_below_one("beta2", beta2)
        self.eps = check_at_least_zero("eps", eps)
        self.weight_decay = check_at_least_zero("weight_decay", weight_decay)
        self.decoupled = decoupled
        self._steps = [0] * len(self.params)
        self._mean = [widened(zeros_like(p)) for p in self.params]
        self._square = [widened(zeros_like(p)) for p in self.params]

    def step(self) -> None:
        """Change every parameter that has a gradient, in place; gradients stay as they are."""
        for position, variable in enumerate(self.params):
            if variable.grad is None:
                continue
            array = variable.data
            if is_cupy(array):
                self._fused(position, array, variable.grad)
            else:
                grad = self._with_decay(array, widened(variable.grad))
                array -= self._scaled_mean(position, grad)

    def _fused(self, position: int, array: Array, grad: Array) -> None:
        self._steps[position] += 1
        time = self._steps[position]
        kernels.adam(
            array,
            grad,
            self._mean[position],
            self._square[position],
            self.beta1,
            self.beta2,
            self.eps,
            rate=self._lr / (1 - self.beta1**time),
            correction=1 - self.beta2**time,
            shrink=1 - self._lr * self.weight_decay if self.decoupled else 1.0,
            decay=0.0 if self.decoupled else self.weight_decay,
        )

    def _with_decay(self, array: Array, grad: Array) -> Array:
        if self.weight_decay and self.decoupled:
            array *= 1 - self._lr * self.weight_decay
        elif self.weight_decay:
            return grad + array * self.weight_decay
        return grad

    def _scaled_mean(self, position: int, grad: Array) -> Array:
        """Fold ``grad`` into the running means; return what to subtract from the parameter."""
        self._steps[position] += 1
        time = self._steps[position]
        mean, square = self._mean[position], self._square[position]
        mean *= self.beta1
        mean += grad * (1 - self.beta1)
        square *= self.beta2
        scaled = grad * grad
        scaled *= 1 - self.beta2
        square += scaled
        divisor: Array = array_module(square).sqrt(square / (1 - self.beta2**time))
        divisor += self.eps
        return mean / divisor * (self._lr / (1 - self.beta1**time))

    def _state(self) -> dict[str, list[Any]]:
        return {"steps": self._steps, "mean": self._mean, "square": self._square}
