"""A training step whose bits do not depend on the number of ranks: what happens leaf by leaf.

The global batch is cut into leaves by index. Each rank computes the gradients of its leaves one by
one, each into a row of its own, and the rows are added up in the order of a tree (``leaf_tree``),
the same for any number of ranks. The results of a leaf depend on its rows of the batch, on the
parameters and buffers at the beginning of the step, and on random numbers of its own: on nothing
that another leaf has left behind.
"""

import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.device import Array, array_module, is_floating
from flashlight_py.distributed import InlineReducer, ProcessGroup
from flashlight_py.distributed.internal import group_or_world, in_step
from flashlight_py.errors import MismatchError, NotInitializedError
from flashlight_py.nn import Module
from flashlight_py.parallel.agreement import differences, equal_on_all_ranks, gather_json
from flashlight_py.parallel.failing import fail_pass
from flashlight_py.parallel.gradient_pass import Bucket, GradientPass, pass_of, ranks_of
from flashlight_py.parallel.leaf_tree import Rows, join_hosts, push, rows_needed
from flashlight_py.parallel.synchronize import give_state, require_module
from flashlight_py.parallel.tree import put_buffer
from flashlight_py.structure import HoldsState, as_one

_DIGESTED = 1024  # elements of the first and the last row: enough to notice another order


# The stream of random numbers of a step is drawn from the package's generator, the same on every
# rank: its state is in a checkpoint already, so a run goes on without a counter of steps of its
# own.
@in_step(ranks_of)
def leaves(module: Module, *arrays: Array) -> Iterator[Any]:
    """Iterate over this rank's leaves of a global batch; afterwards gradients are those of it all.

    The batch is cut along the first dimension into as many leaves as
    ``distribute_module_grads(module, leaves=...)`` was given, or as it has rows if these are fewer:
    neighbouring rows, whose numbers differ by one at most, the longer ones first. Each rank gets
    neighbouring leaves. The last of more ranks than leaves get none and only join the reduction.

    The body of the loop calls ``backward()`` once for each leaf, on a loss that is a mean over the
    leaf's rows. The pass of a rank's last leaf ends with the reduction, collective and blocking:
    then every gradient is that of the mean over the global batch, with the same bits for any
    number of ranks, and former gradients are gone. In the body, the package's random numbers are
    the leaf's own; after it they go on as if one number had been drawn. Each leaf finds the
    module's buffers as they were when the loop began; after it they are the mean over the leaves
    (integers and the like: those of the first leaf).

    Args:
        module: passed to ``distribute_module_grads`` with ``leaves`` before.
        arrays: NumPy arrays of shape (rows, ...), the same on every rank; at least one.

    Yields:
        For each leaf a tuple of views of the arrays, of shape (rows of the leaf, ...); where one
        array is passed, its view.

    Raises:
        TypeError: there is no array, or one is no NumPy array.
        ValueError: ``leaves`` was not passed to ``distribute_module_grads`` for this module; the
            arrays have no rows, or different numbers of them.
        RuntimeError: a leaf had no backward pass, or two; another loop over leaves of the module is
            open.
        MismatchError: ranks pass batches of other sizes, dtypes or first and last rows, or are not
            in the same step; on every rank, before any gradient is sent.
        NotInitializedError: the world is another one than when the module was distributed.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Linear(3, 1)
        >>> fl.distribute_module_grads(model, leaves=4)
        >>> for x in fl.leaves(model, np.ones((10, 3), np.float32)):
        ...     print(x.shape)
        ...     model(fl.input(x)).mean().backward()
        (3, 3)
        (3, 3)
        (2, 3)
        (2, 3)
    """
    require_module(module)
    sync = pass_of(module)
    if not isinstance(sync, LeafSync):
        raise ValueError(
            "leaves: call distribute_module_grads(module, leaves=8) on this module first"
        )
    if group_or_world(sync.reducer.group) is not sync.members:
        raise NotInitializedError(
            f"{sync.where}: the module was distributed in a world that is no more; call "
            "distribute_module_grads again, after distributed_init"
        )
    return sync.steps_leaves(sync.rows_of(arrays), arrays)


