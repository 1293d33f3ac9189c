"""The reductions: what ranks have is combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flashlight_py.device import Array
from flashlight_py.distributed.calls.running import collective
from flashlight_py.distributed.constants import Op
from flashlight_py.distributed.groups.membership import native
from flashlight_py.distributed.verbs import ALL_REDUCE, EXSCAN, REDUCE, REDUCE_SCATTER, SCAN
from flashlight_py.distributed.work import Work

if TYPE_CHECKING:
    from flashlight_py.distributed.groups.group import ProcessGroup

__all__ = ["all_reduce", "reduce", "reduce_scatter", "scan", "exscan"]

X = TypeVar("X")


def all_reduce(
    x: X,
    scale: float = 1.0,
    op: Op = "sum",
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> X | Work[X]:
    """Combine ``x`` of all ranks; afterwards every rank holds ``scale`` times the result.

    In place, for any shape and memory layout; every rank must pass the same shape and dtype.
    Values are combined in rank order, so the result has the same bits on every rank and in every
    run; float16 and bfloat16 are summed in float32 and rounded once. Small arrays take one
    message to each rank, large ones a direct reduce-scatter and all-gather (docs/algorithms.md).

    Args:
        x: array of integer, float, complex or (for min, max, and, or and xor) bool dtype, or (for
            min and max) of dates, of any shape. Or a number, the same kind on every rank: bool, int
            (64 bits), float, complex or a scalar of NumPy; as it cannot be changed, the result is
            returned.
        scale: real number that the result is multiplied by; whole for integer arrays, 1 for
            operations on bits and truth values.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"``, ``"max"``; ``"and"``, ``"or"``, ``"xor"``
            of the bits of integers and bool; ``"land"``, ``"lor"``, ``"lxor"`` of truth values: 1
            or 0 in the dtype of ``x``, whatever is not zero being true.
        async_op: return a ``Work`` at once; its ``wait()`` returns ``x``.
        group: the process group, default the world.

    Returns:
        ``x``, or the result where ``x`` is a number; or the ``Work``. Blocks, without the GIL,
        unless ``async_op``.

    Raises:
        OverflowError: ``x`` is a Python int and the result could pass 64 bits.
        TypeError: ``x`` is no array, its dtype cannot be sent, or does not go with ``op``.
        ValueError: ``x`` is read-only, or ``op`` or ``scale`` make no sense.
        MismatchError: ranks differ in shape, dtype, op or scale, called something else, or one
            refused its arguments, as above; raised on every rank, and nothing was changed.
        PeerLostError: a rank is gone.
        CollectiveTimeoutError: a rank did not call within the group's timeout (seconds).
        GroupClosedError: the group was closed or broke before.
        BackendUnavailableError: nothing here moves arrays of this kind.

    Example:
        >>> x = np.full((3, 3), 2.0)
        >>> fl.all_reduce(x, scale=0.5) is x  # one process: only the scale shows
        True
        >>> float(x[0, 0])
        1.0
        >>> fl.all_reduce(3.5, op="max")
        3.5
    """
    y = native(group)(ALL_REDUCE.code, x, None, op, scale, 0, 0, async_op)
    if y is not NotImplemented:
        return y
    return collective(group, ALL_REDUCE, x, scale=scale, op=op, async_op=async_op)


def reduce(
    x: X,
    root: int = 0,
    op: Op = "sum",
    scale: float = 1.0,
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> X | Work[X]:
    """Combine ``x`` of all ranks; afterwards rank ``root`` holds ``scale`` times the result.

    In place on ``root``; the arrays of the other ranks stay as they are. Values are combined in
    rank order, as by :func:`all_reduce`, with the same bits.

    Args:
        x: array; the same shape and dtype on every rank. Or a number, as of :func:`all_reduce`.
        root: rank in the group.
        op: as for :func:`all_reduce`.
        scale: real number that the result is multiplied by.
        async_op: return a ``Work`` at once; its ``wait()`` returns ``x``.
        group: the process group, default the world.

    Returns:
        ``x``, or, where it is a number, the result on ``root`` and ``x`` elsewhere; or the
        ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or as for :func:`all_reduce`.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    y = native(group)(REDUCE.code, x, None, op, scale, root, 0, async_op)
    if y is not NotImplemented:
        return y
    return collective(group, REDUCE, x, root=root, op=op, scale=scale, async_op=async_op)


