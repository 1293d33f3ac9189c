"""A training step whose bits do not depend on the number of ranks; it computes leaf by leaf.

The global batch is divided into leaves by index. Each rank computes the gradients of its leaves one
after the other, each into a separate row. The results of a leaf depend only on its rows of the
batch, on the parameters and buffers at the beginning of the step, and on the leaf's own random
numbers. They do not depend on other leaves.

The gradients are added in the order of a binary tree, which is the same for any number of ranks.
The nodes of the tree are blocks of 1, 2, 4, ... leaves that begin at a multiple of their size. If
the number of leaves is not a power of two, a node with one child equals this child. A rank
processes its contiguous leaves with a stack. It pushes each leaf, and replaces the top two entries
by their sum if they are the children of one node. Complete subtrees remain on the stack and become
terms of the sums above them. In functions of the tree, ``count`` is the number of leaves.
"""

import functools
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.dataset.dataset import contiguous_share
from flashlight_py.device import Array, array_module, is_floating
from flashlight_py.distributed import InlineReducer, ProcessGroup, internal
from flashlight_py.errors import MismatchError, NotInitializedError
from flashlight_py.nn import Module
from flashlight_py.parallel import gradient_pass
from flashlight_py.parallel.agreement import differences, equal_on_all_ranks, gather_json
from flashlight_py.parallel.synchronize import give_state, require_module
from flashlight_py.parallel.tree import put_buffer
from flashlight_py.structure import HoldsState, as_one

# Additions in their order: (a, b) adds sum b to sum a.
Steps: TypeAlias = "list[tuple[int, int]]"
# A sum of leaves that one host computes: its rows as (rank on the host, row), and the additions.
Subtree: TypeAlias = "tuple[list[tuple[int, int]], Steps]"

_LINE = 64  # elements; each rank's share begins at a multiple, so ranks write different cache lines
_BLOCK_BYTES = 64 << 10  # bytes of each array in a block; sums stay in the L2 cache
_DIGESTED = 1024  # elements of the first and of the last row that a digest of a batch contains


