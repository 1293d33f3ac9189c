"""What the families of verbs share: the group's backends, checks, and bringing results home."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.arrays import as_array, check_reduction, parse_op
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.work import Done, Then, Work

__all__ = ["Verbs", "unpack_into"]


class Verbs(abc.ABC):
    """Validates, packs, calls a backend, unpacks. ``rank`` and ``size`` are those of the group."""

    rank: int
    size: int

    def __init__(self) -> None:
        self._unfinished: list[Then] = []

    @abc.abstractmethod
    def backend(self, array: Any = None) -> Backend:
        """Return the backend that ``array`` (None: a NumPy array) goes through."""

    def _reduction(self, verb: str, x: Any, op: str, scale: float) -> tuple[Array, ReduceOp, float]:
        """Check everything that a reduction is given; an average becomes a scaled sum."""
        array = as_array(verb, x)
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

    def _keep(self, work: Then) -> Then:
        """Remember a result that is still to be brought home, also if nobody waits for it."""
        self._unfinished = [other for other in self._unfinished if not other.is_finished()]
        self._unfinished.append(work)
        return work

    def _check_rank(self, verb: str, name: str, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(
                f"{verb}: {name} must be a rank of this group, 0 to {self.size - 1}; got {rank!r}"
            )


def unpack_into(array: Array, packed: Array) -> Callable[[Any], None] | None:
    """Return what brings the result home, or None where it is there already."""
    if packed is array:
        return None

    def unpack(_: Any) -> None:
        array[...] = packed

    return unpack
