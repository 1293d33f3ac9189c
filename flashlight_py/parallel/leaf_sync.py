"""A training step whose bits do not depend on the number of ranks: what happens leaf by leaf.

The global batch is cut into leaves by index. Each rank computes the gradients of its leaves one by
one, each into a row of its own, and the rows are added up in the order of a tree (``leaf_tree``),
the same for any number of ranks. What a leaf computes depends on its rows of the batch, on the
parameters and buffers at the beginning of the step, and on random numbers of its own: on nothing
that another leaf has left behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.device import Array, effect
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.groups.world import group_or_world
from flashlight_py.distributed.reducers.reducer import InlineReducer
from flashlight_py.errors import MismatchError, NotInitializedError
from flashlight_py.nn import Module
from flashlight_py.parallel.agreement import differing_arguments, of_all_ranks
from flashlight_py.parallel.failing import fail
from flashlight_py.parallel.gradient_pass import GradientPass, Unit, pass_of
from flashlight_py.parallel.leaf_buffers import Buffers
from flashlight_py.parallel.leaf_rows import Rows, join_hosts, merges_after
from flashlight_py.parallel.leaf_tree import MERGE, ops_of, rows_needed
from flashlight_py.parallel.parameters import require_module

_DIGESTED = 1024  # elements of the first and the last row: enough to notice another order


class LeafSync(GradientPass[Unit]):
    """Makes each step's gradients those of ``leaves`` leaves, added up in the order of their tree.

    ``params``: whose gradients; ``buffers``: names of the module's buffers that are to be the same
    on every rank. Making it is collective, and blocks.
    """

    __captured_state__ = (
        *("_params", "leaves", "reducer", "members", "_buffers", "_rows", "_number_of"),
        *("_is_open", "_leaf", "_is_done", "_running", "_error", "_failure"),
    )

    def __init__(
        self,
        module: Module,
        params: Sequence[Variable],
        buffers: Sequence[str],
        leaves: int,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(InlineReducer(1.0, group=group), [Unit(params)])
        self.leaves = leaves
        self.members = group_or_world(group)
        self._buffers = Buffers(module, buffers, group)
        depth, hosts = rows_needed(leaves, self.members.size), join_hosts(self.members)
        floating = self._buffers.floating()
        dtypes = dict.fromkeys([p.dtype for p in params] + [b.dtype for b in floating.values()])
        self._rows = [
            Rows(
                [param for param in params if param.dtype == dtype],
                {name: array for name, array in floating.items() if array.dtype == dtype},
                dtype,
                depth,
                self.members,
                hosts,
            )
            for dtype in dtypes
        ]
        self._number_of = {param: number for number, param in enumerate(params)}
        self._steps = 0
        self._is_open = False
        self._leaf = -1  # the one that is computed; -1: none
        self._is_done = False  # whether its gradient is there
        self._error = ""  # what was wrong in a pass of this step
        self._failure: BaseException | None = None  # of the leaf's last pass
        self.install()

    def where(self) -> str:
        """Return how a message begins."""
        return f"leaves: rank {self.members.rank} of {self.members.size}"

    def require_world(self) -> None:
        """Check that the ranks are still those of when this was made.

        Raises:
            NotInitializedError: they are not.
        """
        if group_or_world(self.reducer.group) is not self.members:
            raise NotInitializedError(
                f"{self.where()}: the module was distributed in a world that is no more; call "
                "distribute_module_grads again, after distributed_init"
            )

    def steps_leaves(self, rows: int, arrays: Sequence[Array]) -> Iterator[range]:
        """Yield the positions of each of this rank's leaves of a batch of ``rows``, ready for it.

        ``arrays`` are what all ranks must have in common.
        """
        self._open(rows, arrays)
        try:
            for leaf in self._mine:
                self._select(leaf)
                yield self._positions(leaf)
                self._require_gradient()
            if not self._mine:
                self._reduce()
        finally:
            self._end()

    def _positions(self, leaf: int) -> range:
        return contiguous_share(self._batch, leaf, self.leaves)

    def _open(self, rows: int, arrays: Sequence[Array]) -> None:
        if self._is_open:
            raise RuntimeError(
                f"{self.where()}: a loop over leaves of this module is not over on this rank, and "
                "there is one gradient for both: end it first"
            )
        self._batch = rows
        count = min(rows, self.leaves)
        self._count = count
        self._ops = ops_of(count, self.members.rank, self.members.size)
        self._mine = [op for op in self._ops if op != MERGE]
        sizes = [len(self._positions(leaf)) for leaf in range(count)]
        # Equal leaves are weighed at the end, all at once; not where a sum may not fit its dtype.
        narrow = any(each.dtype.itemsize < 4 for each in self._rows)
        is_even = len(set(sizes)) == 1 and not narrow
        self._weights = None if is_even else [size / rows for size in sizes]
        self._scale = 1 / count if is_even else 1.0
        self._count_step(rows, *arrays)
        self._used = np.zeros(len(self._params), np.int64)
        self._buffers.begin()
        self._height = 0
        self._error = ""
        self._is_open, self._is_reduced, self._failure = True, False, None
        for param in self._params:
            param.grad = None

    @effect
    def _count_step(self, rows: int, *arrays: Array) -> None:
        """Draw this step's random numbers, and note what all ranks must have in common."""
        random.use(None)
        self._key = int(random.generator().integers(1 << 62))
        self._facts: dict[str, int | str] = {"rows": rows, "step": self._steps}
        self._facts["random numbers"] = self._key
        if self.members.size > 1:
            self._facts.update({f"array {n}": looks_of(each) for n, each in enumerate(arrays)})
        self._steps += 1

    @effect
    def _use_numbers(self, leaf: int | None) -> None:
        """Let random numbers be those of ``leaf``; None: those of before."""
        random.use(None if leaf is None else [self._key, leaf])

    @effect
    def _meet(self) -> None:
        self.members.barrier()

    def _select(self, leaf: int) -> None:
        """Make everything as it is for ``leaf`` on any rank."""
        self._leaf, self._is_done = leaf, False
        self._buffers.restore()
        for rows in self._rows:
            for param, view in zip(rows.params, rows.gradients(self._height), strict=True):
                param.buffer = view
        self._use_numbers(leaf)

    def _require_gradient(self) -> None:
        error = self._error
        if not (error or self._is_done):
            error = (
                f"{self.where()}: the body of the loop ended without a backward pass for leaf "
                f"{self._leaf} of {self.leaves}. Every leaf needs one; where nothing is to be "
                "learned from a leaf, multiply its loss by 0"
            )
        if error:
            self._failure = RuntimeError(error)
            raise self._failure

    def _end(self) -> None:
        """Leave the step, also where it was left early: then there is no gradient."""
        self._use_numbers(None)
        self._leaf, self._is_open = -1, False
        error, self._failure = self._failure, None
        if not self._is_reduced:
            # The others are about to compare what they have used.
            fail(self.members, error)
            self._buffers.restore()
            for param in self._params:
                param.grad = None

    def join_failed(self) -> None:
        """Autograd: the pass fails; see ``InPasses``."""
        if self._leaf >= 0 and not (self._running or self._is_reduced):
            self._join()

    def _enter(self) -> None:
        if self._leaf < 0:
            raise RuntimeError(
                f"{self.where()}: a backward pass outside of a loop over fl.leaves(module, ...), "
                f"of a module that was distributed with leaves={self.leaves}; gradients of other "
                "passes would not be reduced"
            )
        if self._is_done:
            self._error = (
                f"{self.where()}: a second backward pass for leaf {self._leaf} of {self.leaves}, "
                "whose gradient has been added to the others already. Add the losses, and call "
                "backward once"
            )
            raise RuntimeError(self._error)

    def _give(self, unit: Unit, weight: float) -> None:
        """Do nothing: a leaf's gradients are taken together."""

    def fail(self) -> None:
        """Keep what the pass fails by until the end of the step; then the others get to know."""
        self._has_failed, self._failure = True, sys.exc_info()[1]

    def end_failed(self) -> None:
        """Go on: where the body does, the leaf may have another pass."""
        self._has_failed = False

    def _finish(self) -> None:
        self._is_done, self._failure = True, None
        self._take_gradient()
        if self._leaf == self._mine[-1]:
            self._reduce()

    def _take_gradient(self) -> None:
        """Push the leaf's row, and merge what waits for it."""
        row, leaf = self._height, self._leaf
        changes = self._buffers.changes(is_first=leaf == 0)
        for rows in self._rows:
            for param, view in zip(rows.params, rows.gradients(row), strict=True):
                if param.grad is None:
                    view[...] = 0
                else:
                    self._used[self._number_of[param]] = 1
                    if param.grad is not view:
                        view[...] = param.grad
                param.grad = None
            for name, view in rows.buffers(row).items():
                view[...] = changes[name]
            if self._weights is not None:
                rows.scale(row, self._weights[leaf])
        merges = merges_after(self._ops, self._ops.index(leaf))
        if merges:
            for rows in self._rows:
                rows.merge(row - merges, merges + 1)
        self._height = row + 1 - merges

    def _reduce(self) -> None:
        """Make the gradients the mean over the batch. Collective, blocking."""
        used = self._compare(self._used.tolist())
        for rows in self._rows:
            rows.add_up(self._count, self._scale)
        if any(rows.is_shared for rows in self._rows):
            self._meet()
        means: dict[str, Array] = {}
        for rows in self._rows:
            for param, view in zip(rows.params, rows.gradients(0), strict=True):
                param.buffer = view
                param.grad = view if used[self._number_of[param]] else None
            means.update(rows.buffers(0))
        self._buffers.end(means)
        self._is_reduced = True

    @effect
    def _compare(self, used: list[int]) -> list[int]:
        """Return what any rank has used, if all are in the same step. Collective."""
        if self.members.size == 1:
            return used
        numbers = [
            crc32(each.encode()) if isinstance(each, str) else each for each in self._facts.values()
        ]
        message = np.array([*numbers, *(~number for number in numbers), *used], np.int64)
        self.members.all_reduce(message, op="max")
        half = len(numbers)
        if np.array_equal(message[:half], ~message[half : 2 * half]):
            found: list[int] = message[2 * half :].tolist()
            return found
        everyone: list[dict[str, Any]] = of_all_ranks(self._facts, self.members)
        raise MismatchError(
            f"{self.where()}: the ranks are not at the same batch: "
            f"{differing_arguments(everyone)}. Pass every rank the whole global batch, leave no "
            "loop over leaves before its end, and draw the same random numbers on every rank"
        )


def leaf_sync_of(module: Module) -> LeafSync:
    """Return what :func:`distribute_module_grads` with ``leaves`` has installed.

    Raises:
        TypeError: ``module`` is no Module.
        ValueError: it has not installed that.
    """
    require_module(module)
    sync = pass_of(module)
    if not isinstance(sync, LeafSync):
        raise ValueError(
            "leaves: call distribute_module_grads(module, leaves=8) on this module first"
        )
    return sync


def is_leaf_by_leaf(module: object) -> bool:
    """Return whether ``module`` is trained leaf by leaf: the same random numbers on all ranks."""
    return isinstance(module, Module) and isinstance(pass_of(module), LeafSync)


def looks_of(array: Array) -> str:
    """Return in short what another batch is unlikely to have: shape, dtype, first and last row."""
    ends = (
        b""
        if array.dtype.hasobject
        else b"".join([row.reshape(-1)[:_DIGESTED].tobytes() for row in (array[:1], array[-1:])])
    )
    return f"{array.dtype} {array.shape}, first and last row {crc32(ends):08x}"
