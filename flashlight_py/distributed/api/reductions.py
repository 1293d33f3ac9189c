"""Reductions: verbs that combine the arrays of all ranks."""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from flashlight_py.device import Array, array_module, as_packed, is_cupy
from flashlight_py.distributed import verbs
from flashlight_py.distributed.api import verb_call
from flashlight_py.distributed.api.verb_call import Group, collective, native_entry, reject_together
from flashlight_py.distributed.calls.arrays import as_array, identity_of, pack_terms, parse_op
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import NUMBERS, OverlapCheck, as_number
from flashlight_py.distributed.calls.combining import store_each, views
from flashlight_py.distributed.constants import Op, ReduceOp
from flashlight_py.distributed.groups.membership import Membership, members_of
from flashlight_py.distributed.work import AllOf, Done, Then, Work
from flashlight_py.kinds import user_result

__all__ = ["all_reduce", "reduce", "reduce_scatter", "scan", "exscan"]
__all__ += ["all_reduce_location", "all_reduce_multiple"]

X = TypeVar("X")


@native_entry(verbs.ALL_REDUCE, out=None)
def all_reduce(
    x: X, scale: float = 1.0, *, op: Op = "sum", out: X | None = None, group: Group = None,
    async_op: bool = False,
) -> X | Work[X]:  # fmt: skip
    """Combine ``x`` of all ranks, and multiply by ``scale``. Every rank gets the result.

    In place, for any shape and memory layout. Every rank must pass the same shape and dtype. Values
    are combined in rank order, so the result has the same bits on every rank and in every run.
    float16 and bfloat16 are summed in float32 and rounded once (docs/algorithms.md).

    Args:
        x: Array of integer, float or complex dtype, of bool (min, max, and, or, xor), or of dates
            (min, max). Or a number of the same type on every rank: bool, int (64 bits), float,
            complex or a NumPy scalar.
        scale: Real factor for the result: a whole number for integer arrays, and 1 for bitwise and
            logical operations.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"``, ``"max"``; ``"and"``, ``"or"``, ``"xor"``:
            bitwise, for integers and bool; ``"land"``, ``"lor"``, ``"lxor"``: logical, with the
            result 1 or 0 in the dtype of ``x`` (nonzero is true). Upper case and equivalent NumPy
            functions such as ``np.add`` and ``np.maximum`` are accepted.
        out: Array for the result, of the shape and dtype of ``x``. ``x`` is then not changed and
            may be read-only, such as arrays of pandas and Arrow. If the call fails, ``out``
            contains a copy of ``x``.
        group: The process group. Default: the world.
        async_op: True to return a ``Work`` without waiting. Its ``wait()`` returns the result.
            False to block. Other Python threads run meanwhile.

    Returns:
        ``out`` if it is passed, else ``x``. If ``x`` is a number, the combined number. JAX arrays
        are immutable, so if ``x`` is a JAX array, every verb returns a new array.

    Raises:
        OverflowError: If ``x`` is a Python int and the result could exceed 64 bits.
        TypeError: If ``x`` is no array, or its dtype cannot be sent or does not support ``op``.
        ValueError: If ``x`` is read-only, or ``op`` or ``scale`` is invalid.
        MismatchError: If the ranks pass different shapes, dtypes, ops or scales, make different
            calls, or a rank rejects its arguments. Every rank raises it, and no array has changed.
        PeerLostError: If a rank exits or dies.
        CollectiveTimeoutError: If a rank does not call within the timeout of the group.
        GroupClosedError: If the group was closed, or failed earlier.
        BackendUnavailableError: If no backend moves arrays of this kind.

    Example:
        >>> x = np.full((3, 3), 2.0)
        >>> fl.all_reduce(x, scale=0.5) is x  # one process: only the scale shows
        True
        >>> float(x[0, 0])
        1.0
        >>> fl.all_reduce(3.5, op="max")
        3.5
    """
    if out is not None:
        with reject_together(members_of(group), verbs.ALL_REDUCE, arrays=(x, out)):
            array = as_array("all_reduce", x, writes=False, of_any_dtype=True)
            as_array("all_reduce(out=)", out, of_any_dtype=True)
            target: Any = verb_call.prepare_output("all_reduce", out, array, array.shape, x).array
            target[...] = array
        return all_reduce(out, scale, op=op, group=group, async_op=async_op)
    return collective(group, verbs.ALL_REDUCE, x, scale=scale, op=op, async_op=async_op)


