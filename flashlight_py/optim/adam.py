"""Adam (Kingma and Ba, ICLR 2015), with weight decay decoupled or not."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.optim.cuda import Rule
from flashlight_py.optim.optimizer import check_at_least_zero, check_below_one
from flashlight_py.optim.rule import RuleOptimizer


class AdamOptimizer(RuleOptimizer):
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
        self.beta1 = check_below_one("beta1", beta1)
        self.beta2 = check_below_one("beta2", beta2)
        self.eps = check_at_least_zero("eps", eps)
        self.weight_decay = check_at_least_zero("weight_decay", weight_decay)
        self.decoupled = decoupled
        super().__init__(params, lr, ["mean", "square"])

    def _rule(self, position: int, grad_scale: float) -> Rule:
        # Called at every step, also of models for which it is half of the time.
        beta1, beta2, lr, decay = self.beta1, self.beta2, self._lr, self.weight_decay
        time = self._steps[position]
        rate, root = lr / (1 - beta1**time), 1 / sqrt(1 - beta2**time)
        shrink, penalty = (1 - lr * decay, 0.0) if self.decoupled else (1.0, decay)
        return "adam", (
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            self.eps,
            rate,
            root,
            shrink,
            penalty,
        )

    def _state(self) -> dict[str, list[Any]]:
        return {"steps": self._steps, **super()._state()}
