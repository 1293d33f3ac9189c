"""Limits on gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array
from flashlight_py.optim.optimizer import as_param_list, check_at_least_zero
from flashlight_py.optim.placement import Shards


class Summing(Protocol):
    """What a sum over ranks is asked of, such as a ``fl.ProcessGroup``."""

    def all_reduce(self, x: Any) -> Any:
        """Sum ``x`` over the ranks, in place."""


def clip_grad_norm(
    params: Iterable[Variable], max_norm: float, group: Summing | None = None
) -> float:
    """Scale all gradients together so that their joint L2 norm is at most ``max_norm``.

    In place. Parameters without a gradient count as zeros. A norm that is infinite or nan leaves
    the gradients as they are. Blocks until the norm is computed.

    With several processes that have the same parameters, call it after the gradients were reduced,
    without a group: the norm is the same on every rank. Where ranks have different parameters, as
    parts of one model, pass their group: the squares are summed over it, in one small message, and
    all ranks scale by the same factor. Of a sharded module's parameters each rank scales its own
    pieces: that is collective, too.

    Args:
        params: the variables whose gradients to scale; of this rank alone, and possibly none,
            with a group.
        max_norm: the limit, at least 0.
        group: ranks that have the other gradients of the norm, such as ``fl.new_group(ranks)``;
            each calls it. Default: there are no others.

    Returns:
        The norm before scaling.

    Raises:
        TypeError: ``params`` is not an iterable of variables, or ``max_norm`` is no number.
        ValueError: ``params`` is empty without a group, ``max_norm`` is negative, or some
            parameters are sharded together and others not.
        DistributedError: with a group, or sharded parameters, as :func:`flashlight_py.all_reduce`.
    """
    limit = check_at_least_zero("max_norm", max_norm)
    params = as_param_list(params, may_be_empty=group is not None)
    grads, shards = _own_gradients(params)
    squares = np.array([sum(_sum_of_squares(grad) for grad in grads)], np.float64)
    if shards is not None:
        shards.group.all_reduce(squares)
    if group is not None:
        group.all_reduce(squares)
    norm = math.sqrt(squares[0])
    if limit < norm < math.inf:
        for grad in grads:
            _scale(grad, limit / norm)
    return norm


def _own_gradients(params: Iterable[Variable]) -> tuple[list[Array], Shards | None]:
    """Return the gradients, of sharded parameters this process's pieces; and whose those are."""
    grads: list[Array] = []
    found: dict[int | None, Shards | None] = {}
    for param in params:
        if param.grad is None:
            continue
        placement = param.placement
        shards = None if placement is None else placement.shards
        found[None if shards is None else id(shards)] = shards
        if placement is None:
            grads.append(param.grad)
        else:
            grads += [piece[1] for piece in placement.pieces(param, ())]
    if len(found) > 1:
        raise ValueError(
            "clip_grad_norm: the parameters are of several sharded modules, or sharded and not; "
            "shard a module that has all of them"
        )
    return grads, next(iter(found.values()), None)


def _scale(grad: Array, factor: float) -> None:
    # A number would be rounded to float16 first, of which a small one leaves nothing.
    grad *= np.float32(factor) if grad.dtype.itemsize == 2 else factor


def _sum_of_squares(grad: Array) -> float:
    wide = grad.reshape(-1).astype("float64", copy=False)  # squares of float32 can overflow
    return float(wide.dot(wide))