# The seed of a step's random numbers comes from the package's generator, which is the same on every
# rank. Checkpoints contain the generator's state, so no separate counter of steps is needed.
@internal.in_step(gradient_pass.ranks_of)
def leaves(module: Module, *arrays: Array) -> Iterator[Any]:
    """Iterate over this rank's leaves of a global batch, and reduce the gradients at the end.

    The batch is divided along the first dimension into the number of leaves that was passed to
    ``distribute_module_grads(module, leaves=...)``, or into one leaf per row if it has fewer rows.
    Leaves are contiguous, their numbers of rows differ by at most one, and the longer leaves come
    first. Each rank gets contiguous leaves. With too few leaves, the last ranks only reduce.

    The body of the loop calls ``backward()`` once per leaf, on a loss that is a mean over the
    leaf's rows. The pass of a rank's last leaf ends with the reduction, which is collective and
    blocking. Then every gradient is the gradient of the mean over the global batch, with the same
    bits for any number of ranks, and replaces earlier gradients. In the body, the package's random
    numbers (dropout) depend only on the step and the leaf. After the loop, the package's generator
    has drawn a single number. Each leaf starts with the buffers from the beginning of the loop.
    Then a floating-point buffer is the mean over the leaves. Others have the first leaf's value.

    Args:
        module: Module that was passed to ``distribute_module_grads`` with ``leaves``.
        arrays: One or more NumPy arrays of shape (rows, ...), the same on every rank.

    Yields:
        For each leaf, a tuple of views of shape (rows of the leaf, ...); for one array, its view.

    Raises:
        TypeError: If no array is passed, or an argument is not a NumPy array.
        ValueError: If ``distribute_module_grads`` was called without ``leaves``, or the arrays have
            no rows or different numbers of rows.
        RuntimeError: If a leaf has no backward pass or more than one, or another loop is open.
        MismatchError: If the ranks pass different batches (by size, dtype, first and last row) or
            are in different steps. Every rank raises before any gradient is sent.
        NotInitializedError: If the world has changed since the module was distributed.
        DistributedError: As :func:`flashlight_py.all_reduce`.

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
    sync = gradient_pass.pass_of(module)
    if not isinstance(sync, LeafSync):
        raise ValueError(
            "leaves: call distribute_module_grads(module, leaves=8) on this module first"
        )
    if internal.group_or_world(sync.reducer.group) is not sync.members:
        raise NotInitializedError(
            f"{sync.context}: expected the world that distributed the module, got another world. "
            "Call distribute_module_grads again, after distributed_init"
        )
    return sync.leaves_of_step(sync.rows_of(arrays), arrays)


class LeafSync(gradient_pass.GradientPass[gradient_pass.PassBucket]):
    """A pass that adds the gradients of ``leaves`` leaves in the order of their tree.

    ``params`` are the trained parameters. ``buffers`` are the names of the buffers that are kept
    equal on all ranks. The constructor is collective and blocking.
    """

    def __init__(
        self, module: Module, params: Sequence[Variable], buffers: Sequence[str], leaves: int,
        group: ProcessGroup | None,
    ) -> None:  # fmt: skip
        super().__init__(InlineReducer(1.0, group=group), [gradient_pass.PassBucket(params)])
        self.leaves = leaves
        self.members = members = internal.group_or_world(group)
        self.context = f"leaves: rank {members.rank} of {members.size}"
        self._buffers = LeafBuffers(module, buffers, group)
        depth, hosts = rows_needed(leaves, members.size), join_hosts(members)
        floating = self._buffers.floating()
        dtypes = dict.fromkeys([p.dtype for p in params] + [b.dtype for b in floating.values()])
        self._rows = [Rows(params, floating, dtype, depth, members, hosts) for dtype in dtypes]
        self._steps = 0
        self._is_open = False
        self._leaf = -1  # current leaf; -1 outside of leaves
        self._is_done = False  # whether the leaf's backward pass has completed
        self._error = ""  # error message of this step, or ""
        self._failure: BaseException | None = None  # exception of the current leaf's pass
        self.register_hooks()

    def rows_of(self, arrays: tuple[Array, ...]) -> int:
        """Return the number of rows of a global batch, or raise the errors of ``leaves``."""
        if not arrays:
            raise TypeError(f"{self.context}: expected the arrays of a global batch, got no array")
        for number, array in enumerate(arrays):
            if not isinstance(array, np.ndarray) or not array.ndim:
                shape = " of shape ()" if isinstance(array, np.ndarray) else ""
                raise TypeError(
                    f"{self.context}: expected NumPy arrays of shape (rows, ...), got "
                    f"{type(array).__name__}{shape} as array {number}"
                )
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1 or not lengths[0]:
            raise ValueError(
                f"{self.context}: expected arrays with the same number of rows, at least 1, got "
                f"{', '.join(map(str, lengths))}"
            )
        return lengths[0]

    def leaves_of_step(self, batch: int, arrays: Sequence[Array]) -> Iterator[Any]:
        """Yield this rank's leaves of a batch of ``batch`` rows. Then reduce the gradients."""
        self._open(batch, arrays)
        try:
            for leaf in self._own_leaves:
                self._leaf, self._is_done = leaf, False
                self._buffers.restore()
                for rows in self._rows:
                    for param, view in rows.gradients(len(self._stack)):
                        param.buffer = view
                self._use_numbers(leaf)
                rows_of_leaf = self._rows_of_leaves[leaf]
                views = tuple([array[rows_of_leaf.start : rows_of_leaf.stop] for array in arrays])
                yield views if len(views) > 1 else views[0]
                if not (self._error or self._is_done):
                    self._error = (
                        f"{self.context}: expected one backward pass per leaf, got none for leaf "
                        f"{leaf} of {self.leaves}. Call backward() in the body of the loop; "
                        "multiply the loss by 0 to ignore a leaf"
                    )
                if self._error:
                    self._failure = RuntimeError(self._error)
                    raise self._failure
            if not self._own_leaves:
                self._reduce()
        finally:
            self._end()

    def _open(self, rows: int, arrays: Sequence[Array]) -> None:
        if self._is_open:
            raise RuntimeError(
                f"{self.context}: expected no open loop over leaves of this module, got a second "
                "one on this rank. End or close the first loop"
            )
        self._count = count = min(rows, self.leaves)
        self._own_leaves = contiguous_share(count, self.members.rank, self.members.size)
        self._rows_of_leaves = [contiguous_share(rows, leaf, self.leaves) for leaf in range(count)]
        sizes = [len(rows_of_leaf) for rows_of_leaf in self._rows_of_leaves]
        # Sums of leaves of equal size are scaled at the end, unless a small dtype could overflow.
        is_narrow = any(row_set.dtype.itemsize < 4 for row_set in self._rows)
        is_even = len(set(sizes)) == 1 and not is_narrow
        self._weights = None if is_even else [size / rows for size in sizes]
        self._scale = 1 / count if is_even else 1.0
        self._count_step(rows, *arrays)
        self._used: set[Variable] = set()
        self._buffers.begin()
        self._stack: list[range] = []  # the leaves whose sum is stored in each row
        self._error = ""
        self._is_open, self._is_reduced, self._failure = True, False, None
        self._clear_gradients()

    @as_one
    def _count_step(self, rows: int, *arrays: Array) -> None:
        """Draw the seed of this step, and store facts that ``_compare`` compares over the ranks."""
        random.use(None)
        self._key = int(random.generator().integers(1 << 62))
        self._facts: dict[str, Any] = {"rows": rows, "step": self._steps}
        self._facts["random numbers"] = self._key
        if self.members.size > 1:
            self._facts |= {f"array {n}": describe_batch(x) for n, x in enumerate(arrays)}
        self._steps += 1

    @as_one
    def _use_numbers(self, leaf: int | None) -> None:
        """Use the random numbers of ``leaf`` from now on; None restores the normal generator."""
        random.use(None if leaf is None else [self._key, leaf])

    def _end(self) -> None:
        """End the step. If the gradients were not reduced, clear them and restore the buffers."""
        self._use_numbers(None)
        self._leaf, self._is_open = -1, False
        error, self._failure = self._failure, None
        if not self._is_reduced:
            # The next call of the other ranks is ``_compare``. They raise there.
            gradient_pass.fail_pass(self.members, error)
            self._buffers.restore()
            self._clear_gradients()

    def join_failed(self) -> None:
        """Join a pass that failed before its first gradient, so that all ranks raise."""
        if self._leaf >= 0 and not (self._running or self._is_reduced):
            self._join()

    def _prepare(self) -> None:
        if self._leaf < 0:
            raise RuntimeError(
                f"{self.context}: expected backward() inside of a loop over fl.leaves(...), "
                f"got one outside of it, with leaves={self.leaves}. Call backward() in the loop"
            )
        if self._is_done:
            self._error = (
                f"{self.context}: expected one backward pass per leaf, got a second one for leaf "
                f"{self._leaf} of {self.leaves}. Add the losses and call backward() once"
            )
            raise RuntimeError(self._error)

    def _send_bucket(self, bucket: gradient_pass.PassBucket, weight: float) -> None:
        """Do nothing: the gradients of a leaf are processed together in ``_finish``."""

    def fail(self) -> None:
        """Keep the exception until the end of the step, when the other ranks are notified."""
        self._has_failed, self._failure = True, sys.exc_info()[1]

    def end_failed(self) -> None:
        """Let the user catch the exception and run another backward pass for this leaf."""
        self._has_failed = False

    def _finish(self) -> None:
        """Push the leaf's gradients on the stack of sums. After this rank's last leaf, reduce."""
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
        if leaf == self._own_leaves[-1]:
            self._reduce()  # this includes the merges of the last leaf, so rows are read once
        elif merges := push(self._stack, range(leaf, leaf + 1), self._count):
            for rows in self._rows:
                rows.merge(row - merges, merges + 1)

    def _reduce(self) -> None:
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
        """Return for each parameter whether any rank used it; MismatchError if the steps differ."""
        if self.members.size == 1:
            return used
        agreed, any_used = equal_on_all_ranks(json.dumps(self._facts).encode(), self.members, *used)
        if agreed:
            return any_used
        differing = ", ".join(differences(gather_json(self._facts, self.members)))
        raise MismatchError(
            f"{self.context}: expected the same batch and step on every rank, got {differing}. "
            "Pass the whole global batch on every rank, run each loop over leaves to its end, and "
            "draw the same random numbers on every rank"
        )


