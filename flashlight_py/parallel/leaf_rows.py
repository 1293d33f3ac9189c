"""Where the gradients of leaves lie: rows of memory that work as a stack, and what adds them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.parallel.leaf_tree import MERGE, Plan, fold

_LINE = 64  # elements: the shares of two ranks begin on lines of their own


class Rows:
    """All parameters' gradients of one dtype, and all buffers', side by side in each row.

    Row d is entry d of the stack. ``depth`` rows, of memory that all ranks of ``members`` see where
    there is such memory. Making it is collective, and blocks.
    """

    def __init__(
        self,
        params: Sequence[Variable],
        buffers: Mapping[str, Array],
        dtype: np.dtype[Any],
        depth: int,
        members: ProcessGroup,
    ) -> None:
        self.params = params
        self.dtype = dtype
        self._members = members
        arrays = [*(param.data for param in params), *buffers.values()]
        sizes, shapes = [a.size for a in arrays], [a.shape for a in arrays]
        step = _LINE * members.size
        self._width = max(1, -(-sum(sizes) // step)) * step  # each rank's share is as large
        shape = depth, self._width
        with members.journal.recording("shared_empty", like=(dtype, shape)):
            self._everyone = members.backend().shared_by_all(shape, dtype)
        self.own = self._everyone[members.rank if self.is_shared else 0]
        self.own[...] = 0
        ends = np.cumsum([0, *sizes]).tolist()
        self._views = [
            [row[a:b].reshape(s) for a, b, s in zip(ends, ends[1:], shapes, strict=False)]
            for row in self.own
        ]
        self._names = list(buffers)

    @property
    def is_shared(self) -> bool:
        """Whether every rank sees every rank's rows."""
        return len(self._everyone) == self._members.size

    def gradients(self, row: int) -> list[Array]:
        """Return where the parameters' gradients lie in ``row``, in their order."""
        return self._views[row][: len(self.params)]

    def buffers(self, row: int) -> dict[str, Array]:
        """Return where the buffers lie in ``row``."""
        views = self._views[row][len(self.params) :]
        return dict(zip(self._names, views, strict=True))

    def scale(self, row: int, factor: float) -> None:
        """Multiply a row by ``factor``, in place."""
        np.multiply(self.own[row], self.dtype.type(factor), out=self.own[row])

    def merge(self, first: int, count: int) -> None:
        """Replace ``count`` rows from ``first`` on by their sum, the last ones first."""
        steps = [(a, a + 1) for a in reversed(range(count - 1))]
        fold(list(self.own[first : first + count]), steps, 1.0, [self.own[first]])

    def add_up(self, plan: Plan, scale: float) -> None:
        """Make row 0 of every rank the sum of all leaves, times ``scale``.

        Collective and blocking where the rows are not shared. Where they are, every rank must have
        written its rows before any calls this, and none may touch them until all have returned.
        """
        if self.is_shared:
            self._add_up_in_place(plan, scale)
        else:
            self._add_up_by_messages(plan, scale)

    def _add_up_in_place(self, plan: Plan, scale: float) -> None:
        """Each rank reads its share of all rows where they lie, and writes it into all row 0s."""
        share = self._width // self._members.size
        mine = slice(self._members.rank * share, (self._members.rank + 1) * share)
        sums = [
            rows[row, mine]
            for rows, height in zip(self._everyone, plan.heights, strict=True)
            for row in range(height)
        ]
        others = [rows[0, mine] for rows in self._everyone if rows is not self.own]
        fold(sums, plan.steps, scale, [self.own[0, mine], *others])

    def _add_up_by_messages(self, plan: Plan, scale: float) -> None:
        """Each rank receives its share of all rows, adds them up, and sends the result to all."""
        members, size = self._members, self._members.size
        height, share = plan.heights[members.rank], self._width // size
        shares = self.own[:height].reshape(height, size, share).swapaxes(0, 1)
        sent = np.ascontiguousarray(shares).reshape(size * height, share)
        is_even = len(set(plan.heights)) == 1
        sums = members.all_to_all(sent, None if is_even else [height] * size)
        fold(list(sums), plan.steps, scale, [sums[0]])
        members.all_gather(sums[0], self.own[0])


def merges_after(ops: Sequence[int], position: int) -> int:
    """Return how many times a program merges right after the leaf at ``position``."""
    count = 0
    while position + 1 + count < len(ops) and ops[position + 1 + count] == MERGE:
        count += 1
    return count