class LeafSync(GradientPass[Bucket]):
    """Makes each step's gradients those of ``leaves`` leaves, added up in the order of their tree.

    ``params``: whose gradients; ``buffers``: names of the module's buffers that are to be the same
    on every rank. Making it is collective, and blocks.
    """

    def __init__(
        self,
        module: Module,
        params: Sequence[Variable],
        buffers: Sequence[str],
        leaves: int,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(InlineReducer(1.0, group=group), [Bucket(params)])
        self.leaves = leaves
        self.members = members = group_or_world(group)
        self.where = f"leaves: rank {members.rank} of {members.size}"
        self._buffers = LeafBuffers(module, buffers, group)
        depth, hosts = rows_needed(leaves, members.size), join_hosts(members)
        floating = self._buffers.floating()
        dtypes = dict.fromkeys([p.dtype for p in params] + [b.dtype for b in floating.values()])
        self._rows = [Rows(params, floating, dtype, depth, members, hosts) for dtype in dtypes]
        self._steps = 0
        self._is_open = False
        self._leaf = -1  # the one that is computed; -1: none
        self._is_done = False  # whether its gradient is there
        self._error = ""  # what was wrong in a pass of this step
        self._failure: BaseException | None = None  # of the leaf's last pass
        self.register_hooks()

    def rows_of(self, arrays: tuple[Array, ...]) -> int:
        """Return how many rows the arrays of a global batch have; raises as ``leaves``."""
        if not arrays:
            raise TypeError(f"{self.where}: expected the arrays of a global batch, got none")
        for number, array in enumerate(arrays):
            if not isinstance(array, np.ndarray) or not array.ndim:
                shape = " of shape ()" if isinstance(array, np.ndarray) else ""
                raise TypeError(
                    f"{self.where}: expected NumPy arrays of shape (rows, ...), got as number "
                    f"{number} one of type {type(array).__name__}{shape}"
                )
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1 or not lengths[0]:
            raise ValueError(
                f"{self.where}: expected arrays with the same number of rows, at least one; got "
                f"{', '.join(map(str, lengths))}"
            )
        return lengths[0]

    def steps_leaves(self, batch: int, arrays: Sequence[Array]) -> Iterator[Any]:
        """Yield each of this rank's leaves of ``batch`` rows, when all is as on any other rank."""
        self._open(batch, arrays)
        try:
            for leaf in self._mine:
                self._leaf, self._is_done = leaf, False
                self._buffers.restore()
                for rows in self._rows:
                    for param, view in rows.gradients(len(self._stack)):
                        param.buffer = view
                self._use_numbers(leaf)
                here = self._places[leaf]
                views = tuple([array[here.start : here.stop] for array in arrays])
                yield views if len(views) > 1 else views[0]
                if not (self._error or self._is_done):
                    self._error = (
                        f"{self.where}: the body of the loop ended without a backward pass for "
                        f"leaf {leaf} of {self.leaves}. Every leaf needs one; where nothing is to "
                        "be learned from a leaf, multiply its loss by 0"
                    )
                if self._error:
                    self._failure = RuntimeError(self._error)
                    raise self._failure
            if not self._mine:
                self._reduce()
        finally:
            self._end()

    def _open(self, rows: int, arrays: Sequence[Array]) -> None:
        if self._is_open:
            raise RuntimeError(
                f"{self.where}: a loop over leaves of this module is not over on this rank, and "
                "there is one gradient for both: end it first"
            )
        self._count = count = min(rows, self.leaves)
        self._mine = contiguous_share(count, self.members.rank, self.members.size)
        self._places = [contiguous_share(rows, leaf, self.leaves) for leaf in range(count)]
        sizes = [len(place) for place in self._places]
        # Equal leaves are weighed at the end, all at once; not where a sum may not fit its dtype.
        narrow = any(each.dtype.itemsize < 4 for each in self._rows)
        is_even = len(set(sizes)) == 1 and not narrow
        self._weights = None if is_even else [size / rows for size in sizes]
        self._scale = 1 / count if is_even else 1.0
        self._count_step(rows, *arrays)
        self._used: set[Variable] = set()
        self._buffers.begin()
        self._stack: list[range] = []  # the leaves whose sum is in each row
        self._error = ""
        self._is_open, self._is_reduced, self._failure = True, False, None
        self._clear_gradients()

    @as_one
    def _count_step(self, rows: int, *arrays: Array) -> None:
        """Draw this step's random numbers, and note what all ranks must have in common."""
        random.use(None)
        self._key = int(random.generator().integers(1 << 62))
        self._facts: dict[str, Any] = {"rows": rows, "step": self._steps}
        self._facts["random numbers"] = self._key
        if self.members.size > 1:
            self._facts.update({f"array {n}": looks_of(each) for n, each in enumerate(arrays)})
        self._steps += 1

    @as_one
    def _use_numbers(self, leaf: int | None) -> None:
        """Draw random numbers of ``leaf`` from now on; None restores the earlier generator."""
        random.use(None if leaf is None else [self._key, leaf])

    def _end(self) -> None:
        """Leave the step, also where it was left early: then there is no gradient."""
        self._use_numbers(None)
        self._leaf, self._is_open = -1, False
        error, self._failure = self._failure, None
        if not self._is_reduced:
            # The others are about to compare what they have used.
            fail_pass(self.members, error)
            self._buffers.restore()
            self._clear_gradients()

    def join_failed(self) -> None:
        """Autograd: the pass fails; see ``InPasses``."""
        if self._leaf >= 0 and not (self._running or self._is_reduced):
            self._join()

    def _prepare(self) -> None:
        if self._leaf < 0:
            raise RuntimeError(
                f"{self.where}: a backward pass outside of a loop over fl.leaves(module, ...), "
                f"of a module that was distributed with leaves={self.leaves}; gradients of other "
                "passes would not be reduced"
            )
        if self._is_done:
            self._error = (
                f"{self.where}: a second backward pass for leaf {self._leaf} of {self.leaves}, "
                "whose gradient has been added to the others already. Add the losses, and call "
                "backward once"
            )
            raise RuntimeError(self._error)

    def _send_bucket(self, bucket: Bucket, weight: float) -> None:
        """Do nothing: a leaf's gradients are taken together."""

    def fail(self) -> None:
        """Keep what the pass fails by until the end of the step; then the others get to know."""
        self._has_failed, self._failure = True, sys.exc_info()[1]

    def end_failed(self) -> None:
        """Go on: where the body does, the leaf may have another pass."""
        self._has_failed = False

    def _finish(self) -> None:
        """Push the leaf's row, and merge what waits for it; after the last leaf reduce."""
        self._is_done, self._failure = True, None
        row, leaf = len(self._stack), self._leaf
        changes = self._buffers.changes(is_first=leaf == 0)
        for rows in self._rows:
            for param, view in rows.gradients(row):
                if param.grad is None:
                    view[...] = 0
                else:
                    self._used.add(param)
                    if param.grad is not view:
                        view[...] = param.grad
                param.grad = None
            for name, view in rows.buffers(row).items():
                view[...] = changes[name]
            if self._weights is not None:
                rows.scale(row, self._weights[leaf])
        if leaf == self._mine[-1]:
            self._reduce()  # adds up what is left in one pass over memory
        elif merges := push(self._stack, range(leaf, leaf + 1), self._count):
            for rows in self._rows:
                rows.merge(row - merges, merges + 1)

    def _reduce(self) -> None:
        """Make the gradients the mean over the batch. Collective, blocking."""
        used_here = [param in self._used for param in self._params]
        used = dict(zip(self._params, self._compare(used_here), strict=True))
        for rows in self._rows:
            rows.add_up(self._count, self._scale)
        if any(rows.is_shared for rows in self._rows):
            as_one(self.members.barrier)()
        means: dict[str, Array] = {}
        for rows in self._rows:
            for param, view in rows.gradients(0):
                param.buffer = view
                param.grad = view if used[param] else None
            means.update(rows.buffers(0))
        self._buffers.end(means)
        self._is_reduced = True

    @as_one
    def _compare(self, used: Sequence[int]) -> Sequence[int]:
        """Return what any rank has used, if all are in the same step. Collective."""
        if self.members.size == 1:
            return used
        agreed, found = equal_on_all_ranks(json.dumps(self._facts).encode(), self.members, *used)
        if agreed:
            return found
        differing = ", ".join(differences(gather_json(self._facts, self.members)))
        raise MismatchError(
            f"{self.where}: the ranks are not at the same batch: {differing}. Pass every rank "
            "the whole global batch, leave no loop over leaves before its end, and draw the same "
            "random numbers on every rank"
        )


def is_leaf_by_leaf(module: object) -> bool:
    """Return whether ``module`` is trained leaf by leaf: the same random numbers on all ranks."""
    return isinstance(module, Module) and isinstance(pass_of(module), LeafSync)


def looks_of(array: Array) -> str:
    """Return in short what another batch is unlikely to have: shape, dtype, first and last row."""
    rows = () if array.dtype.hasobject else (array[:1], array[-1:])
    ends = b"".join([row.reshape(-1)[:_DIGESTED].tobytes() for row in rows])
    return f"{array.dtype} {array.shape}, first and last row {crc32(ends):08x}"


# Buffers change by the mean of the leaves' changes, not to their mean: one that nothing changes
# keeps its bits, infinite ones too.
class LeafBuffers(HoldsState):
    """The buffers ``names`` of ``module``, which become those of rank 0. Collective, blocking."""

    def __init__(self, module: Module, names: Sequence[str], group: ProcessGroup | None) -> None:
        # Not kept alive: what is known of modules goes with them, and whoever runs a step has it.
        self._module: Callable[[], Any] = weakref.ref(module)
        self._names, self._group = list(names), group
        if names:
            give_state(module, self._now(), 0, group)
        self._before = {name: np.array(value) for name, value in self._now().items()}
        self._averaged = list(self.floating())
        self._others = [name for name in names if name not in self._averaged]

    def floating(self) -> dict[str, Array]:
        """Return the buffers that are averaged, by name."""
        arrays = {name: x for name, x in self._now().items() if isinstance(x, np.ndarray)}
        return {n: x for n, x in arrays.items() if is_floating(x.dtype) or x.dtype.kind == "c"}

    def begin(self) -> None:
        """Keep what the step begins with."""
        for name, value in self._now().items():
            if isinstance(value, np.ndarray):
                self._before[name][...] = value  # where replays of a captured step have it
            else:
                self._before[name] = np.array(value)
        self._first: dict[str, Array] = {}  # what the first leaf, of rank 0, has made of others

    def restore(self) -> None:
        """Make the buffers what the step has begun with."""
        self._set(self._before)

    def changes(self, is_first: bool) -> dict[str, Array]:
        """Return by how much the leaf has changed those that are averaged, exactly 0 where not."""
        now = self._now()
        if is_first:
            self._first = {name: array_module(now[name]).array(now[name]) for name in self._others}
        with np.errstate(all="ignore"):  # a leaf's statistics may be infinite
            return {
                name: np.where(now[name] == self._before[name], 0, now[name] - self._before[name])
                for name in self._averaged
            }

    def end(self, means: Mapping[str, Array]) -> None:
        """Add the mean changes, and share what the first leaf made; that is collective."""
        with np.errstate(all="ignore"):
            self._set({name: self._before[name] + mean for name, mean in means.items()})
        if self._others:
            self._set(self._first)
            now = self._now()
            give_state(self._module(), {name: now[name] for name in self._others}, 0, self._group)

    def _now(self) -> dict[str, Any]:
        if not self._names:
            return {}
        found = self._module().buffers
        return {name: found[name] for name in self._names}

    def _set(self, values: Mapping[str, Array]) -> None:
        now = self._now()
        for name, value in values.items():
            if isinstance(now[name], np.ndarray):
                now[name][...] = value
            else:
                put_buffer(self._module(), name, value.item())
