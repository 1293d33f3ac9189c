"""Reductions: what ranks have is combined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.apart import Apart
from flashlight_py.distributed.arrays import dtype_code, pack, pack_terms
from flashlight_py.distributed.constants import Op, ReduceOp
from flashlight_py.distributed.verbs.base import (
    NO_ROOM,
    Room,
    Verbs,
    pack_apart,
    unpack_into,
    whole,
)
from flashlight_py.distributed.verbs.numbers import NUMBERS, of_number, require_room
from flashlight_py.distributed.verbs.refusing import each_begun, refusable
from flashlight_py.distributed.verbs.rows import check_rows
from flashlight_py.distributed.work import AllOf, Then, Work

__all__ = ["Reductions"]

X = TypeVar("X")


def _calls_of_multiple(
    group: Verbs,
    xs: Any,
    scale: float = 1.0,
    op: str = "sum",
    async_op: bool = False,
    contiguous: bool = False,
) -> list[None]:
    """Return a None for each collective that others begin where this rank refuses ``xs``."""
    held = [getattr(x, "array", x) for x in xs] if isinstance(xs, Iterable) else []
    arrays: list[Any] = [x for x in held if hasattr(x, "dtype")]
    kinds = [f"{is_cupy(x)} {x.dtype}" if contiguous else index for index, x in enumerate(arrays)]
    together = 0 if contiguous else max(0, sum(map(is_cupy, arrays)) - 1)  # GPUs' begin as one
    return [None] * max(1, len(set(kinds)) - together)


class Reductions(Verbs):
    """``all_reduce`` and its relatives."""

    @overload
    def all_reduce(
        self, x: X, scale: float = 1.0, op: Op = "sum", async_op: Literal[False] = False
    ) -> X: ...
    @overload
    def all_reduce(
        self, x: X, scale: float = 1.0, op: Op = "sum", *, async_op: Literal[True]
    ) -> Work[X]: ...
    @overload
    def all_reduce(
        self, x: X, scale: float = 1.0, op: Op = "sum", async_op: bool = False
    ) -> Any: ...
    @refusable()
    def all_reduce(self, x: Any, scale: float = 1.0, op: Op = "sum", async_op: bool = False) -> Any:
        """Combine ``x`` of all ranks in place; see :func:`flashlight_py.all_reduce`."""
        if isinstance(x, NUMBERS):
            require_room("all_reduce", x, op, scale, self.size)
            again = partial(self.all_reduce, scale=scale, op=op, async_op=async_op)
            return of_number("all_reduce", x, again, async_op)
        array, reduce_op, factor = self._reduction("all_reduce", x, op, scale)
        packed, native = pack_terms(array, reduce_op)
        call, arguments = self.backend(array).all_reduce, (packed, native, factor, not async_op)
        work = self._journal.run(
            "all_reduce", packed, call, *arguments, op=reduce_op, async_op=async_op
        )
        return self._finish(work, x, unpack_into(array, packed), async_op)

    @overload
    def all_reduce_multiple(
        self,
        xs: Sequence[X],
        scale: float = 1.0,
        op: Op = "sum",
        async_op: Literal[False] = False,
        contiguous: bool = False,
    ) -> list[X]: ...
    @overload
    def all_reduce_multiple(
        self,
        xs: Sequence[X],
        scale: float = 1.0,
        op: Op = "sum",
        *,
        async_op: Literal[True],
        contiguous: bool = False,
    ) -> Work[list[X]]: ...
    @overload
    def all_reduce_multiple(
        self,
        xs: Sequence[X],
        scale: float = 1.0,
        op: Op = "sum",
        async_op: bool = False,
        contiguous: bool = False,
    ) -> Any: ...
    @refusable(_calls_of_multiple)
    def all_reduce_multiple(
        self,
        xs: Sequence[Any],
        scale: float = 1.0,
        op: Op = "sum",
        async_op: bool = False,
        contiguous: bool = False,
    ) -> Any:
        """Combine several arrays; see :func:`flashlight_py.all_reduce_multiple`."""
        xs = list(xs)
        checked = [self._reduction("all_reduce_multiple", x, op, scale) for x in xs]
        arrays = [array for array, _, _ in checked]
        if len(arrays) > 1:
            apart = Apart("all_reduce_multiple")
            for array in arrays:
                apart.add(array)
        works: list[Work]
        if contiguous:
            works = [self._all_reduce_packed(same, op, scale) for same in _by_dtype(arrays)]
        else:
            works = self._all_reduce_each(arrays, op, scale)
        return self._finish(AllOf(works), xs, None, async_op)

    def _all_reduce_each(self, arrays: list[Array], op: Op, scale: float) -> list[Work]:
        """Reduce arrays by themselves; those on GPUs begin together, after those of the CPU."""
        on_gpu = [array for array in arrays if is_cupy(array)]
        on_cpu = [array for array in arrays if not is_cupy(array)]
        works: list[Work] = [self.all_reduce(x, scale, op, async_op=True) for x in on_cpu]
        if on_gpu:
            works.append(self._all_reduce_together(on_gpu, op, scale))
        return works

    def _all_reduce_together(self, arrays: list[Array], op: Op, scale: float) -> Work:
        _, reduce_op, factor = self._reduction("all_reduce_multiple", arrays[0], op, scale)
        terms = [pack_terms(array, reduce_op) for array in arrays]
        packed, native = [array for array, _ in terms], terms[0][1]
        work = self._journal.run(
            "all_reduce_multiple",
            None,
            self.backend(arrays[0]).all_reduce_many,
            *(packed, native, factor),
            op=reduce_op,
            size=sum(array.nbytes for array in packed),
            async_op=True,
        )
        homes = [unpack_into(array, p) for array, p in zip(arrays, packed, strict=True)]

        def unpack(_: Any) -> None:
            for home in filter(None, homes):
                home(None)

        return self._keep(Then(work, unpack))

    def _all_reduce_packed(self, arrays: list[Array], op: Op, scale: float) -> Work:
        """Reduce arrays of one dtype as one."""
        xp = array_module(arrays[0])
        flat = xp.concatenate([array.ravel() for array in arrays])

        def unpack(_: Any) -> None:
            start = 0
            for array in arrays:
                array[...] = flat[start : start + array.size].reshape(array.shape)
                start += array.size

        return self._keep(Then(self.all_reduce(flat, scale, op, async_op=True), unpack))

    @overload
    def reduce(
        self,
        x: X,
        root: int = 0,
        op: Op = "sum",
        scale: float = 1.0,
        async_op: Literal[False] = False,
    ) -> X: ...
    @overload
    def reduce(
        self, x: X, root: int = 0, op: Op = "sum", scale: float = 1.0, *, async_op: Literal[True]
    ) -> Work[X]: ...
    @overload
    def reduce(
        self, x: X, root: int = 0, op: Op = "sum", scale: float = 1.0, async_op: bool = False
    ) -> Any: ...
    @refusable()
    def reduce(
        self, x: Any, root: int = 0, op: Op = "sum", scale: float = 1.0, async_op: bool = False
    ) -> Any:
        """Combine ``x`` of all ranks on one; see :func:`flashlight_py.reduce`."""
        if isinstance(x, NUMBERS):
            require_room("reduce", x, op, scale, self.size)
            again = partial(self.reduce, root=root, op=op, scale=scale, async_op=async_op)
            return of_number("reduce", x, again, async_op)
        root = self._check_rank("reduce", "root", root)
        array, reduce_op, factor = self._reduction("reduce", x, op, scale)
        packed, native = pack_terms(array, reduce_op)
        call, arguments = self.backend(array).reduce, (packed, native, factor, root, not async_op)
        work = self._journal.run(
            "reduce", packed, call, *arguments, op=reduce_op, root=root, async_op=async_op
        )
        home = unpack_into(array, packed) if self.rank == root else None
        return self._finish(work, x, home, async_op)

    @overload
    def reduce_scatter(
        self,
        x: list[Any] | tuple[Any, ...],
        scale: float = 1.0,
        op: Op = "sum",
        out: Any = None,
        async_op: Literal[False] = False,
        rows: Sequence[int] | None = None,
    ) -> list[Array]: ...
    @overload
    def reduce_scatter(
        self,
        x: Any,
        scale: float = 1.0,
        op: Op = "sum",
        out: Any = None,
        async_op: Literal[False] = False,
        rows: Sequence[int] | None = None,
    ) -> Array: ...
    @overload
    def reduce_scatter(
        self,
        x: Any,
        scale: float = 1.0,
        op: Op = "sum",
        out: Any = None,
        *,
        async_op: Literal[True],
        rows: Sequence[int] | None = None,
    ) -> Work[Array]: ...
    @overload
    def reduce_scatter(
        self,
        x: Any,
        scale: float = 1.0,
        op: Op = "sum",
        out: Any = None,
        async_op: bool = False,
        rows: Sequence[int] | None = None,
    ) -> Any: ...
    @refusable(
        lambda _, x, scale=1.0, op="sum", out=None, async_op=False, rows=None: each_begun(
            x, async_op
        )
    )
    def reduce_scatter(
        self,
        x: Any,
        scale: float = 1.0,
        op: Op = "sum",
        out: Any = None,
        async_op: bool = False,
        rows: Sequence[int] | None = None,
    ) -> Any:
        """Combine ``x`` and keep one part; see :func:`flashlight_py.reduce_scatter`."""

        def prepare(x: Any, out: Any) -> Callable[[], Any]:
            array, reduce_op, factor = self._reduction("reduce_scatter", x, op, scale, writes=False)
            counts = self._parts_of(array, rows)
            mine = array.shape[0] // self.size if counts is None else counts[self.rank]
            room = self._room("reduce_scatter", out, array, (mine, *array.shape[1:]))
            arguments = (array, reduce_op, factor, room, async_op, counts)
            return lambda: self._reduce_scatter(*arguments)

        if isinstance(x, list | tuple):
            return self._each("reduce_scatter", x, out, async_op, prepare)
        return prepare(x, out)()

    def _parts_of(self, array: Array, rows: Sequence[int] | None) -> list[int] | None:
        """Return how many rows each rank gets, where parts are unequal."""
        if rows is not None:
            return check_rows("reduce_scatter", array, rows, self.size)
        self._require_equal_parts("reduce_scatter", array, "; unequal parts need rows=")
        return None

    def _reduce_scatter(
        self,
        array: Array,
        op: ReduceOp,
        scale: float,
        room: Room,
        async_op: bool,
        rows: list[int] | None,
    ) -> Any:
        terms, native = pack_terms(array, op)
        as_given = native is op
        given, room = room, room if as_given else NO_ROOM  # truth values become numbers at the end
        packed, call = pack_apart(terms, room), self.backend(array).reduce_scatter
        arguments = (packed, native, scale, not async_op, room.packed, rows)
        work = self._journal.run(
            "reduce_scatter", packed, call, *arguments, op=op, async_op=async_op
        )
        if as_given:
            return self._finish_into(work, room, async_op)

        def finish(part: Array) -> Any:
            if given.array is None:
                return part.astype(array.dtype)
            given.array[...] = part
            return given.given

        return self._keep(Then(work, finish)) if async_op else finish(work.wait())

    @refusable()
    def all_reduce_location(
        self, x: Any, op: Literal["min", "max"] = "min", async_op: bool = False
    ) -> Any:
        """Find extremes and who has them; see :func:`flashlight_py.all_reduce_location`."""
        verb = "all_reduce_location"
        array, reduce_op, _ = self._reduction(verb, x, op, 1.0, writes=False)
        if reduce_op not in (ReduceOp.MIN, ReduceOp.MAX):
            raise ValueError(f"{verb}: op must be 'min' or 'max', got {op!r}")
        xp = array_module(array)
        find = xp.argmin if reduce_op is ReduceOp.MIN else xp.argmax  # of equal ones the first
        packed, backend = pack(array)[None], self.backend(array)

        def locate(rows: Array) -> tuple[Array, Array]:
            ranks = xp.asarray(find(rows, axis=0))
            return xp.asarray(xp.take_along_axis(rows, ranks[None], 0)[0]), ranks

        with backend.part_of(f"{verb}({op})"):
            work = self._journal.run(
                *(verb, packed, backend.all_gather, packed, not async_op),
                op=reduce_op,
                async_op=async_op,
            )
        return self._keep(Then(work, locate)) if async_op else locate(work.wait())

    @refusable()
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
