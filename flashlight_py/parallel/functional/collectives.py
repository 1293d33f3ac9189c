"""Differentiable collectives. For the convention behind the gradients see the package."""

from __future__ import annotations

from collections.abc import Sequence

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, array_module
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.calls.arrays import scale_in_place
from flashlight_py.distributed.constants import LinearOp
from flashlight_py.distributed.groups.world import group_or_world
from flashlight_py.parallel.functional.call import Call, copy_of, require_variable


def all_reduce(
    v: Variable, scale: float = 1.0, op: LinearOp = "sum", group: ProcessGroup | None = None
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
    require_variable("all_reduce", v)
    _require_linear("all_reduce", op)
    call = Call("all_reduce", group_or_world(group))

    def combine(array: Array) -> Array:
        return call.group.all_reduce(copy_of(array), scale, op)

    return call.record(v, combine(v.data), vjp=combine)


def reduce_scatter(
    v: Variable, scale: float = 1.0, op: LinearOp = "sum", group: ProcessGroup | None = None
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
    require_variable("reduce_scatter", v)
    _require_linear("reduce_scatter", op)
    call = Call("reduce_scatter", group_or_world(group))
    factor = scale / call.group.size if op == "avg" else scale

    def gather(grad: Array) -> Array:
        whole: Array = call.group.all_gather(grad)
        scale_in_place(whole, factor)
        return whole

    part = call.group.reduce_scatter(v.data, scale, op)
    return call.record(v, part, vjp=gather)


def all_gather(v: Variable, group: ProcessGroup | None = None) -> Variable:
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
    require_variable("all_gather", v)
    call = Call("all_gather", group_or_world(group))
    shape = v.shape

    def own_rows(grad: Array) -> Array:
        return _reduced_rows(grad, call).reshape(shape)

    whole = call.group.all_gather(v.data)
    return call.record(v, whole, vjp=own_rows, rows=[shape[0] if shape else 1])


def all_to_all(
    v: Variable, rows: Sequence[int] | None = None, group: ProcessGroup | None = None
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
    require_variable("all_to_all", v)
    call = Call("all_to_all", group_or_world(group))

    def take_back(grad: Array) -> Array:
        received = None if rows is None else call.rows[:, call.group.rank].tolist()
        return call.group.all_to_all(grad, received)

    sent = () if rows is None else rows
    return call.record(v, call.group.all_to_all(v.data, rows), vjp=take_back, rows=sent)


def broadcast(v: Variable, root: int = 0, group: ProcessGroup | None = None) -> Variable:
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
    require_variable("broadcast", v)
    call = Call("broadcast", group_or_world(group))

    def sum_for_root(grad: Array) -> Array:
        summed: Array = call.group.reduce(copy_of(grad), root)
        return summed if call.group.rank == root else array_module(grad).zeros_like(grad)

    return call.record(v, call.group.broadcast(copy_of(v.data), root), vjp=sum_for_root)


def _require_linear(verb: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise ValueError(
            f"functional.{verb}: op must be 'sum' or 'avg', got {op!r}; where no gradient is "
            f"needed, flashlight_py.{verb} takes the others"
        )


def _reduced_rows(grad: Array, call: Call) -> Array:
    """Return the sum over the ranks of those rows of their ``grad`` that this rank passed."""
    rows, rank = call.rows[:, 0].tolist(), call.group.rank
    if min(rows) == max(rows):
        return call.group.reduce_scatter(grad)
    start = sum(rows[:rank])
    summed: Array = call.group.all_reduce(copy_of(grad))
    return summed[start : start + rows[rank]]