def is_leaf_by_leaf(module: object) -> bool:
    return isinstance(module, Module) and isinstance(gradient_pass.pass_of(module), LeafSync)


def describe_batch(array: Array) -> str:
    rows = () if array.dtype.hasobject else (array[:1], array[-1:])
    ends = b"".join([row.reshape(-1)[:_DIGESTED].tobytes() for row in rows])
    return f"{array.dtype} {array.shape}, first and last row {crc32(ends):08x}"


# Each buffer changes by the mean of the leaves' changes. Unchanged buffers keep their bits.
class LeafBuffers(HoldsState):
    """The buffers ``names`` of ``module``. The constructor copies rank 0's values to all ranks."""

    def __init__(self, module: Module, names: Sequence[str], group: ProcessGroup | None) -> None:
        # A weak reference: the state of a module must not keep the module alive.
        self._module: Callable[[], Any] = weakref.ref(module)
        self._names, self._group = list(names), group
        if names:
            give_state(module, self._current(), 0, group)
        self._before = {name: np.array(value) for name, value in self._current().items()}
        self._averaged = list(self.floating())
        self._others = [name for name in names if name not in self._averaged]

    def floating(self) -> dict[str, Array]:
        """Return the buffers that are averaged, by name."""
        arrays = {name: x for name, x in self._current().items() if isinstance(x, np.ndarray)}
        return {n: x for n, x in arrays.items() if is_floating(x.dtype) or x.dtype.kind == "c"}

    def begin(self) -> None:
        for name, value in self._current().items():
            if isinstance(value, np.ndarray):
                self._before[name][...] = value  # replays of a captured step use this array
            else:
                self._before[name] = np.array(value)
        self._first: dict[str, Array] = {}  # non-averaged buffers after leaf 0, on rank 0

    def restore(self) -> None:
        self._set(self._before)

    def changes(self, is_first: bool) -> dict[str, Array]:
        """Return this leaf's changes of averaged buffers; copy other buffers if ``is_first``."""
        now = self._current()
        if is_first:
            self._first = {name: array_module(now[name]).array(now[name]) for name in self._others}
        with np.errstate(all="ignore"):  # statistics of a leaf may be infinite
            return {
                name: np.where(now[name] == self._before[name], 0, now[name] - self._before[name])
                for name in self._averaged
            }

    def end(self, means: Mapping[str, Array]) -> None:
        """Add the mean changes, and broadcast the non-floating buffers of leaf 0. Collective."""
        with np.errstate(all="ignore"):
            self._set({name: self._before[name] + mean for name, mean in means.items()})
        if self._others:
            self._set(self._first)
            now = self._current()
            give_state(self._module(), {name: now[name] for name in self._others}, 0, self._group)

    def _current(self) -> dict[str, Any]:
        if not self._names:
            return {}
        buffers = self._module().buffers
        return {name: buffers[name] for name in self._names}

    def _set(self, values: Mapping[str, Array]) -> None:
        now = self._current()
        for name, value in values.items():
            if isinstance(now[name], np.ndarray):
                now[name][...] = value
            else:
                put_buffer(self._module(), name, value.item())


