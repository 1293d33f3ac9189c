"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.optim.cuda import Rule
from flashlight_py.optim.optimizer import check_at_least_zero
from flashlight_py.optim.rule import RuleOptimizer


class SGDOptimizer(RuleOptimizer):
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
        self.momentum = check_at_least_zero("momentum", momentum)
        self.weight_decay = check_at_least_zero("weight_decay", weight_decay)
        self.nesterov = bool(nesterov)
        if nesterov and not momentum:
            raise ValueError("nesterov=True needs a momentum above 0")
        super().__init__(params, lr, ["velocity"] if momentum else [])

    def _rule(self, position: int, grad_scale: float) -> Rule:
        if not self._states:
            return "sgd", (self._lr, self.weight_decay)
        return "momentum", (self._lr, self.momentum, self.weight_decay, self.nesterov)

    def _state(self) -> dict[str, list[Any]]:
        return {"velocity": [], **super()._state()}
