"""The reductions: what ranks have is combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.arrays import as_array, check_reduction, dtype_code, pack, parse_op
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.constants import Op
from flashlight_py.distributed.membership import native, of
from flashlight_py.distributed.numbers import whole
from flashlight_py.distributed.running import collective, refusing
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_REDUCE, REDUCE, REDUCE_SCATTER
from flashlight_py.distributed.work import Then, Work

if TYPE_CHECKING:
    from flashlight_py.distributed.group import ProcessGroup

X = TypeVar("X")


@overload
def all_reduce(
    x: X,
    scale: float = 1.0,
    op: Op = "sum",
    async_op: Literal[False] = False,
    group: ProcessGroup | None = None,
) -> X: ...
@overload
def all_reduce(
    x: X,
    scale: float = 1.0,
    op: Op = "sum",
    *,
    async_op: Literal[True],
    group: ProcessGroup | None = None,
) -> Work[X]: ...
@overload
def all_reduce(
    x: X,
    scale: float = 1.0,
    op: Op = "sum",
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any: ...
def all_reduce(
    x: Any,
    scale: float = 1.0,
    op: Op = "sum",
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Combine ``x`` of all ranks; afterwards every rank holds ``scale`` times the result.

    In place, for any shape and memory layout; every rank must pass the same shape and dtype.
    Values are combined in rank order, so the result has the same bits on every rank and in every
    run; float16 and bfloat16 are summed in float32 and rounded once. Small arrays take one
    message to each rank, large ones a direct reduce-scatter and all-gather (docs/algorithms.md).

    Args:
        x: array of integer, float, complex or (for min, max, and, or and xor) bool dtype, of any
            shape. Or a number, the same kind on every rank: bool, int (64 bits), float, complex or
            a scalar of NumPy; as it cannot be changed, the result is returned.
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


@overload
def reduce(
    x: X,
    root: int = 0,
    op: Op = "sum",
    scale: float = 1.0,
    async_op: Literal[False] = False,
    group: ProcessGroup | None = None,
) -> X: ...
@overload
def reduce(
    x: X,
    root: int = 0,
    op: Op = "sum",
    scale: float = 1.0,
    *,
    async_op: Literal[True],
    group: ProcessGroup | None = None,
) -> Work[X]: ...
@overload
def reduce(
    x: X,
    root: int = 0,
    op: Op = "sum",
    scale: float = 1.0,
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any: ...
def reduce(
    x: Any,
    root: int = 0,
    op: Op = "sum",
    scale: float = 1.0,
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
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


@overload
def reduce_scatter(
    x: list[Any] | tuple[Any, ...],
    scale: float = 1.0,
    op: Op = "sum",
    out: Any = None,
    async_op: Literal[False] = False,
    group: ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
) -> list[Array]: ...
@overload
def reduce_scatter(
    x: Any,
    scale: float = 1.0,
    op: Op = "sum",
    out: Any = None,
    async_op: Literal[False] = False,
    group: ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
) -> Array: ...
@overload
def reduce_scatter(
    x: Any,
    scale: float = 1.0,
    op: Op = "sum",
    out: Any = None,
    *,
    async_op: Literal[True],
    group: ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
) -> Work[Array]: ...
@overload
def reduce_scatter(
    x: Any,
    scale: float = 1.0,
    op: Op = "sum",
    out: Any = None,
    async_op: bool = False,
    group: ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
) -> Any: ...
def reduce_scatter(
    x: Any,
    scale: float = 1.0,
    op: Op = "sum",
    out: Any = None,
    async_op: bool = False,
    group: ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
) -> Any:
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


def all_reduce_location(
    x: Any,
    op: Literal["min", "max"] = "min",
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Find the least or largest of each element over the ranks, and which rank has it.

    As MPI's MINLOC and MAXLOC. Every rank receives every other's ``x``: for arrays that are not too
    large.

    Args:
        x: array of any shape and of integer, float or bool dtype; the same shape and dtype on every
            rank. Left as it is.
        op: ``"min"`` or ``"max"``; a NaN is both.
        async_op: return a ``Work`` at once; its ``wait()`` returns the pair.
        group: the process group, default the world.

    Returns:
        A pair of new arrays of the shape of ``x``: the values, of its dtype, and the ranks, int64,
        of equal values the lowest; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``op`` is another.
        TypeError, DistributedError: as for :func:`all_reduce`.

    Example:
        >>> values, ranks = fl.all_reduce_location(np.array([3.0, 1.0]))  # one process
        >>> values.tolist(), ranks.tolist()
        ([3.0, 1.0], [0, 0])
    """
    verb, members = "all_reduce_location", of(group)
    with refusing(members, verb, given=[x]):
        array = as_array(verb, x, writes=False)
        check_reduction(verb, array.dtype, parse_op(verb, op), 1.0)
        if op not in ("min", "max"):
            raise ValueError(f"{verb}: op must be 'min' or 'max', got {op!r}")
        xp = array_module(array)
        find = xp.argmin if op == "min" else xp.argmax  # of equal ones the first
        step = Call(ALL_GATHER, pack(array)[None], blocking=not async_op, part_of=f"{verb}({op})")

        def locate(rows: Array) -> tuple[Array, Array]:
            ranks = xp.asarray(find(rows, axis=0))
            return xp.asarray(xp.take_along_axis(rows, ranks[None], 0)[0]), ranks

        work = members.run(step)
        return members.keep(Then(work, locate)) if async_op else locate(work.wait())


def shared_empty(
    shape: int | Sequence[int], dtype: DTypeLike = np.float32, group: ProcessGroup | None = None
) -> Array:
    """Return a new NumPy array, not initialised, that collectives reduce where it is.

    Its memory is shared by the ranks of a host, so nothing is copied on the way; where there is
    no such memory it is an ordinary array. Views of it count as well. Collective, blocking: every
    rank must call it, with the same shape and dtype.

    Args:
        shape: the dimensions.
        dtype: any that :func:`all_reduce` takes.
        group: the process group, default the world.

    Raises:
        ValueError: a dimension is negative.
        TypeError: the dtype cannot be sent.
        DistributedError: as for :func:`all_reduce`.
    """
    members = of(group)
    with refusing(members, "shared_empty"):
        extents, kind = _extents(shape), np.dtype(dtype)
        dtype_code("shared_empty", kind)
        backend = members.backend()
        with members.journal.recording("shared_empty", like=(kind, extents)):
            array: Array = backend.shared_empty(extents, kind)
            return array


def _extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape, as NumPy lets it be written, as a tuple."""
    alone = whole(shape)
    given = tuple(shape) if alone is None else (alone,)  # type: ignore[arg-type]
    extents = tuple(extent for extent in map(whole, given) if extent is not None and extent >= 0)
    if len(extents) < len(given):
        raise ValueError(
            f"shared_empty: a shape consists of integers that are not negative, got {given}"
        )
    return extents