def push(stack: list[range], leaves: range, count: int) -> int:
    """Push ``leaves``. Merge the top two while they form a node. Return the number of merges."""
    stack.append(leaves)
    merges = 0
    while len(stack) > 1:
        left, right = stack[-2:]
        size = 2 * len(left)  # number of leaves of the next larger block
        node = range(left.start, min(left.start + size, count))
        if node.start % size or node.stop != right.stop:
            break
        stack[-2:] = [node]
        merges += 1
    return merges


@functools.lru_cache(maxsize=256)
def stack_of(count: int, rank: int, ranks: int) -> tuple[list[range], int]:
    """Return the stack of ``rank`` before its last leaf is merged, and the maximum depth."""
    stack: list[range] = []
    depth = 0
    leaves = contiguous_share(count, rank, ranks)
    for leaf in leaves[:-1]:
        depth = max(depth, len(stack) + 1)
        push(stack, range(leaf, leaf + 1), count)
    if leaves:
        stack.append(leaves[-1:])
    return stack, max(depth, len(stack))


def additions(sums: Sequence[range], count: int) -> Steps:
    """Return additions (a, b): if sum b is added to sum a in this order, sum 0 is the total."""
    stack: list[range] = []
    numbers: list[int] = []
    steps = []
    for number, leaves in enumerate(sums):
        numbers.append(number)
        for _ in range(push(stack, leaves, count)):
            last = numbers.pop()
            steps.append((numbers[-1], last))
    return steps


