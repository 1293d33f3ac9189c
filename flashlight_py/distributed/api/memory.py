"""Arrays that are cheap to reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array
from flashlight_py.distributed.api.methods import method
from flashlight_py.distributed.arrays import dtype_code
from flashlight_py.distributed.membership import of
from flashlight_py.distributed.numbers import whole
from flashlight_py.distributed.running import refusing

if TYPE_CHECKING:
    from flashlight_py.distributed.group import ProcessGroup

__all__ = ["shared_empty"]


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


class Methods:
    """Of a group."""

    shared_empty = method(shared_empty)
