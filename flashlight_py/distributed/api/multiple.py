"""Several arrays that are reduced together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.calls.arrays import as_array, pack_terms
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import Apart
from flashlight_py.distributed.calls.running import (
    COLLECTIVE,
    collective,
    reduction,
    refusing,
    unpack_into,
)
from flashlight_py.distributed.constants import Op
from flashlight_py.distributed.groups.membership import Membership, of
from flashlight_py.distributed.verbs import ALL_REDUCE
from flashlight_py.distributed.work import AllOf, Then, Work

if TYPE_CHECKING:
    from flashlight_py.distributed.groups.group import ProcessGroup

__all__ = ["all_reduce_multiple"]

X = TypeVar("X")


def all_reduce_multiple(
    xs: Sequence[X],
    scale: float = 1.0,
    op: Op = "sum",
    async_op: bool = False,
    contiguous: bool = False,
    group: ProcessGroup | None = None,
) -> list[X] | Work[list[X]]:
    """Combine each array of ``xs`` over the ranks, in place, as :func:`all_reduce` does.

    Args:
        xs: arrays of any shapes and dtypes; the same list, in the same order, on every rank.
        scale: real number that the results are multiplied by.
        op: as for :func:`all_reduce`.
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
    members = of(group)
    with refusing(members, "all_reduce_multiple", _Begun(xs, contiguous)):
        xs = list(xs)
        checked = [as_array("all_reduce_multiple", x, of_any_dtype=True) for x in xs]
        for array in checked:
            reduction(members, "all_reduce_multiple", array, op, scale)
        if len(checked) > 1:
            apart = Apart("all_reduce_multiple")
            for array in checked:
                apart.add(array)
        if contiguous:
            works = [_packed(members, same, op, scale) for same in _by_dtype(checked)]
        else:
            works = _one_by_one(members, checked, op, scale)
        together = Then(AllOf(works), lambda _: xs)
        return together if async_op else together.wait()


class _Begun:
    """The calls that other ranks begin of an all_reduce_multiple that this rank refuses."""

    def __init__(self, xs: Any, contiguous: bool) -> None:
        self._xs, self._contiguous = xs, contiguous

    def __iter__(self) -> Iterator[None]:
        held = [getattr(x, "array", x) for x in self._xs] if isinstance(self._xs, Iterable) else []
        arrays: list[Any] = [x for x in held if hasattr(x, "dtype")]
        count = len(arrays)
        if self._contiguous:
            count = len({f"{is_cupy(x)} {x.dtype}" for x in arrays})
        elif on_gpu := sum(map(is_cupy, arrays)):  # which begin as one
            count -= on_gpu - 1
        return itertools.repeat(COLLECTIVE, max(1, count))


def _one_by_one(members: Membership, arrays: list[Array], op: Op, scale: float) -> list[Work]:
    """Reduce arrays by themselves; those on GPUs begin together, after those of the CPU."""
    on_gpu = [array for array in arrays if is_cupy(array)]
    how: dict[str, Any] = {"op": op, "scale": scale, "async_op": True}
    works: list[Work] = [
        collective(members, ALL_REDUCE, array, **how) for array in arrays if not is_cupy(array)
    ]
    if on_gpu:
        works.append(_together(members, on_gpu, op, scale))
    return works


def _together(members: Membership, arrays: list[Array], op: Op, scale: float) -> Work:
    """Reduce arrays of a GPU, begun as one."""
    reduce_op, factor = reduction(members, "all_reduce_multiple", arrays[0], op, scale)
    terms = [pack_terms(array, reduce_op) for array in arrays]
    calls = [Call(ALL_REDUCE, *term[:2], factor, blocking=False) for term in terms]
    work = members.run_many(calls, "all_reduce_multiple")
    homes = [unpack_into(array, call.array) for array, call in zip(arrays, calls, strict=True)]

    def unpack(_: Any) -> None:
        for home in filter(None, homes):
            home()

    return members.keep(Then(work, unpack))


def _packed(members: Membership, arrays: list[Array], op: Op, scale: float) -> Work:
    """Reduce arrays of one dtype as one."""
    xp = array_module(arrays[0])
    flat = xp.concatenate([array.ravel() for array in arrays])

    def unpack(_: Any) -> None:
        start = 0
        for array in arrays:
            array[...] = flat[start : start + array.size].reshape(array.shape)
            start += array.size

    work = collective(members, ALL_REDUCE, flat, scale=scale, op=op, async_op=True)
    return members.keep(Then(work, unpack))


def _by_dtype(arrays: list[Array]) -> list[list[Array]]:
    """Group arrays that can travel together, in an order that all ranks share."""
    groups: dict[str, list[Array]] = {}
    for array in arrays:
        groups.setdefault(f"{array_module(array).__name__} {array.dtype.name}", []).append(array)
    return list(groups.values())
