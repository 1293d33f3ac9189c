"""Reductions: what ranks have is combined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.arrays import dtype_code, pack
from flashlight_py.distributed.verbs.base import Verbs, pack_apart, unpack_into, whole
from flashlight_py.distributed.verbs.numbers import NUMBERS, of_number, require_room
from flashlight_py.distributed.work import AllOf, Then, Work

__all__ = ["Reductions"]


class Reductions(Verbs):
    """``all_reduce`` and its relatives."""

    def all_reduce(
        self, x: Any, scale: float = 1.0, op: str = "sum", async_op: bool = False
    ) -> Any:
        """Combine ``x`` of all ranks in place; see :func:`flashlight_py.all_reduce`."""
        if isinstance(x, NUMBERS):
            require_room("all_reduce", x, op, scale, self.size)
            again = partial(self.all_reduce, scale=scale, op=op, async_op=async_op)
            return of_number("all_reduce", x, again, async_op)
        array, reduce_op, factor = self._reduction("all_reduce", x, op, scale)
        packed, call = pack(array), self.backend(array).all_reduce
        arguments = (packed, reduce_op, factor, not async_op)
        work = self._journal.run(
            "all_reduce", packed, call, *arguments, op=reduce_op, async_op=async_op
        )
        return self._finish(work, x, unpack_into(array, packed), async_op)

    def all_reduce_multiple(
        self,
        xs: Sequence[Any],
        scale: float = 1.0,
        op: str = "sum",
        async_op: bool = False,
        contiguous: bool = False,
    ) -> Any:
        """Combine several arrays; see :func:`flashlight_py.all_reduce_multiple`."""
        xs = list(xs)
        checked = [self._reduction("all_reduce_multiple", x, op, scale) for x in xs]
        arrays = [array for array, _, _ in checked]
        # Of one tensor given twice, two arrays are made; of one array in two Variables, none.
        if any(len({id(each) for each in given}) < len(xs) for given in (xs, arrays)):
            raise ValueError("all_reduce_multiple: the same array is in the list twice")
        works: list[Work]
        if contiguous:
            works = [self._all_reduce_packed(same, op, scale) for same in _by_dtype(arrays)]
        else:
            works = self._all_reduce_each(arrays, op, scale)
        return self._finish(AllOf(works), xs, None, async_op)

    def _all_reduce_each(self, arrays: list[Array], op: str, scale: float) -> list[Work]:
        """Reduce arrays by themselves; those on GPUs begin together, after those of the CPU."""
        on_gpu = [array for array in arrays if is_cupy(array)]
        on_cpu = [array for array in arrays if not is_cupy(array)]
        works: list[Work] = [self.all_reduce(x, scale, op, async_op=True) for x in on_cpu]
        if on_gpu:
            works.append(self._all_reduce_together(on_gpu, op, scale))
        return works

    def _all_reduce_together(self, arrays: list[Array], op: str, scale: float) -> Work:
        _, reduce_op, factor = self._reduction("all_reduce_multiple", arrays[0], op, scale)
        packed = [pack(array) for array in arrays]
        work = self._journal.run(
            "all_reduce_multiple",
            None,
            self.backend(arrays[0]).all_reduce_many,
            *(packed, reduce_op, factor),
            op=reduce_op,
            size=sum(array.nbytes for array in packed),
            async_op=True,
        )
        homes = [unpack_into(array, p) for array, p in zip(arrays, packed, strict=True)]

        def unpack(_: Any) -> None:
            for home in filter(None, homes):
                home(None)

        return self._keep(Then(work, unpack))

    def _all_reduce_packed(self, arrays: list[Array], op: str, scale: float) -> Work:
        """Reduce arrays of one dtype as one."""
        xp = array_module(arrays[0])
        flat = xp.concatenate([array.ravel() for array in arrays])

        def unpack(_: Any) -> None:
            start = 0
            for array in arrays:
                array[...] = flat[start : start + array.size].reshape(array.shape)
                start += array.size

        return self._keep(Then(self.all_reduce(flat, scale, op, async_op=True), unpack))

    def reduce(
        self, x: Any, root: int = 0, op: str = "sum", scale: float = 1.0, async_op: bool = False
    ) -> Any:
        """Combine ``x`` of all ranks on one; see :func:`flashlight_py.reduce`."""
        if isinstance(x, NUMBERS):
            require_room("reduce", x, op, scale, self.size)
            again = partial(self.reduce, root=root, op=op, scale=scale, async_op=async_op)
            return of_number("reduce", x, again, async_op)
        root = self._check_rank("reduce", "root", root)
        array, reduce_op, factor = self._reduction("reduce", x, op, scale)
        packed, call = pack(array), self.backend(array).reduce
        arguments = (packed, reduce_op, factor, root, not async_op)
        work = self._journal.run(
            "reduce", packed, call, *arguments, op=reduce_op, root=root, async_op=async_op
        )
        home = unpack_into(array, packed) if self.rank == root else None
        return self._finish(work, x, home, async_op)

    def reduce_scatter(
        self,
        x: Any,
        scale: float = 1.0,
        op: str = "sum",
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine ``x`` and keep one part; see :func:`flashlight_py.reduce_scatter`."""
        array, reduce_op, factor = self._reduction("reduce_scatter", x, op, scale, writes=False)
        self._require_equal_parts("reduce_scatter", array)
        shape = (array.shape[0] // self.size, *array.shape[1:])
        room = self._room("reduce_scatter", out, array, shape)
        packed, call = pack_apart(array, room), self.backend(array).reduce_scatter
        arguments = (packed, reduce_op, factor, not async_op, room.packed)
        work = self._journal.run(
            "reduce_scatter", packed, call, *arguments, op=reduce_op, async_op=async_op
        )
        return self._finish_into(work, room, async_op)

    def shared_empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return an array that is cheap to reduce; see :func:`flashlight_py.shared_empty`."""
        extents = _extents(shape)
        kind = np.dtype(dtype)
        dtype_code("shared_empty", kind)
        backend = self.backend()
        with self._journal.recording("shared_empty", like=(kind, extents)):
            return backend.shared_empty(extents, kind)


def _extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape, told as NumPy lets it be told, as a tuple."""
    alone = whole(shape)
    given = tuple(shape) if alone is None else (alone,)  # type: ignore[arg-type]
    extents = tuple(extent for extent in map(whole, given) if extent is not None and extent >= 0)
    if len(extents) < len(given):
        raise ValueError(
            f"shared_empty: a shape consists of integers that are not negative, got {given}"
        )
    return extents


def _by_dtype(arrays: list[Array]) -> list[list[Array]]:
    """Group arrays that can travel together, in an order that all ranks share."""
    groups: dict[str, list[Array]] = {}
    for array in arrays:
        groups.setdefault(f"{array_module(array).__name__} {array.dtype.name}", []).append(array)
    return list(groups.values())
