"""The reductions: what ranks have is combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array
from flashlight_py.distributed import world
from flashlight_py.distributed.api._world import of
from flashlight_py.distributed.group import ProcessGroup

__all__ = ["all_reduce", "all_reduce_multiple", "reduce", "reduce_scatter", "shared_empty"]


def all_reduce(
    x: Any,
    scale: float = 1.0,
    op: str = "sum",
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Combine ``x`` of all ranks; afterwards every rank holds ``scale`` times the result.

    In place, for any shape and memory layout; every rank must give the same shape and dtype.
    Values are combined in rank order, so the result has the same bits on every rank and in every
    run; float16 and bfloat16 are summed in float32 and rounded once. Small arrays take one
    message to each rank, large ones a direct reduce-scatter and all-gather (docs/algorithms.md).

    Args:
        x: array of integer, float, complex or (for min and max) bool dtype, of any shape.
        scale: real number that the result is multiplied by; whole for integer arrays.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.
        async_op: return a ``Work`` at once; its ``wait()`` returns ``x``.
        group: the process group, default the world.

    Returns:
        ``x``, or the ``Work``. Blocks, without the GIL, unless ``async_op``.

    Raises:
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
    """
    if group is None and not async_op and world.fast_all_reduce(x, scale, op) is x:
        return x
    return of(group).all_reduce(x, scale, op, async_op)


def all_reduce_multiple(
    xs: Sequence[Any],
    scale: float = 1.0,
    op: str = "sum",
    async_op: bool = False,
    contiguous: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Combine each array of ``xs`` over the ranks, in place, as :func:`all_reduce` does.

    Args:
        xs: arrays of any shapes and dtypes; the same list, in the same order, on every rank.
        scale: real number that the results are multiplied by.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.
        async_op: return a ``Work`` at once; its ``wait()`` returns the list.
        contiguous: copy arrays of one dtype into one buffer and move them in one transfer:
            faster for many small arrays.
        group: the process group, default the world.

    Returns:
        The list of ``xs``, or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: two arrays of the list share memory, or as for :func:`all_reduce`.
        TypeError, DistributedError: as for :func:`all_reduce`; every array is checked before
            any is sent.
    """
    return of(group).all_reduce_multiple(xs, scale, op, async_op, contiguous)


def reduce(
    x: Any,
    root: int = 0,
    op: str = "sum",
    scale: float = 1.0,
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Combine ``x`` of all ranks; afterwards rank ``root`` holds ``scale`` times the result.

    In place on ``root``; the arrays of the other ranks stay as they are. Values are combined in
    rank order, as by :func:`all_reduce`, with the same bits.

    Args:
        x: array; the same shape and dtype on every rank.
        root: rank in the group.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.
        scale: real number that the result is multiplied by.
        async_op: return a ``Work`` at once; its ``wait()`` returns ``x``.
        group: the process group, default the world.

    Returns:
        ``x``, or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or as for :func:`all_reduce`.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    return of(group).reduce(x, root, op, scale, async_op)


def reduce_scatter(
    x: Any,
    scale: float = 1.0,
    op: str = "sum",
    out: Any = None,
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Combine ``x`` of all ranks and return this rank's part of the result.

    Args:
        x: array whose first dimension is a multiple of the number of ranks; left as it is.
        scale: real number that the result is multiplied by.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.
        out: array of the part's shape that is filled in place, in place of a new one. It may share
            memory with ``x``, which is copied then.
        async_op: return a ``Work`` at once; its ``wait()`` returns the part.
        group: the process group, default the world.

    Returns:
        A new array of shape ``(x.shape[0] // size, *x.shape[1:])`` or ``out``; or the ``Work``.

    Raises:
        ValueError: the first dimension cannot be cut so, ``out`` does not fit, or as for
            :func:`all_reduce`.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    return of(group).reduce_scatter(x, scale, op, out, async_op)


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
    return of(group).shared_empty(shape, dtype)
