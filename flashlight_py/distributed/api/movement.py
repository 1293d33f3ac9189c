"""The movements: arrays go from rank to rank as they are."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from flashlight_py._native.codes import MOVED
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.api.verb_call import (
    Group,
    collective,
    finish,
    native,
    output,
    pack_apart,
    refusing,
)
from flashlight_py.distributed.backends.exchange import exchange_bytes
from flashlight_py.distributed.calls.arrays import (
    WITH_TEXT,
    as_array,
    code_of,
    in_text,
    name_of,
    of_bytes,
    of_text,
    pack,
    require_length,
    with_text,
)
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import Apart, check_rank, check_rows, each_rank
from flashlight_py.distributed.calls.combining import cut
from flashlight_py.distributed.calls.kinds import returned
from flashlight_py.distributed.failures.wording import different_calls
from flashlight_py.distributed.groups.membership import Membership, of
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER, SCATTER
from flashlight_py.distributed.work import Then, Work
from flashlight_py.errors import MismatchError

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]

X = TypeVar("X")

_DIMENSIONS = 8  # that travel with a scatter, so that ranks need not know the shape


@native(BROADCAST)
def broadcast(x: X, root: int = 0, *, group: Group = None, async_op: bool = False) -> X | Work[X]:
    """Send every rank the ``x`` of rank ``root``, in place.

    Args:
        x: array of any dtype without objects; the same shape and dtype on every rank. Or a number.
        root: rank in the group.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        ``x``, or the root's number; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or ``x`` is read-only.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    return collective(group, BROADCAST, x, root=root, async_op=async_op)


@native(ALL_GATHER)
def all_gather(
    x: Any, *, out: Any = None, group: Group = None, async_op: bool = False
) -> Array | list[Array] | Work[Array]:
    """Join the ``x`` of all ranks along the first dimension, in rank order.

    Args:
        x: array, left as it is; the first dimension may differ between ranks, the others and the
            dtype must not. A scalar-shaped array counts as one row. Or a list or tuple of arrays
            of any shapes and dtypes, in the same order on every rank, all checked before any is
            sent.
        out: array of the result's shape that is filled instead of a new one, which saves the
            allocation of large results; a list of them for a list. It may share memory with ``x``,
            which is copied then.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        A new array of the kind of ``x``, of shape ``(sum of first dimensions, *x.shape[1:])``, or
        ``out``; for a list a list of them; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``out`` has another shape or dtype. If only its first dimension is wrong, this
            is raised after all ranks have called, and the other ranks have their result.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    return collective(group, ALL_GATHER, x, out=out, async_op=async_op)


@native(GATHER)
def gather(
    x: Any, root: int = 0, *, out: Any = None, group: Group = None, async_op: bool = False
) -> Array | Work[Array | None] | None:
    """Join the ``x`` of all ranks along the first dimension, in rank order, on one rank.

    Args:
        x: array, as for :func:`all_gather`.
        root: rank in the group that gets the result.
        out: on ``root``, array that is filled, as for :func:`all_gather`; ignored elsewhere.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        On ``root`` a new array, as of :func:`all_gather`, or ``out``; elsewhere None; or the
        ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or ``out`` does not fit.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    return collective(group, GATHER, x, root=root, out=out, async_op=async_op)


