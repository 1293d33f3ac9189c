"""Order of the additions of leaf gradients: a binary tree by the index of the leaf.

Leaf i is a contiguous part of the batch. The nodes of the tree are blocks of 1, 2, 4, ... leaves
that begin at a multiple of their size. If the number of leaves is not a power of two, a node with
one child equals this child. A rank processes its contiguous leaves with a stack. It pushes each
leaf, and replaces the top two entries by their sum if they are the children of one node. Complete
subtrees remain on the stack and become terms of the sums above them. So the additions are the same
for any number of ranks. In this module, ``count`` is the number of leaves of the batch.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.dataset.dataset import contiguous_share
from flashlight_py.device import Array, array_module
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import host_memory, memory_file, memory_room
from flashlight_py.structure import HoldsState

# Additions in their order: (a, b) adds sum b to sum a.
Steps: TypeAlias = "list[tuple[int, int]]"
# A sum of leaves that one host computes: its rows as (rank on the host, row), and the additions.
Subtree: TypeAlias = "tuple[list[tuple[int, int]], Steps]"

_LINE = 64  # elements; each rank's share begins at a multiple, so ranks write different cache lines
_BLOCK_BYTES = 64 << 10  # bytes of each array in a block; sums stay in the L2 cache


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
    hosts = host_memory.hosts_of(members)
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
        backend, store = local.backend(), host_memory.store_of(members)
        with local.journal.recording("shared_empty", like=(dtype, shape)):
            make = functools.partial(memory_room.shared_arrays, backend, shape, dtype)
            self._by_rank = memory_file.made_together(store, make)
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
