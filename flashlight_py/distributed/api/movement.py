"""Verbs that move arrays between ranks without changing them."""

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from flashlight_py._native.codes import MOVED
from flashlight_py.device import Array, array_module, as_packed, is_cupy
from flashlight_py.distributed.api import verb_call
from flashlight_py.distributed.api.verb_call import Group, collective, native_entry, reject_together
from flashlight_py.distributed.backend import exchange_bytes
from flashlight_py.distributed.calls import arrays as call_arrays
from flashlight_py.distributed.calls.arrays import as_array, check_out_rows, encode_part
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import OverlapCheck, check_rank, check_rows, row_counts
from flashlight_py.distributed.calls.combining import split_rows, store_each
from flashlight_py.distributed.failures.wording import different_calls
from flashlight_py.distributed.groups.membership import Membership, members_of
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER, SCATTER
from flashlight_py.distributed.work import Then, Work
from flashlight_py.errors import MismatchError
from flashlight_py.kinds import user_result

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]

X = TypeVar("X")

_DIMENSIONS = 8  # maximum for ``scatter``, which sends the shape


@native_entry(BROADCAST)
def broadcast(x: X, root: int = 0, *, group: Group = None, async_op: bool = False) -> X | Work[X]:
    """Copy ``x`` of rank ``root`` to every rank, in place.

    Args:
        x: Array without Python objects, of the same shape and dtype on every rank; or a number.
        root: Rank in the group whose ``x`` is copied.
        group, async_op: As for :func:`all_reduce`.

    Returns:
        ``x``; the number of rank ``root`` if ``x`` is a number. With ``async_op``, a ``Work``.

    Raises:
        ValueError: If ``root`` is no rank of the group, or ``x`` is read-only.
        TypeError, DistributedError: As for :func:`all_reduce`.
    """
    return collective(group, BROADCAST, x, root=root, async_op=async_op)


@native_entry(ALL_GATHER)
def all_gather(
    x: Any, *, out: Any = None, group: Group = None, async_op: bool = False
) -> Array | list[Array] | Work[Array]:
    """Concatenate ``x`` of all ranks along the first dimension, in rank order.

    Args:
        x: Array, not changed. Only the first dimension may differ between ranks. An array without
            dimensions counts as one row. A list or tuple of arrays is also accepted: each array is
            gathered separately, and all are checked before the first one is sent.
        out: Array to fill, of the shape of the result. If ``x`` is a list, a list of arrays. If
            ``out`` overlaps ``x``, ``x`` is copied first.
        group, async_op: As for :func:`all_reduce`.

    Returns:
        ``out`` if it is passed, else a new array of the library of ``x``, with the shape ``(sum of
        first dimensions, *x.shape[1:])``. If ``x`` is a list, a list of arrays. With ``async_op``,
        a ``Work`` for this result.

    Raises:
        ValueError: If ``out`` has another shape or dtype. If only its first dimension is wrong, the
            error is raised after all ranks have called, and the other ranks have their result.
        TypeError, DistributedError: As for :func:`all_reduce`.
    """
    return collective(group, ALL_GATHER, x, out=out, async_op=async_op)


@native_entry(GATHER)
def gather(
    x: Any, root: int = 0, *, out: Any = None, group: Group = None, async_op: bool = False
) -> Array | Work[Array | None] | None:
    """Concatenate ``x`` of all ranks along the first dimension, in rank order, on one rank.

    Args:
        x: Array, as for :func:`all_gather`.
        root: Rank in the group that receives the result.
        out: On rank ``root``, array to fill, as for :func:`all_gather`. Ignored on other ranks.
        group, async_op: As for :func:`all_reduce`.

    Returns:
        On rank ``root``, the same as :func:`all_gather`. On other ranks, None. With ``async_op``, a
        ``Work`` for this result.

    Raises:
        ValueError: If ``root`` is no rank of the group, or ``out`` has a wrong shape or dtype.
        TypeError, DistributedError: As for :func:`all_reduce`.
    """
    return collective(group, GATHER, x, root=root, out=out, async_op=async_op)