@functools.lru_cache(maxsize=256)
def reduction(count: int, ranks: int, per_host: int) -> tuple[list[list[Subtree]], Steps]:
    """Return the ``Subtree`` sums of each host, and the additions of the sums of all hosts."""
    hosts, everywhere = [], []
    for first in range(0, ranks, per_host):
        sums = {
            (position, row): leaves
            for position in range(per_host)
            for row, leaves in enumerate(stack_of(count, first + position, ranks)[0])
        }
        on_host: list[range] = []
        for leaves in sums.values():
            push(on_host, leaves, count)
        subtrees = []
        for node in on_host:
            positions = [position for position, leaves in sums.items() if leaves.start in node]
            subtrees.append((positions, additions([sums[p] for p in positions], count)))
        hosts.append(subtrees)
        everywhere += on_host
    return hosts, additions(everywhere, count)


def rows_needed(leaves: int, ranks: int) -> int:
    """Return the maximum stack depth of any rank, for batches of at most ``leaves`` leaves."""
    counts = range(1, leaves + 1)
    return max(stack_of(n, rank, ranks)[1] for n in counts for rank in range(min(ranks, n)))


def fold(
    sources: Sequence[Array], steps: Sequence[tuple[int, int]], scale: float,
    targets: Sequence[Array],
) -> None:  # fmt: skip
    """Add flat arrays in the order ``steps`` and write ``scale`` times the sum to ``targets``.

    All arrays must have the same dtype and length. A target may be a source. Each sum is rounded to
    the dtype. If ``scale`` is not 1, the product is rounded too.
    """
    first = targets[0]
    block = max(1, _BLOCK_BYTES // first.itemsize)
    room = [array_module(first).empty(min(block, first.size), first.dtype) for _ in sources]
    factor = first.dtype.type(scale)
    with np.errstate(all="ignore"):  # a sum that overflows is infinite, as in every reduction
        for begin in range(0, first.size, block):
            part = slice(begin, begin + block)
            sums = [source[part] for source in sources]
            for a, b in steps:
                sums[a] = np.add(sums[a], sums[b], out=room[a][: sums[a].size])
            result = first[part]
            if scale != 1:
                np.multiply(sums[0], factor, out=result)
            elif sums[0].ctypes.data != result.ctypes.data:
                result[...] = sums[0]
            for target in targets[1:]:
                target[part] = result


def join_hosts(members: ProcessGroup) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Return the group of this host's ranks, and the group of one rank from each host.

    The ranks of the second group have the same position on their hosts. For a single host it is
    None. If hosts have unequal numbers of ranks, or ranks that are not consecutive, return
    ``members`` and None. Collective, blocking.
    """
    hosts = internal.host_memory.hosts_of(members)
    per_host = len(hosts[0])
    expected = [[*range(at, at + per_host)] for at in range(0, members.size, per_host)]
    if len(hosts) == 1 or per_host == 1 or hosts != expected:
        return members, None
    host, position = divmod(members.rank, per_host)
    return members.split(host), members.split(position)


# Each rank adds its share of the elements. It reads them from the rows of all ranks of the host,
# adds them with NumPy block by block, and writes the result into row 0 of every rank. Memory limits
# the speed, so native code would not be faster. No verb adds in the order of a tree. Between hosts,
# the sums of the shares are sent by all_to_all and all_gather, with as many bytes as an all_reduce.
class Rows(HoldsState):
    """Rows of memory for the gradients of ``params`` and the ``buffers`` that have ``dtype``.

    Row d stores entry d of the stack. There are ``depth`` rows, in shared memory of the host if it
    is available. The constructor is collective and blocking.
    """

    def __init__(
        self, params: Sequence[Variable], buffers: Mapping[str, Array], dtype: np.dtype[Any],
        depth: int, members: ProcessGroup, hosts: tuple[ProcessGroup, ProcessGroup | None],
    ) -> None:  # fmt: skip
        self.dtype, self._members = dtype, members
        local, self._across = hosts
        self.params = [param for param in params if param.dtype == dtype]
        self._names = [name for name, array in buffers.items() if array.dtype == dtype]
        arrays = [*(param.data for param in self.params), *(buffers[name] for name in self._names)]
        sizes, shapes = [a.size for a in arrays], [a.shape for a in arrays]
        step = _LINE * members.size
        self._width = max(1, -(-sum(sizes) // step)) * step  # equal shares of all ranks
        shape = depth, self._width
        backend, store = local.backend(), internal.host_memory.store_of(members)
        with local.journal.recording("shared_empty", like=(dtype, shape)):
            make = functools.partial(internal.memory_file.shared_arrays, backend, shape, dtype)
            self._by_rank = internal.memory_file.made_together(store, make)
        self._position = local.rank if len(self._by_rank) > 1 else 0
        self.rows = self._by_rank[self._position]
        if members.all_reduce(np.array(len(self._by_rank)), op="min") < local.size:
            self._by_rank, self._position, self._across = [self.rows], 0, members
        self.is_shared = len(self._by_rank) > 1
        self.rows[...] = 0
        ends = np.cumsum([0, *sizes]).tolist()
        self._views = [
            [row[a:b].reshape(s) for a, b, s in zip(ends, ends[1:], shapes, strict=False)]
            for row in self.rows
        ]

    def gradients(self, row: int) -> Iterator[tuple[Variable, Array]]:
        return zip(self.params, self._views[row], strict=False)

    def buffers(self, row: int) -> dict[str, Array]:
        return dict(zip(self._names, self._views[row][len(self.params) :], strict=True))

    def scale(self, row: int, factor: float) -> None:
        with np.errstate(all="ignore"):
            np.multiply(self.rows[row], self.dtype.type(factor), out=self.rows[row])

    def merge(self, first: int, count: int) -> None:
        """Sum ``count`` rows into row ``first``: add each row to the row before, last row first."""
        steps = [(a, a + 1) for a in reversed(range(count - 1))]
        fold(list(self.rows[first : first + count]), steps, 1.0, [self.rows[first]])

    def add_up(self, count: int, scale: float) -> None:
        """Set row 0 of every rank to ``scale`` times the sum over the batch's ``count`` leaves.

        Collective and blocking if there are several hosts. Every rank must write its shared rows
        before any rank calls this, and no rank may use them until all calls have returned.
        """
        hosts, last_steps = reduction(count, self._members.size, len(self._by_rank))
        share = self._width // len(self._by_rank)
        columns = slice(self._position * share, (self._position + 1) * share)
        own_first = [self._position, *(p for p in range(len(self._by_rank)) if p != self._position)]
        targets = [self._by_rank[position][0, columns] for position in own_first]
        subtrees = [
            ([self._by_rank[position][row, columns] for position, row in positions], steps)
            for positions, steps in hosts[self._members.rank // len(self._by_rank)]
        ]
        across = self._across
        if across is None:
            fold(*subtrees[0], scale, targets)
            return
        sums = []
        for sources, steps in subtrees:
            sums.append(np.empty_like(sources[0]) if steps else sources[0])
            if steps:
                fold(sources, steps, 1.0, [sums[-1]])
        # Ranks with the same position on the hosts have the same share. Each adds one part of it.
        size, part = across.size, share // across.size
        empty = np.empty((size, 0, part), self.dtype)  # what a rank without leaves sends
        parts = [array.reshape(size, 1, part) for array in sums] or [empty]
        sent = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).reshape(-1, part)
        counts = None if len({len(host) for host in hosts}) == 1 else [len(sums)] * size
        received: list[Array] = list(across.all_to_all(sent, rows=counts))
        fold(received, last_steps, scale, [received[0]])
        across.all_gather(received[0], out=targets[0])
        for target in targets[1:]:
            target[...] = targets[0]
