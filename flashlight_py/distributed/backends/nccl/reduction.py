"""One array's part in a reduction: how it is given to NCCL, and what remains to do afterwards."""

from __future__ import annotations

from typing import Any

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.arrays import scale_in_place
from flashlight_py.distributed.backends.nccl.dtypes import form_of
from flashlight_py.distributed.constants import ReduceOp

__all__ = ["Reduction"]


class Reduction:
    """``target = scale * (op over the ranks' source)``; ``target`` may be ``source`` itself.

    Made, and finished, with the communication stream as the current one: what is converted here
    belongs to that stream, in order with the collective.
    """

    def __init__(self, source: Array, target: Array, op: ReduceOp, scale: float) -> None:
        self.form = form_of(source.dtype.name, op)
        self.target = target
        self.summed = op is ReduceOp.SUM
        self.scale = scale
        self.source, self.room = source, target
        if self.form.widened:
            self.source = source.astype(self.form.dtype)
            same = target is source
            self.room = self.source if same else _empty(target, self.form.dtype)

    @property
    def scaled_by_nccl(self) -> bool:
        """Whether each rank's values are multiplied on their way: sums only."""
        return self.summed and self.scale != 1.0

    def count(self) -> int:
        """Return how many elements of NCCL's type the result has."""
        return int(self.room.size) * self.form.parts

    def finish(self) -> None:
        """Scale what NCCL cannot scale, and convert back."""
        if self.form.widened:
            self.target[...] = self.room
        if not self.summed:
            scale_in_place(self.target, self.scale)


def _empty(like: Array, dtype: str) -> Any:
    return array_module(like).empty(like.shape, dtype)