@native_entry(SCATTER)
def scatter(
    xs: Any = None, root: int = 0, *, out: Any = None, rows: Sequence[int] | None = None,
    group: Group = None, async_op: bool = False,
) -> Array | Work[Array]:  # fmt: skip
    """Send each rank its part of the arrays of rank ``root``.

    The dtype and the shape are sent as well, so other ranks need not know them. For CuPy arrays,
    the other ranks must pass ``out``, a CuPy array, so that they use the same backend as ``root``.

    Args:
        xs: On rank ``root``: a list or tuple with one array per rank. All arrays have the same
            dtype and the same shape of at most eight dimensions. With ``rows``, only their first
            dimensions may differ. Or one array that is split along its first dimension. Other ranks
            may pass an array, which is not sent, to get a result of its library.
        root: Rank in the group that sends.
        out: Array to fill. If it overlaps ``xs``, ``xs`` is copied first.
        rows: Number of rows for each rank, if the parts are unequal. Every rank must pass the same
            numbers. The ranks compare them, so the call blocks until every rank has called.
        group, async_op: As for :func:`all_reduce`.

    Returns:
        ``out`` if it is passed, else the part of this rank as a new array of the library of ``xs``
        (NumPy if ``xs`` is None). With ``async_op``, a ``Work`` for this result.

    Raises:
        ValueError: If ``root`` is no rank of the group, ``xs`` of ``root`` cannot be split into
            these parts, or ``out`` of ``root`` has a wrong shape or dtype.
        MismatchError: If ``out`` of another rank has a wrong shape or dtype, or the ranks pass
            different ``rows``. Every rank raises it.
        TypeError, DistributedError: As for :func:`all_reduce`.
    """
    members = members_of(group)
    with reject_together(members, SCATTER, arrays=[xs, out]):
        root = check_rank(members.size, "scatter", "root", root)
        kind = xs[0] if isinstance(xs, list | tuple) and xs else xs
        if members.rank != root:
            xs = None
        elif xs is None:
            raise ValueError(f"scatter: expected xs on the root, rank {root}, got None")
        call = Call(SCATTER, root=root, blocking=not async_op)
        counts = None if rows is None else row_counts("scatter", rows, members.size)
        if xs is not None:
            call.array = _concatenate_parts(xs, members.size, counts)
        elif out is not None:
            call.out = as_array("scatter", out, of_any_dtype=True, mutable=True)
        if counts is None:
            return _scatter_equal(members, call, out, kind)
        return _scatter_rows(members, call, out, kind, counts)