@native_entry(verbs.REDUCE)
def reduce(
    x: X, root: int = 0, *, op: Op = "sum", scale: float = 1.0, group: Group = None,
    async_op: bool = False,
) -> X | Work[X]:  # fmt: skip
    """Combine ``x`` of all ranks, and multiply by ``scale``. Only rank ``root`` gets the result.

    In place on ``root``. The arrays of other ranks do not change. The result has the same bits as
    the result of :func:`all_reduce`.

    Args:
        x: Array with the same shape and dtype on every rank; or a number.
        root: Rank in the group.
        op, scale, group, async_op: As for :func:`all_reduce`.

    Returns:
        ``x``. If ``x`` is a number, rank ``root`` gets the combined number. With ``async_op``, a
        ``Work``.

    Raises:
        ValueError: If ``root`` is no rank of the group, or as for :func:`all_reduce`.
        TypeError, DistributedError: As for :func:`all_reduce`.
    """
    return collective(group, verbs.REDUCE, x, root=root, op=op, scale=scale, async_op=async_op)


@native_entry(verbs.REDUCE_SCATTER)
def reduce_scatter(
    x: Any, *, op: Op = "sum", scale: float = 1.0, out: Any = None,
    rows: Sequence[int] | None = None, group: Group = None, async_op: bool = False,
) -> Array | list[Array] | Work[Array]:  # fmt: skip
    """Combine ``x`` of all ranks, and return the part of the result for this rank.

    Args:
        x: Array, not changed. Its first dimension is a multiple of the number of ranks, or the sum
            of ``rows``. A list or tuple of such arrays is also accepted: each array is reduced
            separately, and all are checked before the first one is sent.
        op, scale, group, async_op: As for :func:`all_reduce`.
        out: Array to fill, of the shape of the part of this rank. If ``x`` is a list, a list of
            arrays. If ``out`` shares memory with ``x``, ``x`` is copied first.
        rows: Number of rows for each rank, if the parts are unequal; the same on every rank.

    Returns:
        ``out`` if it is passed, else a new array of the library of ``x``, with the shape
        ``(x.shape[0] // size, *x.shape[1:])``, or with ``rows``, ``(rows[rank], *x.shape[1:])``. If
        ``x`` is a list, a list of arrays. With ``async_op``, a ``Work`` for this result.

    Raises:
        ValueError: If ``x`` cannot be split, ``out`` has a wrong shape or dtype, or as for
            :func:`all_reduce`.
        MismatchError: If the ranks pass different ``rows``, or as for :func:`all_reduce`.
        TypeError, DistributedError: As for :func:`all_reduce`.
    """
    options: dict[str, Any] = {"scale": scale, "op": op, "rows": rows, "out": out}
    return collective(group, verbs.REDUCE_SCATTER, x, **options, async_op=async_op)


@native_entry(verbs.SCAN)
def scan(
    x: X, *, op: Op = "sum", scale: float = 1.0, group: Group = None, async_op: bool = False
) -> X | Work[X]:
    """Combine ``x`` of the ranks 0 to r, and store the result on rank r: a prefix reduction.

    In place, in rank order. Each result is multiplied by ``scale``, and has the same bits in every
    run.

    Args:
        x: Array with the same shape and dtype on every rank; or a number.
        op: As for :func:`all_reduce`. ``"avg"`` divides the sum by r + 1, the number of terms.
        scale, group, async_op: As for :func:`all_reduce`.

    Returns:
        ``x``. If ``x`` is a number, the combined number. With ``async_op``, a ``Work`` for this
        result.

    Raises:
        TypeError, ValueError, OverflowError, DistributedError: As for :func:`all_reduce`.

    Example:
        >>> fl.scan(np.array([1.0, 2.0]))  # one process
        array([1., 2.])
    """
    return collective(group, verbs.SCAN, x, op=op, scale=scale, async_op=async_op)


def exscan(
    x: X, *, op: Op = "sum", scale: float = 1.0, group: Group = None, async_op: bool = False
) -> X | Work[X]:
    """Combine ``x`` of the ranks 0 to r - 1, and store the result on rank r.

    Like :func:`scan`, but without ``x`` of rank r itself. ``"avg"`` divides by r. Rank 0 receives
    the identity of ``op``: 0 for ``"sum"``, 1 for ``"prod"``, False for ``"or"``, the largest value
    of the dtype for ``"min"``. An average and dates have no identity: ``x`` of rank 0 then stays
    unchanged. Arguments, results and errors are the same as for :func:`scan`.
    """
    members = members_of(group)
    y = members.fast.collective(verbs.EXSCAN.code, x, None, op, scale, 0, 0, async_op)
    if y is NotImplemented:
        y = collective(members, verbs.EXSCAN, x, op=op, scale=scale, async_op=async_op)
    if members.rank != 0:
        return y
    fill = partial(_filled_with_identity, parse_op("exscan", op))
    return members.keep(Then(y, fill)) if async_op else fill(y)


def _filled_with_identity(op: ReduceOp, x: Any) -> Any:
    is_number = isinstance(x, NUMBERS)
    array = np.asarray(x) if is_number else as_array("exscan", x, of_any_dtype=True, mutable=True)
    if (value := identity_of(op, array.dtype)) is None:
        return x
    if is_number:
        return type(x)(value)
    array[...] = value
    return user_result(x, array, True)


