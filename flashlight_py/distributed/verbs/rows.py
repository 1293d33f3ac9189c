"""Parts of unequal length: how many rows each rank gets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.arrays import as_array, dtype_code, dtype_of_code
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.verbs.base import NO_ROOM, Room, Verbs, pack_apart, whole
from flashlight_py.distributed.work import Work
from flashlight_py.errors import MismatchError

__all__ = ["ScatterRows", "check_rows"]


class ScatterRows(Verbs):
    """``scatter`` of unequal parts: the ranks agree on what they are, then move them."""

    def _scatter_rows(
        self, xs: Any, root: int, out: Any, async_op: bool, rows: Iterable[object]
    ) -> Any:
        array = None
        if self.rank == root:
            array = _joined(xs)
            counts = check_rows("scatter", array, rows, self.size)
            _check_parts(xs, counts)
        else:
            counts = _integers("scatter", rows, self.size)
        like = array if array is not None else None if out is None else as_array("scatter", out)
        room = NO_ROOM
        if like is not None:
            room = self._room("scatter", out, like, (counts[self.rank], *like.shape[1:]))
        work = self._journal.run(
            "scatter",
            like,
            lambda: self._move_rows(array, like, counts, root, room, not async_op),
            root=root,
            async_op=async_op,
        )
        return self._finish_into(work, room, async_op)

    def _move_rows(
        self,
        array: Array | None,
        like: Array | None,
        counts: list[int],
        root: int,
        room: Room,
        blocking: bool,
    ) -> Work:
        code, shape = self._agree_on_rows(like, counts, root)
        if array is None:  # this rank has nothing to give
            library: Any = array_module(room.packed)
            array, counts = library.empty((0, *shape), dtype_of_code(code)), [0] * self.size
        sent = pack_apart(array, room)
        return self.backend(sent).all_to_all_uneven(sent, counts, blocking, room.packed)

    def _agree_on_rows(
        self, like: Array | None, counts: list[int], root: int
    ) -> tuple[int, list[int]]:
        """Return the dtype's code and the dimensions after the first of what ``root`` gives.

        Raises:
            MismatchError: a rank gave other ``rows``, or an ``out`` of another kind; on every rank.
        """
        kind = None if like is None else [dtype_code("scatter", like.dtype), list(like.shape[1:])]
        backend, mine = self.backend(), json.dumps([counts, root, kind]).encode()
        with backend.part_of("scatter(rows=...)"):
            calls = [json.loads(text) for text in exchange_bytes(backend, mine)]
        measure = calls[root]
        if any(call[:2] != measure[:2] or call[2] not in (None, measure[2]) for call in calls):
            told = "; ".join(f"rank {r} called {_in_words(*c)}" for r, c in enumerate(calls))
            raise MismatchError(
                f"[scatter] rank {self.rank} of {self.size}: the ranks called different things: "
                f"{told}. Nothing was sent; make every rank call the same"
            )
        code, shape = measure[2]
        return code, shape


def _in_words(counts: list[int], root: int, kind: list[Any] | None) -> str:
    what = "" if kind is None else f"{dtype_of_code(kind[0])} rows of {tuple(kind[1])}, "
    return f"scatter({what}rows={counts}, root={root})"


def _joined(xs: Any) -> Array:
    """Return what the root scatters as one array."""
    if not isinstance(xs, list | tuple):
        return as_array("scatter", xs, writes=False)
    arrays = [as_array("scatter", x, writes=False) for x in xs]
    kinds = {(array.dtype, array.shape[1:], array.ndim > 0) for array in arrays}
    if len(kinds) != 1 or not arrays[0].ndim:
        got = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
        raise ValueError(f"scatter: with rows= only first dimensions may differ; got {got}")
    joined: Array = array_module(arrays[0]).concatenate(arrays)
    return joined


def _check_parts(xs: Any, counts: list[int]) -> None:
    if isinstance(xs, list | tuple) and [len(x) for x in xs] != counts:
        raise ValueError(
            f"scatter: rows={counts}, and the parts have {[len(x) for x in xs]} rows; make them "
            "the same"
        )


def check_rows(verb: str, array: Array, rows: Iterable[object], size: int) -> list[int]:
    """Return ``rows`` as ints, if they cut the first dimension of ``array`` into ``size`` parts.

    Raises:
        ValueError: they do not, or one of them is no integer.
    """
    counts = _integers(verb, rows, size)
    have = array.shape[0] if array.ndim else 0
    if sum(counts) != have or not array.ndim:
        raise ValueError(
            f"{verb}: rows must say for each of the {size} ranks how many of the rows of x (shape "
            f"{array.shape}) it gets, {have} in all; got {counts}"
        )
    return counts


def _integers(verb: str, rows: Iterable[object], size: int) -> list[int]:
    given = list(rows)
    counts = [count for n in given if (count := whole(n)) is not None and not isinstance(n, bool)]
    if len(given) != size or len(counts) != size or min(counts) < 0:
        raise ValueError(
            f"{verb}: rows must say, in integers, for each of the {size} ranks how many rows it "
            f"gets; got {given}"
        )
    return counts
