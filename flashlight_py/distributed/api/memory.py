"""Arrays in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array
from flashlight_py.distributed.api.running import refusing
from flashlight_py.distributed.backends.exchange import Steps
from flashlight_py.distributed.calls.arrays import dtype_code
from flashlight_py.distributed.calls.checks import whole
from flashlight_py.distributed.groups.membership import of
from flashlight_py.distributed.memory.host_array import Layout, array_of_host, check_dtype

if TYPE_CHECKING:
    from flashlight_py.distributed.api.group import ProcessGroup

__all__ = ["host_array", "shared_empty"]


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
        extents, kind = _extents("shared_empty", shape), np.dtype(dtype)
        dtype_code("shared_empty", kind)
        backend = members.backend()
        with members.journal.recording("shared_empty", like=(kind, extents)):
            array: Array = backend.shared_empty(extents, kind)
            return array


def host_array(
    load: Callable[..., Any],
    shape: int | Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
    group: ProcessGroup | None = None,
) -> Array:
    """Return one read-only array per host: one rank loads it, all ranks of the host map it.

    For data sets: eight ranks hold one copy instead of eight. The memory is anonymous: it is freed
    when the last rank has dropped the last array or view of it, or has ended, however it ended.
    Writing to the array raises ValueError, and no rank has it mapped writable. It outlives the
    group. Ranks that cannot share memory count as hosts of their own, with a warning where they
    run on one machine.

    Collective, blocking: every rank calls it, and the others wait while one loads, which must not
    take longer than the group's timeout. ``load`` itself must not call a collective of the group.

    Args:
        load: called on the first rank of each host, and on no other. Without ``shape`` it takes
            nothing and returns an array of any shape and dtype, or what ``numpy.asarray`` makes one
            of; that is copied, and not kept. While it is copied there are two; of a
            ``numpy.memmap`` that was opened with mode ``"r"`` only 16 MB of the second.
        shape: with a shape, ``load`` is called with a new array of zeros, writable and C-ordered,
            and fills it in place: there is one copy at any time. It must not keep it.
        dtype: of that array; counts with ``shape`` only.
        group: the process group, default the world.

    Returns:
        A C-ordered NumPy array, the same on all ranks of a host. Hosts may load different ones.

    Raises:
        TypeError: ``load`` is not callable, or the dtype holds Python objects.
        ValueError: a dimension is negative.
        Exception: what ``load`` raises, on the rank where it does. The group goes on.
        RankFailedError: ``load`` raised on another rank (named), or there is not enough memory.
        DistributedError: as for :func:`all_reduce`.

    Example:
        >>> images = fl.host_array(lambda: np.arange(6, dtype=np.float32).reshape(3, 2))
        >>> images[1], images.flags.writeable
        (array([2., 3.], dtype=float32), False)
    """
    members = of(group)
    with refusing(members, "host_array"):
        if not callable(load):
            raise TypeError(
                f"host_array: load must be a function that returns an array, got "
                f"{type(load).__name__}; only one rank of each host calls it"
            )
        layout = None
        if shape is not None:
            layout = Layout(_extents("host_array", shape), np.dtype(dtype))
            check_dtype(layout.dtype)
        steps = Steps(members.backend(), "host_array")
        with members.journal.recording("host_array"):
            return array_of_host(steps, load, layout)


def _extents(caller: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape, as NumPy lets it be written, as a tuple."""
    alone = whole(shape)
    given = tuple(shape) if alone is None else (alone,)  # type: ignore[arg-type]
    extents = tuple(extent for extent in map(whole, given) if extent is not None and extent >= 0)
    if len(extents) < len(given):
        raise ValueError(
            f"{caller}: a shape consists of integers that are not negative, got {given}"
        )
    return extents
