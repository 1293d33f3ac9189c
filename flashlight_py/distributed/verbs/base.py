"""What the families of verbs share: the group's backends, checks, and bringing results home."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex

from flashlight_py.device import Array
from flashlight_py.distributed.arrays import as_array, check_reduction, may_overlap, pack, parse_op
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.constants import Op, ReduceOp
from flashlight_py.distributed.recorder.journal import Journal
from flashlight_py.distributed.work import AllOf, Done, Then, Work

__all__ = ["NO_ROOM", "Room", "Verbs", "check_seconds", "pack_apart", "unpack_into", "whole"]


class Room(NamedTuple):
    """Where a result goes: what the user gave, its array, and a form that backends can fill."""

    given: Any
    array: Array | None
    packed: Array | None


NO_ROOM = Room(None, None, None)


class Verbs(abc.ABC):
    """Validates, packs, calls a backend, unpacks. ``rank`` and ``size`` are those of the group.

    Whatever backends are given goes through ``journal``, which records it.
    """

    rank: int
    size: int

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unfinished: list[Then] = []

    @abc.abstractmethod
    def backend(self, array: Any = None) -> Backend:
        """Return the backend that ``array`` (None: a NumPy array) goes through."""

    def _reduction(
        self, verb: str, x: Any, op: Op, scale: float, writes: bool = True
    ) -> tuple[Array, ReduceOp, float]:
        """Check everything that a reduction is given; an average becomes a scaled sum."""
        array = as_array(verb, x, writes)
        reduce_op = parse_op(verb, op)
        factor = check_reduction(verb, array.dtype, reduce_op, scale)
        if reduce_op is ReduceOp.AVG:
            return array, ReduceOp.SUM, factor / self.size
        return array, reduce_op, factor

    def _finish(
        self, work: Work, x: Any, unpack: Callable[[Any], None] | None, async_op: bool
    ) -> Any:
        """Return ``x``, or a Work whose result is ``x``, once it is complete."""
        if not async_op:
            work.wait()
            if unpack is not None:
                unpack(None)
            return x
        if isinstance(work, Done) and unpack is None:
            return Done(x)

        def finish(_: Any) -> Any:
            if unpack is not None:
                unpack(None)
            return x

        then = Then(work, finish)
        return then if unpack is None else self._keep(then)

    def _room(self, verb: str, out: Any, like: Array, shape: tuple[int | None, ...]) -> Room:
        """Return where a result of ``shape`` goes; its first extent is None if not known."""
        if out is None:
            return NO_ROOM
        array = as_array(f"{verb}(out=)", out)
        if not _fits(array.shape, shape) or array.dtype != like.dtype:
            extents = ", ".join("any" if extent is None else str(extent) for extent in shape)
            raise ValueError(
                f"{verb}: out must be {like.dtype} ({extents}), got {array.dtype} {array.shape}"
            )
        return Room(out, array, pack(array))

    def _finish_into(self, work: Work, room: Room, async_op: bool) -> Any:
        """Return what came: a new array, or the ``out`` that the user gave; or a Work for it."""
        if room.array is None or room.packed is None:
            return work if async_op else work.wait()
        return self._finish(work, room.given, unpack_into(room.array, room.packed), async_op)

    def _each(
        self,
        verb: str,
        xs: Sequence[Any],
        out: Any,
        async_op: bool,
        prepare: Callable[[Any, Any], Callable[[], Any]],
    ) -> Any:
        """Begin ``verb`` of each of ``xs``, with its part of ``out``; all are checked before any.

        ``prepare(x, out)`` checks, and returns what begins.
        """
        outs = [None] * len(xs) if out is None else list(out)
        if len(outs) != len(xs):
            raise ValueError(f"{verb}: {len(xs)} arrays are passed, and out has {len(outs)}")
        begin = [prepare(*pair) for pair in zip(xs, outs, strict=True)]
        results = [start() for start in begin]
        return AllOf(results) if async_op else results

    def _require_equal_parts(self, verb: str, array: Array, advice: str = "") -> None:
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ValueError(
                f"{verb}: the first dimension must be a multiple of the {self.size} ranks, got "
                f"shape {array.shape}{advice}"
            )

    def _keep(self, work: Then) -> Then:
        """Remember a result that is still to be brought home, also if nobody waits for it."""
        self._unfinished = [other for other in self._unfinished if not other.is_finished()]
        self._unfinished.append(work)
        return work

    def _check_rank(self, verb: str, name: str, rank: SupportsIndex) -> int:
        """Return ``rank`` as an int, if it is one of the group's."""
        number = whole(rank)
        if number is None or not 0 <= number < self.size:
            raise ValueError(
                f"{verb}: {name} must be a rank of this group, 0 to {self.size - 1}; got {rank!r}"
            )
        return number


def check_seconds(verb: str, timeout: Any) -> float | None:
    """Return a ``timeout`` in seconds as a float, None as it is.

    Raises:
        ValueError: it is no positive number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__") or not timeout > 0:
        raise ValueError(f"{verb}: timeout must be a positive number of seconds: {timeout!r}")
    return float(timeout)


def whole(value: object) -> int | None:
    """Return an integer of any kind, also NumPy's, as an int; None for anything else."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def pack_apart(array: Array, room: Room) -> Array:
    """Return ``array`` in a form that backends can read while they fill ``room``."""
    packed = pack(array)
    if room.packed is not None and may_overlap(packed, room.packed):
        packed = packed.copy()
    return packed


def unpack_into(array: Array, packed: Array) -> Callable[[Any], None] | None:
    """Return what brings the result home, or None where it is there already."""
    if packed is array:
        return None

    def unpack(_: Any) -> None:
        array[...] = packed

    return unpack


def _fits(got: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    if got == wanted:
        return True
    same_rank = len(got) == len(wanted) > 0
    return same_rank and wanted[0] is None and got[1:] == wanted[1:]
