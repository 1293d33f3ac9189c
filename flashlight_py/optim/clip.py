"""Limits for gradients."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, array_module
from flashlight_py.optim.cpu import sums_of_squares
from flashlight_py.optim.optimizer import Shards, Summing, as_param_list, check_at_least_zero
from flashlight_py.structure import as_one


def clip_grad_norm(
    params: Iterable[Variable], max_norm: float, *, group: Summing | None = None
) -> float:
    """Scale all gradients by a common factor so that their joint L2 norm is at most ``max_norm``.

    Gradients change in place. Returns the norm before scaling. Parameters without a gradient count
    as zeros. If the norm is infinite or nan, the gradients are not changed. Blocks until the norm
    is computed.

    If all ranks have the same parameters, call this after the gradients are reduced, without
    ``group``. The norm is then the same on every rank. If ranks have different parameters of one
    model, pass a group of these ranks. The ranks then sum squares of norms in one small message,
    and scale by the same factor. Collective for parameters of sharded modules and ``shard_linear``:
    the call returns when every rank has scaled its shards.

    Args:
        params: Variables whose gradients are scaled. With a group, the list has the parameters of
            this rank and may be empty.
        max_norm: Maximum of the norm, at least 0.
        group: Group of the ranks whose gradients are part of the norm, such as
            ``fl.new_group(ranks)``. Each rank of the group must call this. Default: only this rank.

    Raises:
        TypeError: If ``params`` is not an iterable of variables, or ``max_norm`` is not a number.
        ValueError: If ``params`` is empty without a group, or if ``max_norm`` is negative.
        DistributedError: If communication with a group or for sharded parameters fails, as in
            :func:`flashlight_py.all_reduce`.
    """
    with _in_step(group, "clip_grad_norm"):
        params = as_param_list(params, may_be_empty=group is not None)
    grads, sharded = _by_shards(params)
    with _in_step(next(iter(sharded), group), "clip_grad_norm"):
        limit = check_at_least_zero("max_norm", max_norm)
    return _limit_norm(grads, list(sharded.items()), limit, group)


def clip_grad_value(params: Iterable[Variable], clip_value: float) -> None:
    """Limit each element of all gradients to ``-clip_value`` .. ``clip_value``, in place.

    nan is kept. Collective for sharded parameters. The errors are those of :func:`clip_grad_norm`.
    """
    grads, sharded = _by_shards(as_param_list(params))
    with _in_step(next(iter(sharded), None), "clip_grad_value"):
        limit = check_at_least_zero("clip_value", clip_value)
    _limit_values(grads, list(sharded.items()), limit)


@as_one
def _limit_values(grads: list[Array], sharded: Any, limit: float) -> None:
    pieces = [grad for shards, variables in sharded for grad in shards.own_gradients(variables)]
    with np.errstate(all="ignore"):  # in the dtype of the gradients, the limit may be infinite
        for grad in [*grads, *pieces]:
            xp, bound = array_module(grad), grad.dtype.type(limit)
            xp.maximum(xp.minimum(grad, bound, out=grad), -bound, out=grad)
    for shards, _ in sharded:
        # Wait until every rank has changed its shards. Raises if a rank has failed.
        shards.group.all_reduce(np.zeros(1))


@as_one
def _limit_norm(
    grads: list[Array], sharded: list[tuple[Shards, list[Variable]]], limit: float,
    group: Summing | None,
) -> float:  # fmt: skip
    sums = [part for grad in grads for part in sums_of_squares(grad)]
    sums += [shards.sum_of_squares(variables) for shards, variables in sharded]
    squares = np.array([sum(sums)], np.float64)
    if group is not None:
        group.all_reduce(squares)
    norm = math.sqrt(squares[0])
    if limit < norm < math.inf:
        pieces = [grad for shards, variables in sharded for grad in shards.own_gradients(variables)]
        _scale([*grads, *pieces], limit / norm)
        for shards, _ in sharded:
            shards.wait_for_all()
    return norm


def _in_step(ranks: Summing | Shards | None, name: str) -> AbstractContextManager[None]:
    return nullcontext() if ranks is None else ranks.in_step(name)


def _scale(grads: Iterable[Array], factor: float) -> None:
    with np.errstate(all="ignore"):  # small elements may become 0
        for grad in grads:
            # NumPy would round a Python number to float16 first, so a small factor would be 0.
            np.multiply(grad, np.float32(factor) if grad.dtype.itemsize == 2 else factor, out=grad)


def gradients_of(params: Iterable[Variable]) -> tuple[list[Array], list[Shards]]:
    """Return the gradients (if sharded, the shards of this process), and the ``Shards``."""
    grads, sharded = _by_shards(params)
    pieces = [grad for shards, group in sharded.items() for grad in shards.own_gradients(group)]
    return [*grads, *pieces], list(sharded)


def _by_shards(params: Iterable[Variable]) -> tuple[list[Array], dict[Shards, list[Variable]]]:
    """Return gradients of unsharded parameters, and the sharded parameters of each ``Shards``."""
    grads: list[Array] = []
    sharded: dict[Shards, list[Variable]] = {}
    for param in params:
        placement = param.placement
        if param.grad is None:
            continue
        if not param.grad.shape:  # NumPy may have replaced an array without dimensions by a scalar
            param.grad = array_module(param.grad).asarray(param.grad)
        if placement is None:
            grads.append(param.grad)
        else:
            sharded.setdefault(placement.shards, []).append(param)
    return grads, sharded
