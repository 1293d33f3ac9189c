"""Differentiable collectives, and what all ranks agree on in their forward and backward passes.

For the convention behind the gradients see the package.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import InPasses
from flashlight_py.autograd.variable import record_in_order
from flashlight_py.device import Array, array_module
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.api.verb_call import refusing
from flashlight_py.distributed.calls.arrays import parse_op, scale_in_place
from flashlight_py.distributed.calls.checks import check_rank
from flashlight_py.distributed.constants import LinearOp, ReduceOp
from flashlight_py.distributed.start.world import group_or_world
from flashlight_py.errors import MismatchError
from flashlight_py.parallel.failing import fail
from flashlight_py.structure import as_one


def all_reduce(
    v: Variable, scale: float = 1.0, *, op: LinearOp = "sum", group: ProcessGroup | None = None
) -> Variable:
    """Return ``scale`` times the sum (or average) of all ranks' ``v``, the same on every rank.

    Gradient: y_r = scale * sum_q x_q on every rank r, hence dJ/dx_q = scale * sum_r g_r: the same
    all_reduce of the gradients.

    Collective, blocking, as its backward pass is; each takes a small message beside its own.

    Args:
        v: any shape, the same shape and dtype on every rank.
        scale: real number that the result is multiplied by.
        op: ``"sum"`` or ``"avg"``.
        group: the process group, default the world.

    Returns:
        A new variable of the shape and dtype of ``v``, with a gradient on every rank if ``v`` has
        one on any.

    Raises:
        TypeError: ``v`` is no Variable, or as :func:`flashlight_py.all_reduce`.
        ValueError: ``op`` is another, or as :func:`flashlight_py.all_reduce`.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> x = fl.param(np.ones(3))
        >>> y = fl.functional.all_reduce(x, scale=2.0)  # one process: only the scale shows
        >>> y.backward(np.ones(3))
        >>> x.grad
        array([2., 2., 2.])
    """
    call = DifferentiableCall("all_reduce", v, group, op)

    def combine(array: Array) -> Array:
        return call.group.all_reduce(copy_of(array), scale, op=op)

    return call.record(v, combine(v.data), vjp=combine)


def reduce_scatter(
    v: Variable, *, op: LinearOp = "sum", scale: float = 1.0, group: ProcessGroup | None = None
) -> Variable:
    """Return this rank's part of ``scale`` times the sum (or average) of all ranks' ``v``.

    Gradient: y_r = scale * sum_q (part r of x_q), hence part r of dJ/dx_q = scale * g_r: the
    scaled all_gather of the gradients.

    Collective, blocking, as its backward pass is; each takes a small message beside its own.

    Args:
        v: its first dimension is a multiple of the number of ranks; the same shape and dtype on
            every rank.
        scale: real number that the result is multiplied by.
        op: ``"sum"`` or ``"avg"``.
        group: the process group, default the world.

    Returns:
        A new variable of shape ``(v.shape[0] // size, *v.shape[1:])``, with a gradient on every
        rank if ``v`` has one on any.

    Raises:
        TypeError: ``v`` is no Variable, or as :func:`flashlight_py.all_reduce`.
        ValueError: ``op`` is another, or as :func:`flashlight_py.reduce_scatter`.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    call = DifferentiableCall("reduce_scatter", v, group, op)
    factor = scale / call.group.size if call.op is ReduceOp.AVG else scale

    def gather(grad: Array) -> Array:
        whole: Array = call.group.all_gather(grad)
        scale_in_place(whole, factor)
        return whole

    part = call.group.reduce_scatter(v.data, scale=scale, op=op)
    return call.record(v, part, vjp=gather)


def all_gather(v: Variable, *, group: ProcessGroup | None = None) -> Variable:
    """Return the ``v`` of all ranks, joined along the first dimension in rank order.

    Gradient: y_r holds x_q as its rows q on every rank r, hence dJ/dx_q = sum_r (rows q of g_r):
    the reduce_scatter of the gradients. Where the ranks' numbers of rows differ it is an
    all_reduce, of which each rank keeps its rows: twice the bytes.

    Collective, blocking, as its backward pass is; each takes a small message beside its own.

    Args:
        v: the first dimension may differ between ranks, the others and the dtype must not. One
            without dimensions counts as one row.
        group: the process group, default the world.

    Returns:
        A new variable of shape ``(sum of first dimensions, *v.shape[1:])``, with a gradient on
        every rank if ``v`` has one on any.

    Raises:
        TypeError: ``v`` is no Variable, or as :func:`flashlight_py.all_gather`.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    call = DifferentiableCall("all_gather", v, group)
    shape, rank = v.shape, call.group.rank

    def own_rows(grad: Array) -> Array:
        rows = call.rows[:, 0].tolist()
        if min(rows) == max(rows):
            return call.group.reduce_scatter(grad).reshape(shape)
        start = sum(rows[:rank])
        summed: Array = call.group.all_reduce(copy_of(grad))
        return summed[start : start + rows[rank]].reshape(shape)

    whole = call.group.all_gather(v.data)
    return call.record(v, whole, vjp=own_rows, rows=[shape[0] if shape else 1])


def all_to_all(
    v: Variable, *, rows: Sequence[int] | None = None, group: ProcessGroup | None = None
) -> Variable:
    """Return what the ranks have for this one: part r of every ``v``, in rank order, on rank r.

    Gradient: y_r holds part r of x_q as its part q, hence part r of dJ/dx_q = part q of g_r: the
    all_to_all that takes the gradients back.

    Collective, blocking, as its backward pass is; each takes a small message beside its own.

    Args:
        v: the dimensions but the first, and the dtype, are the same on every rank.
        rows: how many rows of ``v`` each rank gets; None: equal parts, of a first dimension that is
            a multiple of the number of ranks and the same on every rank. All ranks pass it or none.
        group: the process group, default the world.

    Returns:
        A new variable of shape ``(number of rows received, *v.shape[1:])``, with a gradient on
        every rank if ``v`` has one on any.

    Raises:
        TypeError: ``v`` is no Variable, or as :func:`flashlight_py.all_to_all`.
        ValueError: the first dimension cannot be cut so.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    call = DifferentiableCall("all_to_all", v, group)

    def take_back(grad: Array) -> Array:
        received = None if rows is None else call.rows[:, call.group.rank].tolist()
        return call.group.all_to_all(grad, rows=received)

    sent = () if rows is None else rows
    return call.record(v, call.group.all_to_all(v.data, rows=rows), vjp=take_back, rows=sent)


def broadcast(v: Variable, root: int = 0, *, group: ProcessGroup | None = None) -> Variable:
    """Return the ``v`` of rank ``root`` on every rank.

    Gradient: y_r = x_root on every rank r, hence dJ/dx_root = sum_r g_r, and 0 for the others:
    the gradients are reduced to the root.

    Collective, blocking, as its backward pass is; each takes a small message beside its own.

    Args:
        v: the same shape and dtype on every rank; the values of the root count alone.
        root: rank in the group.
        group: the process group, default the world.

    Returns:
        A new variable of the shape and dtype of ``v``, with a gradient on every rank if ``v`` has
        one on any.

    Raises:
        TypeError: ``v`` is no Variable, or as :func:`flashlight_py.broadcast`.
        ValueError: ``root`` is no rank of the group.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    call = DifferentiableCall("broadcast", v, group)

    def sum_for_root(grad: Array) -> Array:
        summed: Array = call.group.reduce(copy_of(grad), root)
        return summed if call.group.rank == root else array_module(grad).zeros_like(grad)

    with refusing(call.group, "functional.broadcast", given=[v]):
        root = check_rank(call.group.size, "functional.broadcast", "root", root)
    # The ranks meet first: from a broadcast the root may return before another rank has raised.
    result = copy_of(v.data)
    variable = call.record(v, result, vjp=sum_for_root)
    call.group.broadcast(result, root)
    return variable


# How many differentiable collectives each group has had: the same number on all of its ranks.
_calls: dict[weakref.ref[ProcessGroup], int] = {}


# The small message ensures that gradients of different results are never added.
class DifferentiableCall(InPasses):
    """A differentiable collective of ``group`` and of ``v``, numbered as all its ranks number it.

    ``rows`` are numbers that the ranks have exchanged, those of a rank in a row.
    """

    def __init__(
        self, verb: str, v: Variable, group: ProcessGroup | None, op: LinearOp = "sum"
    ) -> None:
        self.group, self._verb = group_or_world(group), verb
        with refusing(self.group, f"functional.{verb}", given=[v]):
            require_variable(verb, v)
            self.op = parse_op(f"functional.{verb}", op)
            if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
                raise ValueError(
                    f"functional.{verb}: op must be 'sum' or 'avg', got {op!r}; if no gradient is "
                    f"needed, flashlight_py.{verb} takes the others"
                )

    def record(
        self, v: Variable, result: Array, vjp: Callable[[Array], Array], rows: Sequence[int] = ()
    ) -> Variable:
        """Return ``result`` as a variable whose backward pass calls ``vjp`` on every rank.

        It has a gradient on all ranks if ``v`` has one on any. Collective, blocking.
        """
        table = self._meet(False, v.calc_grad, *rows)
        self.rows = np.array([row[1:] for row in table])
        if not any(row[0] for row in table):
            return Variable(result)
        # A rank that needs no gradient takes part in the backward pass for the others' sake.
        source = v if v.calc_grad else Variable(v.data, calc_grad=True)
        return record_in_order(result, (source, functools.partial(self._answer, vjp)))

    def _answer(self, vjp: Callable[[Array], Array], grad: Array) -> Array:
        self._meet(True)
        return vjp(grad)

    def join_failed(self) -> None:
        """Autograd: a pass fails that has yet to come here, where the other ranks wait."""
        fail(self.group, sys.exc_info()[1])

    @as_one
    def _meet(self, backward: bool, *facts: int) -> list[list[int]]:
        """Return every rank's ``facts``, one rank a row, if all are where this rank is."""
        group = self.group
        if not backward:
            self._number = _calls.get(weakref.ref(group), 0) + 1
        mine = np.array([self._number, backward, *facts], np.int64)
        table = np.zeros((group.size, mine.size), np.int64)
        table[group.rank] = mine
        group.all_reduce(table)  # only this rank's row is not zero: the sum is a gathering
        if (table[:, :2] != mine[:2]).any():
            where = [
                f"rank {rank}: the {'backward' if backward else 'forward'} pass of number {number}"
                for rank, (number, backward) in enumerate(table[:, :2].tolist())
            ]
            raise MismatchError(
                f"[functional.{self._verb}] rank {group.rank} of {group.size}: the ranks are at "
                f"different differentiable collectives of this group: {', '.join(where)}. Let "
                "backward() reach the results of the same calls on every rank, and in the same "
                "passes; a rank that has no use for a result adds 0 times its sum to the loss"
            )
        if not backward:
            _calls[weakref.ref(group, _calls.pop)] = self._number
        return table[:, 2:].tolist()  # type: ignore[no-any-return]


def require_variable(verb: str, v: object) -> None:
    """Raise a TypeError for what is no Variable."""
    if not isinstance(v, Variable):
        raise TypeError(
            f"functional.{verb} takes a flashlight_py.Variable, got {type(v).__name__}; wrap data "
            f"in flashlight_py.input, or use flashlight_py.{verb}, which works on arrays"
        )


def copy_of(array: Array) -> Array:
    """Return a new array of the same values for a verb to work on in place."""
    return array_module(array).array(array, order="C")  # type: ignore[no-any-return]