@native_entry(ALL_TO_ALL)
def all_to_all(
    x: Any, *, out: Any = None, rows: Sequence[int] | None = None, return_rows: bool = False,
    group: Group = None, async_op: bool = False,
) -> Array | tuple[Array, list[int]] | Work[Array]:  # fmt: skip
    """Send each rank a part of ``x``, and concatenate the received parts in rank order.

    Args:
        x: Array, not changed. Its first dimension is split into equal parts, one per rank. Shape
            and dtype must be equal on every rank. With ``rows``, the first dimension may differ.
            Every rank may instead pass a list with one NumPy array per rank, of any shapes and
            dtypes, without ``rows`` and ``return_rows``.
        out: Array to fill, as for :func:`all_gather`. If ``x`` is a list, a list of arrays.
        rows: Number of rows for each rank, if the parts are unequal. Either all ranks pass it or no
            rank does. The numbers may differ between ranks. The ranks exchange ``rows`` first, so
            the call blocks until every rank has called, even with ``async_op``.
        return_rows: True to also return the number of rows received from each rank.
        group, async_op: As for :func:`all_reduce`.

    Returns:
        ``out`` if it is passed, else a new array of the library of ``x``. If ``x`` is a list, a
        list of arrays, one from each rank. With ``return_rows``, a pair of the array and the list
        of received rows. With ``async_op``, a ``Work`` for this result.

    Raises:
        ValueError: If the first dimension cannot be split, ``rows`` is not one integer per rank, or
            ``out`` has a wrong shape or dtype. If ``out`` is wrong only because of the parts of
            other ranks, the error is raised after all ranks have called, and the other ranks have
            their result.
        TypeError, DistributedError: As for :func:`all_reduce`.

    Example:
        >>> fl.all_to_all(np.arange(3))  # one process: its own part
        array([0, 1, 2])
    """
    if rows is not None and not return_rows:
        members = members_of(group)
        y = members.fast.collective(ALL_TO_ALL.code, x, out, rows, 1.0, 0, 0, async_op)
        if y is not NotImplemented:
            if y is not out is not None:
                check_out_rows(ALL_TO_ALL.name, out, y.shape[0], members.rank, members.size)
            return y
    if isinstance(x, list | tuple):
        return _blocks_to_all(members_of(group), x, out, async_op, rows is not None or return_rows)
    received: list[int] = []
    options: dict[str, Any] = {"rows": rows, "out": out, "async_op": async_op}
    result = collective(group, ALL_TO_ALL, x, **options, received=received)
    if not return_rows:
        return result

    def with_rows(array: Array) -> tuple[Array, list[int]]:
        size = members_of(group).size
        return array, received or [array.shape[0] // size] * size

    return Then(result, with_rows) if async_op else with_rows(result)


def _blocks_to_all(members: Membership, xs: Any, outs: Any, async_op: bool, has_rows: bool) -> Any:
    """Send ``xs[r]`` to rank r as bytes, with its dtype and shape at the end."""
    verb, rank = ALL_TO_ALL.name, members.rank

    def check(index: int, block: Array, outcome: str = "") -> None:
        room = rooms[index]
        if (room.dtype.newbyteorder("="), room.shape) != (block.dtype, block.shape):
            raise ValueError(
                f"[{verb}] rank {rank} of {members.size}: out[{index}] must be {block.dtype} "
                f"{block.shape}, as rank {index} sends, got {room.dtype} {room.shape}{outcome}"
            )

    with reject_together(members, ALL_TO_ALL, arrays=xs):
        if has_rows:
            raise ValueError(f"{verb}: rows and return_rows must be omitted if x is a list")
        for name, value in (("x", xs), ("out", outs if outs is not None else xs)):
            if not isinstance(value, list | tuple) or len(value) != members.size:
                raise ValueError(
                    f"{verb}: {name} must be a list of {members.size} arrays, one for each rank, "
                    f"got {type(value).__name__} of {len(value)}"
                )
        if any(map(is_cupy, xs)):
            raise TypeError(
                f"{verb}: a list must contain NumPy arrays, got CuPy arrays. Concatenate them, and "
                "pass rows=."
            )
        overlap = OverlapCheck(verb, members.size)
        rooms = [as_array(verb, out, of_any_dtype=True, mutable=True) for out in outs or ()]
        for room in rooms:
            overlap.add(room)
        arrays = [as_array(verb, x, writes=False, of_any_dtype=True) for x in xs]
        blocks = [encode_part(as_packed(array)).view(call_arrays.ENCODED_PART) for array in arrays]
        if rooms:  # only the block of this rank is known before the exchange
            check(rank, call_arrays.decode_part(blocks[rank].view(np.uint8)))
        received: list[int] = []
        options: dict[str, Any] = {"rows": [block.size for block in blocks], "received": received}
        work = collective(members, ALL_TO_ALL, np.concatenate(blocks), **options, async_op=async_op)

    def results(joined: Array) -> list[Any]:
        packed = split_rows(joined, received or options["rows"])
        parts = [call_arrays.decode_part(part.view(np.uint8)) for part in packed]
        if outs is None:
            return [user_result(xs[0], part.copy(), False) for part in parts]
        for index, block in enumerate(parts):
            check(index, block, "; the other ranks have their results")
        store_each(rooms, parts)
        return [user_result(out, room, True) for out, room in zip(outs, rooms, strict=True)]

    return members.keep(Then(work, results)) if async_op else results(work)


# The root sends dtype and shape with the data, so other ranks need no array.
def _scatter_equal(members: Membership, call: Call, out: Any, kind: Any) -> Any:
    parts = call.array
    if parts is not None and parts.ndim > _DIMENSIONS + 1:
        raise ValueError(
            f"scatter: a part must have at most {_DIMENSIONS} dimensions, got shape "
            f"{parts.shape[1:]}. Reshape the array."
        )
    # parts[0] would be a scalar if the parts have no dimensions.
    like = call.out if parts is None else parts[0, ...]
    shape, back = () if like is None else like.shape, None
    space = verb_call.prepare_output("scatter", out, like, shape, kind)
    if like is not None and call_arrays.native_code(like.dtype) == MOVED:
        # Ranks without ``out`` need dtype and shape, so each part contains them as text.
        call.holds = like.dtype, like.shape
        call.out = room = np.empty_like(encode_part(as_packed(like)))
        if parts is not None:
            call.array = np.stack([encode_part(parts[i, ...]) for i in range(len(parts))])
        space, back = space._replace(packed=room), call_arrays.decode_part
    else:
        call.array = None if parts is None else verb_call.pack_input(parts, space)
        call.out = space.packed
    return verb_call.finish(members, call, members.run(call), space, back)


def _scatter_rows(members: Membership, call: Call, out: Any, kind: Any, counts: list[int]) -> Any:
    array, call.array = call.array, None
    call.out = like = call.out if array is None else array
    shape = () if like is None else (counts[members.rank], *like.shape[1:])
    space = verb_call.prepare_output("scatter", out, like, shape, kind)

    def move() -> Work:
        kind, shape = _agree(members, call, counts)
        step = Call(ALL_TO_ALL, rows=counts, out=space.packed, blocking=call.blocking)
        if array is None:  # this rank sends nothing
            library: Any = array_module(space.packed)
            step.array, step.rows = library.empty((0, *shape), kind), [0] * members.size
        else:
            step.array = verb_call.pack_input(array, space)
        return members.backend(step.array).start(step)

    return verb_call.finish(members, call, members.journal.run([call], "scatter", move), space)


def _agree(members: Membership, call: Call, counts: list[int]) -> tuple[Any, tuple[int, ...]]:
    """Compare the arguments of all ranks. Return dtype and ``shape[1:]`` of the root's array."""
    like, root = call.out, call.root
    kind = None if like is None else (call_arrays.dtype_text(like.dtype), like.shape[1:])
    own_call = pickle.dumps((counts, root, kind))
    texts = exchange_bytes(members.backend(), own_call, "scatter(rows=...)")
    calls = list(map(pickle.loads, texts))
    expected = calls[root]
    if any(call[:2] != expected[:2] or call[2] not in (None, expected[2]) for call in calls):
        prefix = f"[scatter] rank {members.rank} of {members.size}"
        words = []
        for rows, rank, held in calls:
            name = held and call_arrays.dtype_name(call_arrays.dtype_from_text(held[0]))
            about = f"{name} rows of {held[1]}, " if held else ""
            words.append(f"scatter({about}rows={rows}, root={rank})")
        raise MismatchError(different_calls(prefix, enumerate(words), 0, which="this call"))
    dtype, shape = expected[2]
    return call_arrays.dtype_from_text(dtype), shape


def _concatenate_parts(xs: Any, size: int, counts: list[int] | None) -> Array:
    """Return the root's arrays as one array: stacked if ``counts`` is None, else concatenated."""
    if not isinstance(xs, list | tuple):
        array = as_array("scatter", xs, False, of_any_dtype=True)
        if check_rows("scatter", array, counts, size) is not None:
            return array
        return as_packed(array).reshape(size, array.shape[0] // size, *array.shape[1:])
    arrays = [as_array("scatter", x, False, of_any_dtype=True) for x in xs]
    if len(xs) != size:
        raise ValueError(f"scatter: xs must have {size} arrays, one for each rank, got {len(xs)}")
    first, free = arrays[0], counts is not None  # ``free``: first dimensions may differ
    for rank, array in enumerate(arrays):
        is_alike = array.ndim >= free and array.shape[free:] == first.shape[free:]
        if not is_alike or array.dtype != first.dtype:
            raise ValueError(
                "scatter: all parts must have one dtype and shape, got "
                f"{first.dtype} {first.shape} for rank 0 and {array.dtype} {array.shape} for rank "
                f"{rank}. Pass rows= on every rank if only the first dimensions differ."
            )
    if counts is None:
        arrays = [array[None] for array in arrays]
    elif (lengths := list(map(len, arrays))) != counts:
        raise ValueError(
            f"scatter: rows must be {lengths}, the lengths of the arrays of the root, got {counts}"
        )
    xp, shape = array_module(first), (sum(map(len, arrays)), *arrays[0].shape[1:])
    room: Array = xp.empty(shape, first.dtype)  # concatenate alone would drop padding of the dtype
    return as_packed(xp.concatenate(arrays, out=room))