def reduce_scatter(
    x: Any,
    scale: float = 1.0,
    op: Op = "sum",
    out: Any = None,
    async_op: bool = False,
    group: ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
) -> Array | list[Array] | Work[Array]:
    """Combine ``x`` of all ranks and return this rank's part of the result.

    Args:
        x: array whose first dimension is a multiple of the number of ranks, or has the sum of
            ``rows``; left as it is. Or a list or tuple of such arrays, of any shapes and dtypes, in
            the same order on every rank: all are checked before any is sent.
        scale: real number that the result is multiplied by.
        op: as for :func:`all_reduce`.
        out: array of the part's shape that is filled in place, in place of a new one. It may share
            memory with ``x``, which is copied then. A list where ``x`` is one.
        async_op: return a ``Work`` at once; its ``wait()`` returns the part.
        group: the process group, default the world.
        rows: how many rows of the first dimension rank 0, 1, ... gets, where parts are unequal; the
            same on every rank.

    Returns:
        A new array of shape ``(x.shape[0] // size, *x.shape[1:])``, with ``rows`` of shape
        ``(rows[rank], *x.shape[1:])``, or ``out``; a list of them where ``x`` is one; or the
        ``Work``.

    Raises:
        ValueError: the first dimension cannot be cut so, ``out`` does not fit, or as for
            :func:`all_reduce`.
        MismatchError: ranks passed different ``rows``, or as for :func:`all_reduce`.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    if rows is None:
        y = native(group)(REDUCE_SCATTER.code, x, out, op, scale, 0, 0, async_op)
        if y is not NotImplemented:
            return y
    how: dict[str, Any] = {"scale": scale, "op": op, "rows": rows, "out": out}
    return collective(group, REDUCE_SCATTER, x, **how, async_op=async_op)


def scan(
    x: X,
    op: Op = "sum",
    scale: float = 1.0,
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> X | Work[X]:
    """Combine ``x`` of the ranks up to this one, in rank order: a prefix reduction.

    In place; afterwards rank r holds ``scale`` times the result of ranks 0 to r, with the same bits
    in every run. Small arrays travel with the call, large ones in pieces from rank to rank.

    Args:
        x: array, or a number, as of :func:`all_reduce`; the same shape and dtype on every rank.
        op: as for :func:`all_reduce`; ``"avg"`` divides by r + 1, as many as are combined.
        scale: real number that the result is multiplied by.
        async_op: return a ``Work`` at once; its ``wait()`` returns ``x``.
        group: the process group, default the world.

    Returns:
        ``x``, or the result where ``x`` is a number; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        TypeError, ValueError, OverflowError, DistributedError: as for :func:`all_reduce`.

    Example:
        >>> fl.scan(np.array([1.0, 2.0]))  # one process
        array([1., 2.])
    """
    y = native(group)(SCAN.code, x, None, op, scale, 0, 0, async_op)
    if y is not NotImplemented:
        return y
    return collective(group, SCAN, x, op=op, scale=scale, async_op=async_op)


def exscan(
    x: X,
    op: Op = "sum",
    scale: float = 1.0,
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> X | Work[X]:
    """Combine ``x`` of the ranks before this one, in rank order: an exclusive prefix reduction.

    As :func:`scan`, without this rank's own: rank r gets the result of ranks 0 to r - 1. Rank 0,
    which has none before it, keeps its ``x`` as it is, whatever ``op`` and ``scale`` are.

    Args:
        x: array, or a number; the same shape and dtype on every rank.
        op: as for :func:`scan`; ``"avg"`` divides by r.
        scale: real number that the result is multiplied by.
        async_op: return a ``Work`` at once; its ``wait()`` returns ``x``.
        group: the process group, default the world.

    Returns:
        ``x``, or the result where ``x`` is a number; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        TypeError, ValueError, OverflowError, DistributedError: as for :func:`all_reduce`.
    """
    y = native(group)(EXSCAN.code, x, None, op, scale, 0, 0, async_op)
    if y is not NotImplemented:
        return y
    return collective(group, EXSCAN, x, op=op, scale=scale, async_op=async_op)
