"""The public verbs. Each acts on the world, or on the group that is given.

An array is a ``numpy.ndarray``, a ``cupy.ndarray``, anything with DLPack whose memory can be
shared, or a ``Variable`` (its array is meant). Before ``distributed_init`` the world is rank 0
of 1, and every verb is the identity, times the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array
from flashlight_py.distributed import world
from flashlight_py.distributed.group import ProcessGroup

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_multiple",
    "barrier",
    "broadcast",
    "recv",
    "reduce_scatter",
    "send",
    "shared_empty",
    "sync_distributed",
]


def _of(group: ProcessGroup | None) -> ProcessGroup:
    return world.current_world().group if group is None else group


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
        MismatchError: ranks differ in shape, dtype, op or scale, or called something else;
            raised on every rank, and nothing was changed.
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
    return _of(group).all_reduce(x, scale, op, async_op)


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
        ValueError: the same array is in the list twice, or as for :func:`all_reduce`.
        TypeError, DistributedError: as for :func:`all_reduce`; every array is checked before
            any is sent.
    """
    return _of(group).all_reduce_multiple(xs, scale, op, async_op, contiguous)


def reduce_scatter(
    x: Any,
    scale: float = 1.0,
    op: str = "sum",
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Combine ``x`` of all ranks and return this rank's part of the result.

    Args:
        x: array whose first dimension is a multiple of the number of ranks; left as it is.
        scale: real number that the result is multiplied by.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.
        async_op: return a ``Work`` at once; its ``wait()`` returns the new array.
        group: the process group, default the world.

    Returns:
        A new array of shape ``(x.shape[0] // size, *x.shape[1:])``, or the ``Work``.

    Raises:
        ValueError: the first dimension cannot be cut so, or as for :func:`all_reduce`.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    return _of(group).reduce_scatter(x, scale, op, async_op)


def broadcast(
    x: Any, root: int = 0, async_op: bool = False, group: ProcessGroup | None = None
) -> Any:
    """Give every rank the ``x`` of rank ``root``, in place.

    Args:
        x: array; the same shape and dtype on every rank.
        root: rank in the group.
        async_op: return a ``Work`` at once; its ``wait()`` returns ``x``.
        group: the process group, default the world.

    Returns:
        ``x``, or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or ``x`` is read-only.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    return _of(group).broadcast(x, root, async_op)


def all_gather(x: Any, async_op: bool = False, group: ProcessGroup | None = None) -> Any:
    """Join the ``x`` of all ranks along the first dimension, in rank order.

    Args:
        x: array; the first dimension may differ between ranks, the others and the dtype must
            not. A scalar-shaped array counts as one row.
        async_op: return a ``Work`` at once; its ``wait()`` returns the new array.
        group: the process group, default the world.

    Returns:
        A new array of shape ``(sum of first dimensions, *x.shape[1:])``, or the ``Work``.

    Raises:
        TypeError, ValueError, DistributedError: as for :func:`all_reduce`.
    """
    return _of(group).all_gather(x, async_op)


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
    return _of(group).shared_empty(shape, dtype)


def send(x: Any, dst: int, tag: int = 0, group: ProcessGroup | None = None) -> None:
    """Give array ``x`` (any shape and dtype) to rank ``dst``. Blocks until it has been received.

    ``tag`` is a number from 0 to 2**31 - 1 that the receiver must ask for.

    Raises:
        ValueError: ``dst`` is no other rank of the group, or ``tag`` is out of range.
        MismatchError: ``dst`` receives another shape or dtype; raised on both.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    _of(group).send(x, dst, tag)


def recv(x: Any, src: int, tag: int = 0, group: ProcessGroup | None = None) -> Array:
    """Fill array ``x``, in place, with what rank ``src`` sends under ``tag``. Blocks; returns x.

    Shape and dtype must be those of the array that is sent.

    Raises:
        ValueError: ``src`` is no other rank of the group, or ``tag`` is out of range.
        MismatchError: ``src`` sends another shape or dtype; raised on both.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    result: Array = _of(group).recv(x, src, tag)
    return result


def barrier(timeout: float | None = None, group: ProcessGroup | None = None) -> None:
    """Block until every rank of the group has called it, up to ``timeout`` seconds.

    Raises:
        ValueError: ``timeout`` is not positive.
        CollectiveTimeoutError: a rank (named) did not come in time.
        DistributedError: as for :func:`all_reduce`.
    """
    _of(group).barrier(timeout)


def sync_distributed(group: ProcessGroup | None = None) -> None:
    """Block until every operation that this rank has started has ended, as flashlight names it.

    Raises:
        DistributedError: one of them failed; as for :func:`all_reduce`.
    """
    _of(group).synchronize()
