"""The movements: arrays go from rank to rank as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flashlight_py.device import Array
from flashlight_py.distributed.api.running import collective, refusing
from flashlight_py.distributed.api.scattering import Scatter
from flashlight_py.distributed.calls.arrays import require_length
from flashlight_py.distributed.calls.checks import check_rank
from flashlight_py.distributed.groups.membership import native, of
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER, SCATTER
from flashlight_py.distributed.work import Then, Work

if TYPE_CHECKING:
    from flashlight_py.distributed.api.group import ProcessGroup

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]

X = TypeVar("X")


def broadcast(
    x: X, root: int = 0, async_op: bool = False, group: ProcessGroup | None = None
) -> X | Work[X]:
    """Send every rank the ``x`` of rank ``root``, in place.

    Args:
        x: array of any dtype without objects; the same shape and dtype on every rank. Or a number,
            as of :func:`all_reduce`.
        root: rank in the group.
        async_op: return a ``Work`` at once; its ``wait()`` returns ``x``.
        group: the process group, default the world.

    Returns:
        ``x``, or the root's number; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or ``x`` is read-only.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    y = native(group)(BROADCAST.code, x, None, "sum", 1.0, root, 0, async_op)
    if y is not NotImplemented:
        return y
    return collective(group, BROADCAST, x, root=root, async_op=async_op)


def all_gather(
    x: Any, out: Any = None, async_op: bool = False, group: ProcessGroup | None = None
) -> Array | list[Array] | Work[Array]:
    """Join the ``x`` of all ranks along the first dimension, in rank order.

    Args:
        x: array; the first dimension may differ between ranks, the others and the dtype must
            not. A scalar-shaped array counts as one row. Left as it is. Or a list or tuple of
            such arrays, of any shapes and dtypes, in the same order on every rank: all are checked
            before any is sent.
        out: array of shape ``(sum of first dimensions, *x.shape[1:])`` that is filled in place,
            in place of a new one: large results are then not allocated anew in every call. It may
            share memory with ``x``, which is copied then. A list where ``x`` is one.
        async_op: return a ``Work`` at once; its ``wait()`` returns the result.
        group: the process group, default the world.

    Returns:
        A new array of shape ``(sum of first dimensions, *x.shape[1:])``, or ``out``; a list of
        them where ``x`` is one; or the ``Work``.

    Raises:
        ValueError: ``out`` has another shape or dtype; where only its first dimension is wrong,
            this is known when all have called, and the other ranks have their result.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    y = native(group)(ALL_GATHER.code, x, out, "sum", 1.0, 0, 0, async_op)
    if y is not NotImplemented:
        return y
    return collective(group, ALL_GATHER, x, out=out, async_op=async_op)


def gather(
    x: Any,
    root: int = 0,
    out: Any = None,
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Array | Work[Array | None] | None:
    """Join the ``x`` of all ranks along the first dimension, in rank order, on one rank.

    Args:
        x: array; the first dimension may differ between ranks, the others and the dtype must
            not. A scalar-shaped array counts as one row.
        root: rank in the group that gets the result.
        out: on ``root``, array that is filled in place, as for :func:`all_gather`; elsewhere not
            looked at.
        async_op: return a ``Work`` at once; its ``wait()`` returns what this would.
        group: the process group, default the world.

    Returns:
        On ``root`` a new array of shape ``(sum of first dimensions, *x.shape[1:])`` or ``out``,
        elsewhere None; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or ``out`` does not fit.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    y = native(group)(GATHER.code, x, out, "sum", 1.0, root, 0, async_op)
    if y is not NotImplemented:
        return y
    return collective(group, GATHER, x, root=root, out=out, async_op=async_op)


def scatter(
    xs: Any = None,
    root: int = 0,
    out: Any = None,
    async_op: bool = False,
    group: ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
) -> Array | Work[Array]:
    """Send each rank its part of what rank ``root`` has.

    The other ranks need not know what arrives: dtype and shape travel along. CuPy arrays are the
    exception: the other ranks pass ``out``, which shows that a GPU is meant.

    Args:
        xs: on ``root`` a list or tuple with one array per rank, all of one shape (at most eight
            dimensions) and dtype, or one array whose first dimension is cut into equal parts; with
            ``rows`` first dimensions may differ. On the other ranks not looked at.
        root: rank in the group.
        out: array that is filled in place, in place of a new one. It may share memory with what
            the root passes, which is copied then.
        async_op: return a ``Work`` at once; its ``wait()`` returns the part.
        group: the process group, default the world.
        rows: how many rows of the first dimension rank 0, 1, ... gets, where parts are unequal; the
            same on every rank. The ranks compare them first, so that even with ``async_op`` the
            call blocks until every rank has called.

    Returns:
        This rank's part, a new array, or ``out``; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or what it passes cannot be cut so, or does
            not fit its own ``out``.
        MismatchError: ``out`` of a rank is of another shape or dtype than the parts, or ranks
            passed different ``rows``; raised on every rank.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    if rows is None:
        y = native(group)(SCATTER.code, xs, out, "sum", 1.0, root, 0, async_op)
        if y is not NotImplemented:
            return y
    members = of(group)
    with refusing(members, SCATTER, given=[xs, out]):
        root = check_rank(members.size, "scatter", "root", root)
        scatter = Scatter(members, xs, root, out, async_op)
        return scatter.equal() if rows is None else scatter.uneven(rows)


def all_to_all(
    x: Any,
    rows: Sequence[int] | None = None,
    out: Any = None,
    async_op: bool = False,
    group: ProcessGroup | None = None,
    return_rows: bool = False,
) -> Array | tuple[Array, list[int]] | Work[Array]:
    """Send each rank a part of ``x`` and join what each sends, in rank order.

    Args:
        x: array whose first dimension is cut into equal parts, one per rank; left as it is. Shape
            and dtype must be the same on every rank; with ``rows`` the first dimension may differ.
        rows: how many rows rank 0, 1, ... gets, where parts are unequal. All ranks pass it or
            none does; what it holds may differ. They exchange it first, so that even with
            ``async_op`` the call blocks until every rank has called.
        out: array that is filled in place, as for :func:`all_gather`.
        async_op: return a ``Work`` at once; its ``wait()`` returns the result.
        group: the process group, default the world.
        return_rows: return how many rows each rank has sent here as well. Ranks may differ in it.

    Returns:
        A new array, of the shape of ``x`` when parts are equal, or ``out``; with ``return_rows`` a
        pair of it and the list of rows that rank 0, 1, ... sent; or the ``Work``.

    Raises:
        ValueError: the first dimension cannot be cut so, ``rows`` are no integers of which there is
            one for each rank, or ``out`` does not fit.
        TypeError, DistributedError: as for :func:`all_reduce`.

    Example:
        >>> fl.all_to_all(np.arange(3))  # one process: its own part
        array([0, 1, 2])
    """
    if not return_rows:
        parts: Any = "sum" if rows is None else rows
        y = native(group)(ALL_TO_ALL.code, x, out, parts, 1.0, 0, 0, async_op)
        if y is not NotImplemented:
            if rows is not None and y is not out is not None:
                members = of(group)
                require_length(ALL_TO_ALL.name, out, y.shape[0], members.rank, members.size)
            return y
    received: list[int] = []
    how: dict[str, Any] = {"rows": rows, "out": out, "async_op": async_op}
    result = collective(group, ALL_TO_ALL, x, **how, received=received)
    if not return_rows:
        return result

    def with_rows(got: Array) -> tuple[Array, list[int]]:
        size = of(group).size
        return got, received or [got.shape[0] // size] * size

    return Then(result, with_rows) if async_op else with_rows(result)
