"""The world of one process: every verb is the identity, times the scale."""

from __future__ import annotations

from collections.abc import Sequence

from flashlight_py.device import Array
from flashlight_py.distributed.arrays import require_length, scale_in_place
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.work import Done, Work

__all__ = ["SingleBackend"]


class SingleBackend(Backend):
    """A group of one rank, for NumPy and CuPy arrays alike."""

    kind = DistributedBackend.SINGLE
    path = "nothing moves"
    rank = 0
    size = 1

    def all_reduce(self, array: Array, op: ReduceOp, scale: float, blocking: bool = False) -> Work:
        """Multiply ``array`` by ``scale`` in place."""
        scale_in_place(array, scale)
        return Done(array)

    def reduce_scatter(
        self,
        array: Array,
        op: ReduceOp,
        scale: float,
        blocking: bool = False,
        out: Array | None = None,
        rows: Sequence[int] | None = None,
    ) -> Work:
        """Return a scaled copy."""
        return self.all_reduce(_copy(array, out), op, scale)

    def reduce(
        self, array: Array, op: ReduceOp, scale: float, root: int, blocking: bool = False
    ) -> Work:
        """Multiply ``array`` by ``scale`` in place."""
        return self.all_reduce(array, op, scale)

    def broadcast(self, array: Array, root: int, blocking: bool = False) -> Work:
        """Leave ``array`` as it is."""
        return Done(array)

    def all_gather(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Return a copy."""
        return Done(_copy(array, out))

    def gather(
        self, array: Array, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Return a copy."""
        return Done(_copy(array, out))

    def scatter(
        self, array: Array | None, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Return a copy of the one part there is."""
        assert array is not None  # this rank is the root
        return Done(_copy(array[0], out))

    def all_to_all(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Return a copy."""
        return Done(_copy(array, out))

    def all_to_all_uneven(
        self,
        array: Array,
        rows: Sequence[int],
        blocking: bool = False,
        out: Array | None = None,
        came: list[int] | None = None,
    ) -> Work:
        """Return a copy."""
        if came is not None:
            came += rows
        return Done(_copy(array, out))

    def send(self, array: Array, dst: int, tag: int, blocking: bool = False) -> Work:
        """Refuse: there is nobody else."""
        raise ValueError("send: this world has one rank, and a rank cannot send to itself")

    def recv(self, array: Array, src: int, tag: int, blocking: bool = False) -> Work:
        """Refuse: there is nobody else."""
        raise ValueError("recv: this world has one rank, and a rank cannot receive from itself")

    def refuse(self, call: str) -> None:
        """Nobody else waits."""

    def refuse_message(self, call: str, peer: int, tag: int, sends: bool) -> None:
        """Nobody else waits."""

    def barrier(self, timeout: float | None = None) -> Work:
        """End at once."""
        return Done()

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Nothing is held."""


def _copy(array: Array, out: Array | None) -> Array:
    if out is None:
        return array.copy()
    require_length("a copy", out, array.shape[0] if array.ndim else 1, 0, 1)
    out[...] = array
    return out
