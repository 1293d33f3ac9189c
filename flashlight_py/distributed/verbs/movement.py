"""Movement: arrays go from rank to rank as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.arrays import as_array, pack
from flashlight_py.distributed.verbs.base import NO_ROOM, Room, pack_apart, unpack_into
from flashlight_py.distributed.verbs.numbers import NUMBERS, of_number
from flashlight_py.distributed.verbs.refusing import each_begun, refusable
from flashlight_py.distributed.verbs.rows import ScatterRows, check_rows
from flashlight_py.distributed.work import Then, Work

__all__ = ["Movement"]

X = TypeVar("X")

_SCATTER_DIMENSIONS = 8  # that travel with the call, so that ranks need not know the shape


class Movement(ScatterRows):
    """``broadcast``, the gathers, ``scatter`` and ``all_to_all``."""

    @overload
    def broadcast(self, x: X, root: int = 0, async_op: Literal[False] = False) -> X: ...
    @overload
    def broadcast(self, x: X, root: int = 0, *, async_op: Literal[True]) -> Work[X]: ...
    @overload
    def broadcast(self, x: X, root: int = 0, async_op: bool = False) -> Any: ...
    @refusable()
    def broadcast(self, x: Any, root: int = 0, async_op: bool = False) -> Any:
        """Give every rank ``root``'s ``x``, in place; see :func:`flashlight_py.broadcast`."""
        if isinstance(x, NUMBERS):
            again = partial(self.broadcast, root=root, async_op=async_op)
            return of_number("broadcast", x, again, async_op)
        array = as_array("broadcast", x)
        root = self._check_rank("broadcast", "root", root)
        packed, call = pack(array), self.backend(array).broadcast
        arguments = (packed, root, not async_op)
        work = self._journal.run(
            "broadcast", packed, call, *arguments, root=root, async_op=async_op
        )
        return self._finish(work, x, unpack_into(array, packed), async_op)

    @overload
    def all_gather(
        self, x: list[Any] | tuple[Any, ...], out: Any = None, async_op: Literal[False] = False
    ) -> list[Array]: ...
    @overload
    def all_gather(self, x: Any, out: Any = None, async_op: Literal[False] = False) -> Array: ...
    @overload
    def all_gather(self, x: Any, out: Any = None, *, async_op: Literal[True]) -> Work[Array]: ...
    @overload
    def all_gather(self, x: Any, out: Any = None, async_op: bool = False) -> Any: ...
    @refusable(lambda _, x, out=None, async_op=False: each_begun(x, async_op))
    def all_gather(self, x: Any, out: Any = None, async_op: bool = False) -> Any:
        """Join ``x`` of all ranks; see :func:`flashlight_py.all_gather`."""

        def prepare(x: Any, out: Any) -> Callable[[], Any]:
            rows = _rows("all_gather", x)
            room = self._room("all_gather", out, rows, (None, *rows.shape[1:]))
            return lambda: self._all_gather(rows, room, async_op)

        if isinstance(x, list | tuple):
            return self._each("all_gather", x, out, async_op, prepare)
        return prepare(x, out)()

    def _all_gather(self, rows: Array, room: Room, async_op: bool) -> Any:
        packed, call = pack_apart(rows, room), self.backend(rows).all_gather
        arguments = (packed, not async_op, room.packed)
        work = self._journal.run("all_gather", packed, call, *arguments, async_op=async_op)
        return self._finish_into(work, room, async_op)

    @overload
    def gather(
        self, x: Any, root: int = 0, out: Any = None, async_op: Literal[False] = False
    ) -> Array | None: ...
    @overload
    def gather(
        self, x: Any, root: int = 0, out: Any = None, *, async_op: Literal[True]
    ) -> Work[Array | None]: ...
    @overload
    def gather(self, x: Any, root: int = 0, out: Any = None, async_op: bool = False) -> Any: ...
    @refusable()
    def gather(self, x: Any, root: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """Join ``x`` of all ranks on one; see :func:`flashlight_py.gather`."""
        root = self._check_rank("gather", "root", root)
        rows = _rows("gather", x)
        given = out if self.rank == root else None
        room = self._room("gather", given, rows, (None, *rows.shape[1:]))
        packed, call = pack_apart(rows, room), self.backend(rows).gather
        arguments = (packed, root, not async_op, room.packed)
        work = self._journal.run("gather", packed, call, *arguments, root=root, async_op=async_op)
        return self._finish_into(work, room, async_op)

    @overload
    def scatter(
        self,
        xs: Any = None,
        root: int = 0,
        out: Any = None,
        async_op: Literal[False] = False,
        rows: Sequence[int] | None = None,
    ) -> Array: ...
    @overload
    def scatter(
        self,
        xs: Any = None,
        root: int = 0,
        out: Any = None,
        *,
        async_op: Literal[True],
        rows: Sequence[int] | None = None,
    ) -> Work[Array]: ...
    @overload
    def scatter(
        self,
        xs: Any = None,
        root: int = 0,
        out: Any = None,
        async_op: bool = False,
        rows: Sequence[int] | None = None,
    ) -> Any: ...
    @refusable()
    def scatter(
        self,
        xs: Any = None,
        root: int = 0,
        out: Any = None,
        async_op: bool = False,
        rows: Sequence[int] | None = None,
    ) -> Any:
        """Give each rank its part of ``xs`` on one; see :func:`flashlight_py.scatter`."""
        root = self._check_rank("scatter", "root", root)
        if rows is not None:
            return self._scatter_rows(xs, root, out, async_op, rows)
        whole = self._whole(xs) if self.rank == root else None
        told = whole[0] if whole is not None else None if out is None else as_array("scatter", out)
        room = NO_ROOM if told is None else self._room("scatter", out, told, told.shape)
        sent = None if whole is None else pack_apart(whole, room)
        call, arguments = self.backend(told).scatter, (sent, root, not async_op, room.packed)
        work = self._journal.run("scatter", told, call, *arguments, root=root, async_op=async_op)
        return self._finish_into(work, room, async_op)

    def _whole(self, xs: Any) -> Array:
        """Return what the root scatters as one array of shape (size, part's shape)."""
        if xs is None:
            raise ValueError(
                f"scatter: rank {self.rank} is the root and must give the arrays, got None"
            )
        if isinstance(xs, list | tuple):
            return self._stacked(xs)
        array = as_array("scatter", xs, writes=False)
        self._require_equal_parts("scatter", array)
        part = (array.shape[0] // self.size, *array.shape[1:])
        return _limited(pack(array).reshape(self.size, *part))

    def _stacked(self, xs: Sequence[Any]) -> Array:
        if len(xs) != self.size:
            raise ValueError(f"scatter: one array for each of the {self.size} ranks, got {len(xs)}")
        arrays = [as_array("scatter", x, writes=False) for x in xs]
        first = arrays[0]
        for rank, array in enumerate(arrays):
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"scatter: all parts must be alike; that for rank 0 is {first.dtype} "
                    f"{first.shape}, that for rank {rank} {array.dtype} {array.shape}. Where only "
                    "first dimensions differ, pass rows= on every rank"
                )
        stacked: Array = array_module(first).stack(arrays)
        return _limited(pack(stacked))

    @overload
    def all_to_all(
        self,
        x: Any,
        rows: Sequence[int] | None = None,
        out: Any = None,
        async_op: Literal[False] = False,
        return_rows: Literal[False] = False,
    ) -> Array: ...
    @overload
    def all_to_all(
        self,
        x: Any,
        rows: Sequence[int] | None = None,
        out: Any = None,
        *,
        async_op: Literal[True],
        return_rows: Literal[False] = False,
    ) -> Work[Array]: ...
    @overload
    def all_to_all(
        self,
        x: Any,
        rows: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        return_rows: bool = False,
    ) -> Any: ...
    @refusable()
    def all_to_all(
        self,
        x: Any,
        rows: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        return_rows: bool = False,
    ) -> Any:
        """Give each rank its part of ``x``; see :func:`flashlight_py.all_to_all`."""
        array, blocking = as_array("all_to_all", x, writes=False), not async_op
        backend, run = self.backend(array), self._journal.run
        came: list[int] = []
        if rows is None:
            self._require_equal_parts("all_to_all", array, "; unequal parts need rows=")
            room = self._room("all_to_all", out, array, array.shape)
            sent = pack_apart(array, room)
            arguments: tuple[Any, ...] = (sent, blocking, room.packed)
            came += [array.shape[0] // self.size] * self.size
            work = run("all_to_all", sent, backend.all_to_all, *arguments, async_op=async_op)
        else:
            counts = check_rows("all_to_all", array, rows, self.size)
            room = self._room("all_to_all", out, array, (None, *array.shape[1:]))
            sent, call = pack_apart(array, room), backend.all_to_all_uneven
            arguments = (sent, counts, blocking, room.packed, came)
            work = run("all_to_all", sent, call, *arguments, async_op=async_op)
        result = self._finish_into(work, room, async_op)
        if not return_rows:
            return result
        return self._keep(Then(result, lambda got: (got, came))) if async_op else (result, came)


def _rows(verb: str, x: Any) -> Array:
    """Return ``x`` as rows; a scalar-shaped array is one row."""
    array = as_array(verb, x, writes=False)
    return array.reshape(1) if array.ndim == 0 else array


def _limited(whole: Array) -> Array:
    if whole.ndim > _SCATTER_DIMENSIONS + 1:
        raise ValueError(
            f"scatter: a part has at most {_SCATTER_DIMENSIONS} dimensions, got shape "
            f"{whole.shape[1:]}; reshape it"
        )
    return whole