def all_reduce_location(
    x: Any, *, op: Literal["min", "max"] = "min", group: Group = None, async_op: bool = False
) -> Any:
    """Return the minimum or maximum of each element over the ranks, and the rank that has it.

    Like MINLOC and MAXLOC of MPI. Use it for small arrays: every rank receives ``x`` of all ranks.

    Args:
        x: Array, not changed, of integer, float, date or bool dtype, of the same shape and dtype on
            every rank. Or a number.
        op: ``"min"`` or ``"max"``. If an element is NaN or NaT on a rank, the result is NaN or NaT.
        group, async_op: As for :func:`all_reduce`.

    Returns:
        A pair of new arrays like ``x``: the values, and the ranks (int64). If several ranks have
            the same value, the lowest of these ranks is returned. If ``x`` is a number, a pair of
            the number and the rank. With ``async_op``, a ``Work`` for this result.

    Raises:
        ValueError: If ``op`` has another value.
        OverflowError, TypeError, DistributedError: As for :func:`all_reduce`.

    Example:
        >>> values, ranks = fl.all_reduce_location(np.array([3.0, 1.0]))  # one process
        >>> values.tolist(), ranks.tolist()
        ([3.0, 1.0], [0, 0])
    """
    verb, members = "all_reduce_location", members_of(group)
    with reject_together(members, verb, arrays=[x]):
        if is_number := isinstance(x, NUMBERS):
            array, number = as_number(verb, x)
        else:
            array = as_array(verb, x, writes=False, of_any_dtype=True)
        kind, _ = verb_call.resolve_reduction(verb, array.dtype, op, 1.0, members.size)
        if kind not in (ReduceOp.MIN, ReduceOp.MAX):
            raise ValueError(f"{verb}: op must be 'min' or 'max', got {op!r}")
        xp, name = array_module(array), kind.name.lower()
        find = xp.argmin if kind is ReduceOp.MIN else xp.argmax  # the first of equal values
        step = Call(verbs.ALL_GATHER, as_packed(array)[None], blocking=not async_op)
        step.part_of = f"{verb}({name})"

        def locate(rows: Array) -> tuple[Any, ...]:
            ranks = xp.asarray(find(rows, axis=0))
            pair = xp.asarray(xp.take_along_axis(rows, ranks[None], 0)[0]), ranks
            if is_number:
                array[...] = pair[0]
                return number(), int(ranks)
            return tuple(user_result(x, part, in_place=False) for part in pair)

        work = members.run(step)
        return members.keep(Then(work, locate)) if async_op else locate(work.wait())


@native_entry(verbs.ALL_REDUCE)
def all_reduce_multiple(
    xs: Sequence[X], scale: float = 1.0, *, op: Op = "sum", contiguous: bool = False,
    group: Group = None, async_op: bool = False,
) -> list[X] | Work[list[X]]:  # fmt: skip
    """Combine each array of ``xs`` over the ranks, in place, like :func:`all_reduce`.

    The results have the same bits as a loop of :func:`all_reduce`, in less time.

    Args:
        xs: Arrays of any shapes and dtypes; the same list, in the same order, on every rank.
        scale, op, group, async_op: As for :func:`all_reduce`.
        contiguous: True to copy arrays of one dtype into a buffer and reduce the buffer in one
            call. This is fastest for many small arrays. CuPy arrays of any size are copied. NumPy
            arrays are copied only up to 32 KiB each. If all ranks share memory, the limit is 8 KiB,
            or 0 with ``async_op``.

    Returns:
        The list of ``xs``. With ``async_op``, a ``Work`` for this result.

    Raises:
        ValueError: If two arrays of the list share memory, or as for :func:`all_reduce`.
        TypeError, DistributedError: As for :func:`all_reduce`. All arrays are checked before the
            first is sent.
    """
    members, verb = members_of(group), "all_reduce_multiple"
    limit = members.packed_bytes[bool(async_op)] if contiguous else -1
    with reject_together(members, verb, _pending_calls(xs, limit, async_op)):
        inputs = list(xs)
        checked = [as_array(verb, x, of_any_dtype=True, mutable=True) for x in inputs]
        overlap = OverlapCheck(verb)
        for array in checked:
            overlap.add(array)
        packs = not (any(map(is_cupy, checked)) or sum(x.nbytes for x in checked) >> 20)
        packed = list(map(as_packed, checked)) if packs else checked
        is_copied = any(map(operator.is_not, packed, checked))
        if is_copied:  # call the native entry again, with the packed copies
            options: dict[str, Any] = {"group": group, "async_op": async_op}
            work: Any = all_reduce_multiple(packed, scale, op=op, contiguous=contiguous, **options)
        else:
            for array in {array.dtype: array for array in checked}.values():
                verb_call.resolve_reduction(verb, array.dtype, op, scale, members.size)
            plan = plan_messages(sorted(checked, key=is_cupy), limit)
            options = {"op": op, "scale": scale, "async_op": async_op}
            work = AllOf([_reduce_together(members, batch, limit, **options) for batch in plan])

        def results(_: Any) -> list[Any]:
            store_each(checked, packed)
            return [user_result(x, array, True) for x, array in zip(inputs, checked, strict=True)]

        if not async_op:
            return results(None)
        together = Then(work, results)
        return members.keep(together) if is_copied else together


