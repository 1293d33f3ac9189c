"""One array's part in a reduction: how it is given to NCCL, and what remains to do afterwards."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.backends.nccl.dtypes import Form, form_of
from flashlight_py.distributed.calls.arrays import scale_in_place
from flashlight_py.distributed.constants import ReduceOp


class Reduction:
    """``target = scale * (op over the ranks' source)``; ``target`` may be ``source`` itself.

    What must be converted is converted on ``stream``, in order with the collective, and belongs
    to that stream.
    """

    def __init__(
        self, stream: Any, source: Array, target: Array, op: ReduceOp, scale: float
    ) -> None:
        self.form = _form(source.dtype, op)
        self.count = target.size * self.form.parts
        self.source, self.room = source, target
        self._stream, self._target = stream, target
        # NCCL multiplies the terms of a sum on their way, and nothing else.
        self.factor = scale if op is ReduceOp.SUM else 1.0
        self._scale = 1.0 if op is ReduceOp.SUM else scale
        if self.form.widened:
            self._widen()

    def _widen(self) -> None:
        with self._stream:
            same = self._target is self.source
            self.source = self.source.astype(self.form.dtype)
            self.room = self.source if same else _empty(self._target, self.form.dtype)

    def finish(self) -> None:
        """Convert back, and scale what NCCL cannot scale; for after the call."""
        if not self.form.widened and self._scale == 1.0:
            return
        with self._stream:
            if self.form.widened:
                self._target[...] = self.room
            scale_in_place(self._target, self._scale)


@functools.cache
def _form(dtype: np.dtype[Any], op: ReduceOp) -> Form:
    return form_of(dtype.name, op)  # the name takes NumPy 2 us to put together


def _empty(like: Array, dtype: str) -> Any:
    return array_module(like).empty(like.shape, dtype)
