"""Limits on gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flashlight_py.autograd import Variable
from flashlight_py.device import Array
from flashlight_py.optim.optimizer import as_param_list, check_at_least_zero

__all__ = ["clip_grad_norm"]


def clip_grad_norm(params: Iterable[Variable], max_norm: float) -> float:
    """Scale all gradients together so that their joint L2 norm is at most ``max_norm``.

    In place. Parameters without a gradient count as zeros. A norm that is infinite or nan leaves
    the gradients as they are. Blocks until the norm is computed. With several processes, call it
    after the gradients were reduced.

    Args:
        params: the variables whose gradients to scale.
        max_norm: the limit, at least 0.

    Returns:
        The norm before scaling.

    Raises:
        TypeError: ``params`` is not an iterable of variables, or ``max_norm`` is no number.
        ValueError: ``params`` is empty, or ``max_norm`` is negative.
    """
    limit = check_at_least_zero("max_norm", max_norm)
    grads = [p.grad for p in as_param_list(params) if p.grad is not None]
    norm = math.sqrt(sum(_sum_of_squares(grad) for grad in grads))
    if limit < norm < math.inf:
        for grad in grads:
            _scale(grad, limit / norm)
    return norm


def _scale(grad: Array, factor: float) -> None:
    grad *= factor


def _sum_of_squares(grad: Array) -> float:
    wide = grad.reshape(-1).astype("float64", copy=False)  # squares of float32 can overflow
    return float(wide.dot(wide))
