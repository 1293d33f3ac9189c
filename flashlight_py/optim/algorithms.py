"""The optimizers. Each defines state arrays, an update rule in rules.inc and numbers of the rule.

See :class:`FirstOrderOptimizer` for common arguments and errors.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.optim.cpu import INVERSE, LR, RATE, ROOT, SHRINK, Rule
from flashlight_py.optim.optimizer import RuleOptimizer, check_at_least_zero


class SGDOptimizer(RuleOptimizer):
    """Stochastic gradient descent with momentum, weight decay and Nesterov's variant.

    ``g = grad + weight_decay * p``; ``v = momentum * v + g``; then ``p -= lr * v``, or with
    ``nesterov`` ``p -= lr * (g + momentum * v)`` (Sutskever et al., ICML 2013, in the form of
    flashlight and torch). Without momentum: ``p -= lr * g``. ``momentum`` is at least 0.

    Raises:
        ValueError: If ``nesterov`` is True and ``momentum`` is 0.
    """

    def __init__(
        self, params: Iterable[Variable], lr: float, momentum: float = 0, weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:  # fmt: skip
        self.momentum = check_at_least_zero("momentum", momentum)
        self.nesterov = bool(nesterov)
        if nesterov and not momentum:
            raise ValueError("SGDOptimizer: momentum must be above 0 with nesterov=True, got 0")
        super().__init__(params, lr, ["velocity"] if momentum else [], weight_decay=weight_decay)

    def _rule(self) -> Rule:
        if not self._states:
            return "sgd", ((LR,), self.weight_decay)
        return "momentum", ((LR,), self.momentum, self.weight_decay, self.nesterov)

    def _state(self) -> dict[str, Any]:
        return {"velocity": [], **super()._state()}


class AdamOptimizer(RuleOptimizer):
    """Adam: steps scaled by running means of the gradient and of its square.

    ``m = beta1 * m + (1 - beta1) * g``; ``v = beta2 * v + (1 - beta2) * g * g``; then ``p -= lr *
    m' / (sqrt(v') + eps)`` with ``m' = m / (1 - beta1 ** t)`` and ``v' = v / (1 - beta2 ** t)`` at
    step ``t`` of the parameter (Kingma and Ba, 2015). ``m`` and ``v`` are float32 or wider.

    If ``decoupled``, parameters shrink by ``lr * weight_decay`` before the step (AdamW, Loshchilov
    and Hutter, ICLR 2019, as in flashlight). Otherwise ``weight_decay * p`` is added to ``g``.
    """

    def __init__(
        self, params: Iterable[Variable], lr: float, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-8, weight_decay: float = 0, *, decoupled: bool = True,
    ) -> None:  # fmt: skip
        self.decoupled = decoupled
        numbers = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, lr, ["mean", "square"], **numbers)

    def _rule(self) -> Rule:
        beta1, beta2, decay = self.beta1, self.beta2, self.weight_decay
        shrink, penalty = ((SHRINK, decay), 0.0) if self.decoupled else (1.0, decay)
        rest1, rest2, rate, root = 1 - beta1, 1 - beta2, (RATE, beta1), (ROOT, beta2)
        return "adam", (beta1, rest1, beta2, rest2, self.eps, rate, root, shrink, penalty)

    def _state(self) -> dict[str, Any]:
        return {"steps": self._steps, **super()._state()}


class AdagradOptimizer(RuleOptimizer):
    """Adagrad (Duchi et al., JMLR 2011): steps scaled by the sum of all squared gradients.

    ``s = s + g * g``; ``p = (1 - weight_decay) * p - lr * g / (sqrt(s) + eps)``. Without
    ``weight_decay``, torch has the same formula with ``eps`` 1e-10. torch's decay is an L2 penalty.
    """

    def __init__(
        self, params: Iterable[Variable], lr: float = 1.0, eps: float = 1e-8,
        weight_decay: float = 0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, ["square"], eps=eps, weight_decay=weight_decay)

    def _rule(self) -> Rule:
        return "adagrad", (self.eps, (LR,), 1 - self.weight_decay)


class RMSPropOptimizer(RuleOptimizer):
    """RMSprop (Tieleman and Hinton, 2012): steps scaled by a running mean of squares.

    ``s = rho * s + (1 - rho) * g * g``; ``p = (1 - weight_decay) * p - lr * g / (sqrt(s) + eps)``.
    If ``use_first``, ``max(s - f * f, 0)`` replaces ``s``, and ``f = rho * f + (1 - rho) * g``.
    torch's name for this is ``centered``. Without ``weight_decay``, torch has the same formula.
    torch's decay is an L2 penalty.
    """

    def __init__(
        self, params: Iterable[Variable], lr: float, rho: float = 0.99, eps: float = 1e-8,
        weight_decay: float = 0, use_first: bool = False,
    ) -> None:  # fmt: skip
        states = ["square", "mean"] if use_first else ["square"]
        super().__init__(params, lr, states, rho=rho, eps=eps, weight_decay=weight_decay)

    def _rule(self) -> Rule:
        name = "rmsprop_centered" if "mean" in self._names else "rmsprop"
        return name, (self.rho, 1 - self.rho, self.eps, (LR,), 1 - self.weight_decay)


class AdadeltaOptimizer(RuleOptimizer):
    """Adadelta (Zeiler, 2012): running means of earlier steps determine the size of a step.

    ``s = rho * s + (1 - rho) * g * g``; ``d = sqrt((u + eps) / (s + eps)) * g``; ``p = (1 -
    weight_decay) * p - lr * d``; ``u = rho * u + (1 - rho) * d * d``. Without ``weight_decay``,
    torch has the same formula with ``eps`` 1e-6. torch's decay is an L2 penalty. The paper has
    ``lr`` 1.

    Raises:
        ValueError: If ``eps`` is 0. It determines the size of the first steps.
    """

    def __init__(
        self, params: Iterable[Variable], lr: float = 1.0, rho: float = 0.9, eps: float = 1e-8,
        weight_decay: float = 0,
    ) -> None:  # fmt: skip
        if not check_at_least_zero("eps", eps):
            raise ValueError("AdadeltaOptimizer: eps must be above 0, got 0")
        numbers = {"rho": rho, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, lr, ["square", "change"], **numbers)

    def _rule(self) -> Rule:
        return "adadelta", (self.rho, 1 - self.rho, self.eps, (LR,), 1 - self.weight_decay)


class AMSgradOptimizer(RuleOptimizer):
    """AMSgrad (Reddi et al., ICLR 2018): Adam with a divisor that never decreases.

    ``m = beta1 * m + (1 - beta1) * g``; ``v = beta2 * v + (1 - beta2) * g * g``; ``w = max(w, v)``;
    ``p = (1 - weight_decay) * p - lr * m / (sqrt(w) + eps)``. As in the paper and in flashlight,
    the bias of ``m`` and ``v`` is not corrected. torch corrects it.
    """

    def __init__(
        self, params: Iterable[Variable], lr: float, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-8, weight_decay: float = 0,
    ) -> None:  # fmt: skip
        numbers = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, lr, ["mean", "square", "largest"], **numbers)

    def _rule(self) -> Rule:
        keep = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)
        return "amsgrad", (*keep, self.eps, (LR,), 1 - self.weight_decay)


class NovogradOptimizer(RuleOptimizer):
    """NovoGrad (Ginsburg et al., 2019): gradients are normalized per parameter.

    ``n`` is the sum of the squares of a gradient: ``v = beta2 * v + (1 - beta2) * n``; ``m = beta1
    * m + (1 - beta1) * (g / (sqrt(v) + eps) + weight_decay * p)``; ``p -= lr * m``, as in
    flashlight. The paper starts with ``v = n`` and has no factor ``1 - beta1``. If ``sqrt(v) +
    eps`` is 0, the quotient counts as 0.

    On a GPU, each step waits for the norm of each gradient.
    """

    def __init__(
        self, params: Iterable[Variable], lr: float, beta1: float = 0.95, beta2: float = 0.98,
        eps: float = 1e-8, weight_decay: float = 0,
    ) -> None:  # fmt: skip
        numbers = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, lr, ["mean"], **numbers)
        self._square_norms = np.zeros(len(self.params))

    def _rule(self) -> Rule:
        inverse = INVERSE, self.beta2, self.eps
        return "novograd", (self.beta1, 1 - self.beta1, inverse, (LR,), self.weight_decay)

    def _state(self) -> dict[str, Any]:
        return {"square_norms": self._square_norms, **super()._state()}
