"""Limits on gradients."""

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
    """Scale all gradients together so that their joint L2 norm is at most ``max_norm``.

    In place. Parameters without a gradient count as zeros. A norm that is infinite or nan leaves
    the gradients as they are. Blocks until the norm is computed.

    With several processes that have the same parameters, call it after the gradients were reduced,
    without a group: the norm is the same on every rank. If ranks have different parameters, as
    parts of one model, pass their group: the squares are summed over it, in one small message, and
    all ranks scale by the same factor. With parameters of sharded modules, or that ``shard_linear``
    has cut, it is collective: it returns when each rank has scaled its own pieces.

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
        ValueError: ``params`` is empty without a group, or ``max_norm`` is negative.
        DistributedError: with a group, or sharded parameters, as :func:`flashlight_py.all_reduce`.
    """
    with _in_step(group, "clip_grad_norm"):
        params = as_param_list(params, may_be_empty=group is not None)
    own, sharded = _by_shards(params)
    with _in_step(next(iter(sharded), group), "clip_grad_norm"):  # the group of the first call
        limit = check_at_least_zero("max_norm", max_norm)
    return _limit_norm(own, list(sharded.items()), limit, group)


def clip_grad_value(params: Iterable[Variable], clip_value: float) -> None:
    """Limit each element of all gradients to ``-clip_value`` .. ``clip_value``, in place.

    nan stays. Collective with sharded parameters. It raises the errors of :func:`clip_grad_norm`.
    """
    own, sharded = _by_shards(as_param_list(params))
    with _in_step(next(iter(sharded), None), "clip_grad_value"):
        limit = check_at_least_zero("clip_value", clip_value)
    _limit_values(own, list(sharded.items()), limit)


@as_one
def _limit_values(grads: list[Array], sharded: Any, limit: float) -> None:
    pieces = [grad for shards, those in sharded for grad in shards.own_gradients(those)]
    with np.errstate(all="ignore"):  # a limit beyond the range of the dtype is infinite
        for grad in [*grads, *pieces]:
            xp, most = array_module(grad), grad.dtype.type(limit)
            xp.maximum(xp.minimum(grad, most, out=grad), -most, out=grad)
    for shards, _ in sharded:
        shards.group.all_reduce(np.zeros(1))  # ranks wait for all pieces, and for a wrong limit


@as_one
def _limit_norm(
    grads: list[Array], sharded: list[tuple[Shards, list[Variable]]], limit: float,
    group: Summing | None,
) -> float:  # fmt: skip
    """Scale ``grads`` and those of ``sharded`` parameters in place; return their joint norm."""
    sums = [part for grad in grads for part in sums_of_squares(grad)]
    sums += [shards.sum_of_squares(those) for shards, those in sharded]
    squares = np.array([sum(sums)], np.float64)
    if group is not None:
        group.all_reduce(squares)
    norm = math.sqrt(squares[0])
    if limit < norm < math.inf:
        pieces = [grad for shards, those in sharded for grad in shards.own_gradients(those)]
        _scale([*grads, *pieces], limit / norm)
        for shards, _ in sharded:
            shards.meet()
    return norm


def _in_step(ranks: Summing | Shards | None, name: str) -> AbstractContextManager[None]:
    return nullcontext() if ranks is None else ranks.in_step(name)


def _scale(grads: Iterable[Array], factor: float) -> None:
    """Multiply each of ``grads`` by ``factor``, in place."""
    with np.errstate(all="ignore"):  # small elements become 0
        for grad in grads:
            # A number would be rounded to float16 first, of which a small one leaves nothing.
            np.multiply(grad, np.float32(factor) if grad.dtype.itemsize == 2 else factor, out=grad)


def gradients_of(params: Iterable[Variable]) -> tuple[list[Array], list[Shards]]:
    """Return the gradients that this process has of ``params``, and who has pieces of them.

    After a change of them ``meet()`` of each of the latter is to be called.
    """
    own, sharded = _by_shards(params)
    pieces = [grad for shards, those in sharded.items() for grad in shards.own_gradients(those)]
    return [*own, *pieces], list(sharded)


def _by_shards(params: Iterable[Variable]) -> tuple[list[Array], dict[Shards, list[Variable]]]:
    """Return this process's own gradients, and the sharded parameters that have one."""
    own: list[Array] = []
    sharded: dict[Shards, list[Variable]] = {}
    for param in params:
        placement = param.placement
        if param.grad is None:
            continue
        if not param.grad.shape:  # what NumPy has computed of it is a scalar
            param.grad = array_module(param.grad).asarray(param.grad)
        if placement is None:
            own.append(param.grad)
        else:
            sharded.setdefault(placement.shards, []).append(param)
    return own, sharded
