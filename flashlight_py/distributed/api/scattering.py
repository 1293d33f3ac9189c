"""``scatter``: the root alone has an array, of which the others know nothing beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.api.running import NO_OUTPUT, Output, finish_into, output, pack_apart
from flashlight_py.distributed.backends.exchange import Steps, exchange_bytes
from flashlight_py.distributed.calls.arrays import (
    MOVED,
    as_array,
    code_of,
    in_text,
    name_of,
    of_bytes,
    of_text,
    pack,
    with_text,
)
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import check_rows, each_rank, require_equal_parts
from flashlight_py.distributed.failures.wording import different_calls
from flashlight_py.distributed.groups.membership import Membership
from flashlight_py.distributed.verbs import ALL_TO_ALL, SCATTER
from flashlight_py.distributed.work import Then, Work
from flashlight_py.errors import MismatchError

_DIMENSIONS = 8  # that travel with the call, so that ranks need not know the shape


# Dtype and shape travel in the root's call, so the others need no array of the right kind
# beforehand.
class Scatter:
    """A scatter of ``xs``, which counts on rank ``root`` of ``members`` alone."""

    def __init__(self, members: Membership, xs: Any, root: int, out: Any, async_op: bool) -> None:
        self._members, self._root, self._out, self._async = members, root, out, async_op
        self._here = members.rank == root
        self._xs = xs
        if self._here and xs is None:
            raise ValueError(
                f"scatter: rank {members.rank} is the root and must pass the arrays, got None"
            )

    def equal(self) -> Any:
        """Do it with equal parts; returns this rank's, or a Work."""
        whole = self._whole() if self._here else None
        if whole is not None and whole.ndim > _DIMENSIONS + 1:
            raise ValueError(
                f"scatter: a part has at most {_DIMENSIONS} dimensions, got shape "
                f"{whole.shape[1:]}; reshape it"
            )
        like = whole[0] if whole is not None else self._like_out()
        space = NO_OUTPUT if like is None else output("scatter", self._out, like, like.shape)
        call = Call(SCATTER, root=self._root, blocking=not self._async)
        if like is not None and code_of(like.dtype) == MOVED:
            return self._with_text(call, whole, like, space)
        call.array = None if whole is None else pack_apart(whole, space)
        call.out = space.packed
        return finish_into(self._members, call, self._members.run(call), space)

    def _with_text(self, call: Call, whole: Array | None, like: Array, space: Output) -> Any:
        """Send a dtype that has no number with each part, for ranks that pass no ``out``."""
        call.holds = like.dtype, like.shape
        call.out = room = np.empty_like(with_text(pack(like)))  # here the part arrives
        call.array = None if whole is None else np.stack([with_text(part) for part in whole])
        work = self._members.run(call)

        def read(_: Any) -> Any:
            part = of_bytes(room)
            if space.array is None:
                return part
            space.array[...] = part
            return space.given

        return read(None) if call.blocking else self._members.keep(Then(work, read))

    def _like_out(self) -> Array | None:
        return None if self._out is None else as_array("scatter", self._out, of_any_dtype=True)

    def _whole(self) -> Array:
        """Return what the root scatters as one array of shape (size, part's shape)."""
        xs, size = self._xs, self._members.size
        if not isinstance(xs, list | tuple):
            array = _given(xs)
            require_equal_parts("scatter", array, size)
            return pack(array).reshape(size, array.shape[0] // size, *array.shape[1:])
        if len(xs) != size:
            raise ValueError(f"scatter: one array for each of the {size} ranks, got {len(xs)}")
        arrays = [_given(x) for x in xs]
        first = arrays[0]
        for rank, array in enumerate(arrays):
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"scatter: all parts must be alike; that for rank 0 is {first.dtype} "
                    f"{first.shape}, that for rank {rank} {array.dtype} {array.shape}. Where only "
                    "first dimensions differ, pass rows= on every rank"
                )
        xp = array_module(first)
        room: Array = xp.empty((size, *first.shape), first.dtype)  # NumPy would close its holes
        return pack(xp.stack(arrays, out=room))

    def uneven(self, rows: Iterable[object]) -> Any:
        """Do it with ``rows[r]`` rows for rank r: the ranks agree on the kind, then move them."""
        array = None
        if self._here:
            array = _joined(self._xs)
            counts = check_rows("scatter", array, rows, self._members.size)
            lengths = [len(x) for x in self._xs] if isinstance(self._xs, list | tuple) else counts
            if lengths != counts:
                raise ValueError(
                    f"scatter: rows={counts}, and the parts have {lengths} rows; make them the same"
                )
        else:
            counts = each_rank("scatter", rows, self._members.size)
        like, space = array if array is not None else self._like_out(), NO_OUTPUT
        if like is not None:
            shape = (counts[self._members.rank], *like.shape[1:])
            space = output("scatter", self._out, like, shape)
        call = Call(SCATTER, root=self._root, out=like, blocking=not self._async)
        start = lambda: self._move(array, like, counts, space)  # noqa: E731
        work = self._members.journal.run([call], "scatter", start)
        return finish_into(self._members, call, work, space)

    def _move(
        self, array: Array | None, like: Array | None, counts: list[int], space: Output
    ) -> Work:
        kind, shape = self._agree(like, counts)
        if array is None:  # this rank has nothing to send
            library: Any = array_module(space.packed)
            array = library.empty((0, *shape), kind)
            counts = [0] * self._members.size
        sent = pack_apart(array, space)
        call = Call(ALL_TO_ALL, sent, rows=counts, out=space.packed, blocking=not self._async)
        return self._members.backend(sent).start(call)

    def _agree(self, like: Array | None, counts: list[int]) -> tuple[np.dtype[Any], list[int]]:
        """Return the dtype and the dimensions after the first of what the root passes.

        Raises:
            MismatchError: a rank passed other ``rows``, or another kind of ``out``; on every rank.
        """
        kind = None if like is None else [in_text(like.dtype), list(like.shape[1:])]
        members, root = self._members, self._root
        mine = json.dumps([counts, root, kind]).encode()
        texts = exchange_bytes(Steps(members.backend(), "scatter(rows=...)"), mine)
        calls = [json.loads(text) for text in texts]
        measure = calls[root]
        if any(call[:2] != measure[:2] or call[2] not in (None, measure[2]) for call in calls):
            where = f"[scatter] rank {members.rank} of {members.size}"
            words = [_in_words(*call) for call in calls]
            raise MismatchError(
                different_calls(where, "this call", enumerate(words), "Nothing was sent")
            )
        text, shape = measure[2]
        return of_text(text), shape


def _in_words(counts: list[int], root: int, kind: list[Any] | None) -> str:
    what = "" if kind is None else f"{name_of(of_text(kind[0]))} rows of {tuple(kind[1])}, "
    return f"scatter({what}rows={counts}, root={root})"


def _given(x: Any) -> Array:
    return as_array("scatter", x, writes=False, of_any_dtype=True)


def _joined(xs: Any) -> Array:
    """Return what the root scatters as one array."""
    if not isinstance(xs, list | tuple):
        return _given(xs)
    arrays = [_given(x) for x in xs]
    kinds = {(array.dtype, array.shape[1:], array.ndim > 0) for array in arrays}
    if len(kinds) != 1 or not arrays[0].ndim:
        got = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
        raise ValueError(f"scatter: with rows= only first dimensions may differ; got {got}")
    xp, shape = array_module(arrays[0]), (sum(map(len, arrays)), *arrays[0].shape[1:])
    joined: Array = xp.concatenate(arrays, out=xp.empty(shape, arrays[0].dtype))
    return joined