def _unpacked_later(started: tuple[Work, Any], xs: Sequence[X], group: Group) -> Work:
    work, packs = started
    return members_of(group).keep(Then(work, partial(_unpack, packs, list(xs))))


setattr(all_reduce_multiple, "finish", _unpacked_later)  # noqa: B010  (native code calls it)


def _unpack(packs: Sequence[Sequence[Array]], results: list[X], _: Any) -> list[X]:
    """Copy results to the arrays. Each entry of ``packs`` is a buffer, followed by its arrays."""
    for flat, *arrays in packs:
        store_each(arrays, views(flat, [array.shape for array in arrays]))
    return results


def _pending_calls(xs: Any, limit: int, async_op: bool) -> Iterator[None]:
    """Yield ``COLLECTIVE`` for each collective that this rank omits if it rejects its arguments."""
    values = [getattr(x, "array", x) for x in xs] if async_op and isinstance(xs, Iterable) else []
    arrays: list[Any] = [x for x in values if hasattr(x, "nbytes")]
    invalid = len(values) - len(arrays) if limit < 0 else 0  # one call per invalid value
    count = max(1, len(plan_messages(arrays, limit)) + invalid)
    yield from itertools.repeat(verb_call.COLLECTIVE, count)


def plan_messages(arrays: Sequence[Array], limit: int) -> list[list[Array]]:
    """Return lists of arrays. The arrays of a list are sent as one message.

    All ranks and ``csrc/fast`` compute equal lists. The list of a NumPy array of more than
    ``limit`` bytes has one element. Smaller NumPy arrays of one dtype share lists of up to
    ``64 * limit`` bytes. CuPy arrays of one dtype share one list. If ``limit`` is negative, the
    list of each NumPy array has one element, and all CuPy arrays share one list.
    """
    messages: list[list[Array]] = []
    latest: dict[tuple[bool, str], tuple[list[Array], int]] = {}
    for array in arrays:
        on_gpu = is_cupy(array)
        name: Any = getattr(array.dtype, "name", "")  # dtypes of tensors have no name
        kind = on_gpu, name if limit >= 0 else ""
        packed, size = latest.get(kind, ([], 0))
        size += array.nbytes
        if not on_gpu and array.nbytes > limit:
            messages.append([array])
            continue
        if not packed or (not on_gpu and size > 64 * limit):
            packed, size = [], array.nbytes
            messages.append(packed)
        packed.append(array)
        latest[kind] = packed, size
    return messages


def _reduce_together(
    members: Membership, arrays: list[Array], limit: int, op: Op, scale: float, async_op: bool
) -> Work:
    options: dict[str, Any] = {"op": op, "scale": scale, "async_op": async_op}
    if len(arrays) == 1:
        y = collective(members, verbs.ALL_REDUCE, arrays[0], **options)
        return y if async_op else Done()
    unpack: Callable[[Any], Any]
    if limit < 0:  # for GPU arrays: one collective each, without a buffer
        verb, dtype = "all_reduce_multiple", arrays[0].dtype
        reduce_op, factor = verb_call.resolve_reduction(verb, dtype, op, scale, members.size)
        terms = [pack_terms(array, reduce_op) for array in arrays]
        calls = [Call(verbs.ALL_REDUCE, *term[:2], factor, blocking=False) for term in terms]
        y = members.run_many(calls, verb)

        def unpack(_: Any) -> None:
            for array, term in zip(arrays, terms, strict=True):
                verb_call.store_result(None, verb_call.Output(array, array, term.array), term.back)

    else:
        flat, digest = array_module(arrays[0]).concatenate([x.ravel() for x in arrays]), 0
        for extent in itertools.chain.from_iterable((array.ndim, *array.shape) for array in arrays):
            digest = (digest * 1099511628211 + extent) % 2**64
        root = 1 + (digest >> 34)  # ranks compare it: buffers of equal size may differ in shapes
        y = collective(members, verbs.ALL_REDUCE, flat, root=root, **options)
        unpack = partial(_unpack, [(flat, *arrays)], [])
    together = Then(y if isinstance(y, Work) else Done(), unpack)
    if not async_op:
        together.wait()
    return members.keep(together)