@native(SCATTER)
def scatter(
    xs: Any = None,
    root: int = 0,
    *,
    out: Any = None,
    rows: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Array | Work[Array]:
    """Send each rank its part of what rank ``root`` has.

    Dtype and shape travel along, so the other ranks need not know them. For CuPy arrays the other
    ranks pass ``out``, which shows that a GPU is meant.

    Args:
        xs: on ``root`` a list or tuple with one array per rank, all of one shape (at most eight
            dimensions) and dtype, or one array whose first dimension is cut into equal parts; with
            ``rows`` first dimensions may differ. On the other ranks only its kind counts.
        root: rank in the group.
        out: array that is filled instead of a new one. It may share memory with what the root
            passes, which is copied then.
        rows: number of rows of the first dimension for each rank, if the parts are unequal; the
            same on every rank. The ranks compare them first, so that the call blocks until every
            rank has called, also with ``async_op``.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        This rank's part, a new array of the kind of ``xs`` (of NumPy for None), or ``out``; or the
        ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``root`` is no rank of the group, or what it passes cannot be cut so, or does
            not fit its own ``out``.
        MismatchError: ``out`` of a rank is of another shape or dtype than the parts, or ranks
            passed different ``rows``; raised on every rank.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    members = of(group)
    with refusing(members, SCATTER, given=[xs, out]):
        root = check_rank(members.size, "scatter", "root", root)
        kind = xs[0] if isinstance(xs, list | tuple) and xs else xs
        if members.rank != root:
            xs = None
        elif xs is None:
            raise ValueError(f"scatter: rank {root} is the root and must pass the arrays, got None")
        call = Call(SCATTER, root=root, blocking=not async_op)
        if rows is None:
            return _scatter_equal(members, call, xs, out, kind)
        return _scatter_rows(members, call, xs, out, kind, rows)


@native(ALL_TO_ALL)
def all_to_all(
    x: Any,
    *,
    out: Any = None,
    rows: Sequence[int] | None = None,
    return_rows: bool = False,
    group: Group = None,
    async_op: bool = False,
) -> Array | tuple[Array, list[int]] | Work[Array]:
    """Send each rank a part of ``x``, and join what all ranks send here, in rank order.

    Args:
        x: array whose first dimension is cut into equal parts, one per rank; left as it is. Shape
            and dtype must be the same on every rank; with ``rows`` the first dimension may differ.
            Or on every rank a list with a NumPy array for each rank, of any shapes and dtypes;
            without ``rows`` and ``return_rows``.
        out: array that is filled, as for :func:`all_gather`; a list of them for a list.
        rows: number of rows for each rank, if the parts are unequal. All ranks pass it or none
            does; the numbers may differ. The ranks exchange them first, so that the call blocks
            until every rank has called, also with ``async_op``.
        return_rows: also return how many rows each rank has sent here. Ranks may differ in it.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        A new array of the kind of ``x``, of its shape if parts are equal, or ``out``; for a list
        new arrays, one from each rank, or ``out``; with ``return_rows`` a pair of it and the list
        of rows that each rank sent; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: the first dimension cannot be cut so, ``rows`` is not one integer for each rank,
            or ``out`` does not fit. If only what other ranks send does not fit, this is raised
            after all ranks have called, and the other ranks have their result.
        TypeError, DistributedError: as for :func:`all_reduce`.

    Example:
        >>> fl.all_to_all(np.arange(3))  # one process: its own part
        array([0, 1, 2])
    """
    if rows is not None and not return_rows:
        members = of(group)
        y = members.fast.collective(ALL_TO_ALL.code, x, out, rows, 1.0, 0, 0, async_op)
        if y is not NotImplemented:
            if y is not out is not None:
                require_length(ALL_TO_ALL.name, out, y.shape[0], members.rank, members.size)
            return y
    if isinstance(x, list | tuple):
        return _blocks_to_all(of(group), x, out, async_op, rows is not None or return_rows)
    received: list[int] = []
    how: dict[str, Any] = {"rows": rows, "out": out, "async_op": async_op}
    result = collective(group, ALL_TO_ALL, x, **how, received=received)
    if not return_rows:
        return result

    def with_rows(got: Array) -> tuple[Array, list[int]]:
        size = of(group).size
        return got, received or [got.shape[0] // size] * size

    return Then(result, with_rows) if async_op else with_rows(result)


def _blocks_to_all(
    members: Membership, xs: Sequence[Any], outs: Any, async_op: bool, has_rows: bool
) -> Any:
    """Send rank r the r-th of ``xs``: as bytes, and behind them the dtype and the shape."""
    verb, rank = ALL_TO_ALL.name, members.rank

    def check(place: int, block: Array, outcome: str = "") -> None:
        room = rooms[place]
        if (room.dtype.newbyteorder("="), room.shape) != (block.dtype, block.shape):
            raise ValueError(
                f"[{verb}] rank {rank} of {members.size}: out[{place}] is {room.dtype} "
                f"{room.shape}, and rank {place} sends {block.dtype} {block.shape}{outcome}"
            )

    with refusing(members, ALL_TO_ALL, given=xs):
        for name, given in (("x", xs), ("out", outs if outs is not None else xs)):
            if has_rows or not isinstance(given, list | tuple) or len(given) != members.size:
                raise ValueError(
                    f"{verb}: expected, in a list {name}, {members.size} arrays, one for each "
                    f"rank, without rows, return_rows; got {type(given).__name__} of {len(given)}"
                )
        if any(map(is_cupy, xs)):
            raise TypeError(f"{verb}: a list has NumPy arrays; join CuPy arrays and pass rows=")
        apart = Apart(verb, members.size)
        rooms = [as_array(verb, out, of_any_dtype=True, anew=True) for out in outs or ()]
        for room in rooms:
            apart.add(room)
        arrays = [as_array(verb, x, writes=False, of_any_dtype=True) for x in xs]
        blocks = [with_text(pack(array)).view(WITH_TEXT) for array in arrays]
        if rooms:  # the only block that is known here before any is sent
            check(rank, of_bytes(blocks[rank].view(np.uint8)))
        received: list[int] = []
        how: dict[str, Any] = {"rows": [block.size for block in blocks], "received": received}
        work = collective(members, ALL_TO_ALL, np.concatenate(blocks), **how, async_op=async_op)

    def results(whole: Array) -> list[Any]:
        found = [of_bytes(each.view(np.uint8)) for each in cut(whole, received or how["rows"])]
        if outs is None:
            return [returned(xs[0], each.copy(), False) for each in found]
        for place, each in enumerate(found):
            check(place, each, "; the other ranks have their results")
        for room, each in zip(rooms, found, strict=True):
            room[...] = each
        return [returned(out, room, True) for out, room in zip(outs, rooms, strict=True)]

    return members.keep(Then(work, results)) if async_op else results(work)


# Dtype and shape travel in the root's call, so the others need no array of the right kind
# beforehand.
def _scatter_equal(members: Membership, call: Call, xs: Any, out: Any, kind: Any) -> Any:
    """Scatter ``xs``, None on other ranks than the root, in equal parts; returns one of a kind."""
    whole = None if xs is None else _whole(xs, members.size)
    if whole is not None and whole.ndim > _DIMENSIONS + 1:
        raise ValueError(
            f"scatter: a part has at most {_DIMENSIONS} dimensions, got shape {whole.shape[1:]}; "
            "reshape it"
        )
    # Not whole[0], which is no array if that has no dimension.
    like = _array_of(out) if whole is None else whole[0, ...]
    space = output("scatter", out, like, () if like is None else like.shape, kind)
    if like is not None and code_of(like.dtype) == MOVED:
        # It goes with each part, in text, for ranks that pass no ``out``.
        call.holds = like.dtype, like.shape
        call.out = room = np.empty_like(with_text(pack(like)))
        call.array = (
            None
            if whole is None
            else np.stack([with_text(whole[i, ...]) for i in range(len(whole))])
        )
        return finish(members, call, members.run(call), space._replace(packed=room), of_bytes)
    call.array = None if whole is None else pack_apart(whole, space)
    call.out = space.packed
    return finish(members, call, members.run(call), space)


def _scatter_rows(
    members: Membership, call: Call, xs: Any, out: Any, kind: Any, rows: Iterable[object]
) -> Any:
    """Scatter ``rows[r]`` rows to rank r: the ranks agree on the kind, then move them."""
    counts = each_rank("scatter", rows, members.size)
    array = None if xs is None else _whole(xs, members.size, counts)
    like = array if array is not None else _array_of(out)
    shape = () if like is None else (counts[members.rank], *like.shape[1:])
    space = output("scatter", out, like, shape, kind)
    call.out = like

    def move() -> Work:
        kind, shape = _agree(members, call, counts)
        step = Call(ALL_TO_ALL, rows=counts, out=space.packed, blocking=call.blocking)
        if array is None:  # this rank has nothing to send
            library: Any = array_module(space.packed)
            step.array, step.rows = library.empty((0, *shape), kind), [0] * members.size
        else:
            step.array = pack_apart(array, space)
        return members.backend(step.array).start(step)

    return finish(members, call, members.journal.run([call], "scatter", move), space)


def _agree(
    members: Membership, call: Call, counts: list[int]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and the dimensions after the first of what the root passes.

    On every rank MismatchError where one passed other ``rows``, or another kind of ``out``.
    """
    like, root = call.out, call.root
    kind = None if like is None else (in_text(like.dtype), like.shape[1:])
    mine = pickle.dumps((counts, root, kind))
    texts = exchange_bytes(members.backend(), mine, "scatter(rows=...)")
    calls = list(map(pickle.loads, texts))
    measure = calls[root]
    if any(each[:2] != measure[:2] or each[2] not in (None, measure[2]) for each in calls):
        where = f"[scatter] rank {members.rank} of {members.size}"
        words = [_in_words(*each) for each in calls]
        raise MismatchError(different_calls(where, enumerate(words), 0, which="this call"))
    dtype, shape = measure[2]
    return of_text(dtype), shape


def _in_words(counts: list[int], root: int, kind: tuple[str, tuple[int, ...]] | None) -> str:
    what = "" if kind is None else f"{name_of(of_text(kind[0]))} rows of {kind[1]}, "
    return f"scatter({what}rows={counts}, root={root})"


def _array_of(out: Any) -> Array | None:
    return None if out is None else as_array("scatter", out, of_any_dtype=True, anew=True)


def _whole(xs: Any, size: int, counts: list[int] | None = None) -> Array:
    """Return what the root scatters as one array; of shape (size, part's shape) in equal parts."""
    is_list = isinstance(xs, list | tuple)
    arrays = [as_array("scatter", x, False, of_any_dtype=True) for x in (xs if is_list else [xs])]
    if not is_list:
        array = arrays[0]
        if check_rows("scatter", array, counts, size) is not None:
            return array
        return pack(array).reshape(size, array.shape[0] // size, *array.shape[1:])
    if len(xs) != size:
        raise ValueError(f"scatter: one array for each of the {size} ranks, got {len(xs)}")
    first, free = arrays[0], counts is not None  # whether first dimensions may differ
    for rank, array in enumerate(arrays):
        is_alike = array.ndim >= free and array.shape[free:] == first.shape[free:]
        if not is_alike or array.dtype != first.dtype:
            raise ValueError(
                f"scatter: all parts must be alike; that for rank 0 is {first.dtype} "
                f"{first.shape}, that for rank {rank} {array.dtype} {array.shape}. Only first "
                "dimensions may differ, with rows= on every rank"
            )
    if counts is None:
        arrays = [array[None] for array in arrays]
    elif (lengths := list(map(len, arrays))) != counts:
        raise ValueError(
            f"scatter: rows={counts}, and the parts have {lengths} rows, {sum(lengths)} in all; "
            "make them the same"
        )
    xp, shape = array_module(first), (sum(map(len, arrays)), *arrays[0].shape[1:])
    room: Array = xp.empty(shape, first.dtype)  # NumPy would close its holes
    return pack(xp.concatenate(arrays, out=room))
