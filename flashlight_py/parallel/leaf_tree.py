"""In which order the leaves of a batch are added up: a binary tree by index, whoever has which.

Leaf i is a contiguous part of the batch. The tree's nodes are the aligned blocks of 1, 2, 4, ...
leaves; where the number of leaves is no power of two, a node with one child is that child. A rank
works through its neighbouring leaves as a stack machine: it pushes each, and replaces the two on
top by their sum where both children of a node are there. Complete subtrees are left on its stack,
which go into the sums above them: so the additions are the same for any number of ranks.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.device import Array, array_module
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import hosts_of, made_together, shared_arrays, store_of
from flashlight_py.structure import HoldsState

Steps: TypeAlias = "list[tuple[int, int]]"

# A sum that a host hands on: of which (local rank, row), and by which additions.
Subtree: TypeAlias = "tuple[list[tuple[int, int]], Steps]"

_LINE = 64  # elements: the shares of two ranks begin on lines of their own
_BLOCK_BYTES = 64 << 10  # of each array at a time: partial sums stay in a second-level cache


def push(stack: list[range], leaves: range, count: int) -> int:
    """Push the sum of ``leaves``, of ``count`` in all; return how many pairs became their node."""
    stack.append(leaves)
    merges = 0
    while len(stack) > 1:
        left, right = stack[-2:]
        size = 2 * len(left)  # what has something to its right is a whole block
        node = range(left.start, min(left.start + size, count))
        if node.start % size or node.stop != right.stop:
            break
        stack[-2:] = [node]
        merges += 1
    return merges


@functools.lru_cache(maxsize=256)
def stack_of(count: int, rank: int, ranks: int) -> tuple[list[range], int]:
    """Return the sums that ``rank`` has after its last of ``count`` leaves, and its deepest stack.

    The last leaf is not merged: one pass over memory adds up all that is left.
    """
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
    """Return how ``sums`` of neighbouring leaves become number 0: (a, b): add number b to a."""
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
    """Return the sums of each host, of ``per_host`` ranks, and how all of them become one."""
    hosts, everywhere = [], []
    for first in range(0, ranks, per_host):
        sums = {
            (place, row): leaves
            for place in range(per_host)
            for row, leaves in enumerate(stack_of(count, first + place, ranks)[0])
        }
        on_host: list[range] = []
        for leaves in sums.values():
            push(on_host, leaves, count)
        subtrees = []
        for node in on_host:
            places = [place for place, leaves in sums.items() if leaves.start in node]
            subtrees.append((places, additions([sums[place] for place in places], count)))
        hosts.append(subtrees)
        everywhere += on_host
    return hosts, additions(everywhere, count)


def rows_needed(leaves: int, ranks: int) -> int:
    """Return the deepest stack of any rank, in any batch that is cut into at most ``leaves``."""
    counts = range(1, leaves + 1)
    return max(stack_of(n, rank, ranks)[1] for n in counts for rank in range(min(ranks, n)))


def fold(
    sources: Sequence[Array],
    steps: Sequence[tuple[int, int]],
    scale: float,
    targets: Sequence[Array],
) -> None:
    """Add up flat arrays of one dtype and length by ``steps``, times ``scale``, into ``targets``.

    All targets receive the same; one may be one of the sources. Nothing is rounded but each sum to
    the dtype, and once more for a ``scale`` that is not 1.
    """
    first = targets[0]
    block = max(1, _BLOCK_BYTES // first.itemsize)
    xp = array_module(first)
    room = [xp.empty(min(block, first.size), first.dtype) for _ in sources]
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
    """Return the ranks of this host, and this rank's counterparts on others, None on a single one.

    Hosts with unequal numbers of ranks, or with ranks that are no neighbours, count as one, which
    then turns out to share no memory. Collective on several hosts, and blocking.
    """
    hosts = hosts_of(members)
    per_host = len(hosts[0])
    expected = [[*range(at, at + per_host)] for at in range(0, members.size, per_host)]
    if len(hosts) == 1 or per_host == 1 or hosts != expected:
        return members, None
    host, place = divmod(members.rank, per_host)
    return members.split(host), members.split(place)


# Each rank takes its share of the elements: it reads them where they lie in the rows of the host's
# ranks, NumPy adds them, block by block, and the result goes into row 0 of all of them: a kernel
# would wait for the same memory, and the order is that of a tree, which no verb has. Between hosts
# the sums of the shares travel by all_to_all and all_gather, as much as in an all_reduce.
class Rows(HoldsState):
    """The gradients of those of ``params`` of a dtype, and the ``buffers``, side by side in a row.

    Row d is entry d of the stack. ``depth`` rows, of memory that all ranks of a host see where
    there is such memory. Making it is collective, and blocks.
    """

    def __init__(
        self,
        params: Sequence[Variable],
        buffers: Mapping[str, Array],
        dtype: np.dtype[Any],
        depth: int,
        members: ProcessGroup,
        hosts: tuple[ProcessGroup, ProcessGroup | None],
    ) -> None:
        self.dtype, self._members = dtype, members
        local, self._across = hosts
        self.params = [param for param in params if param.dtype == dtype]
        self._names = [name for name, array in buffers.items() if array.dtype == dtype]
        arrays = [*(param.data for param in self.params), *(buffers[name] for name in self._names)]
        sizes, shapes = [a.size for a in arrays], [a.shape for a in arrays]
        step = _LINE * members.size
        self._width = max(1, -(-sum(sizes) // step)) * step  # each rank's share is as large
        shape = depth, self._width
        backend, store = local.backend(), store_of(members)
        with local.journal.recording("shared_empty", like=(dtype, shape)):
            self._seen = made_together(store, lambda: shared_arrays(backend, shape, dtype))
        self._place = local.rank if len(self._seen) > 1 else 0
        self.own = self._seen[self._place]
        if members.all_reduce(np.array(len(self._seen)), op="min") < local.size:
            self._seen, self._place, self._across = [self.own], 0, members
        self.is_shared = len(self._seen) > 1
        self.own[...] = 0
        ends = np.cumsum([0, *sizes]).tolist()
        self._views = [
            [row[a:b].reshape(s) for a, b, s in zip(ends, ends[1:], shapes, strict=False)]
            for row in self.own
        ]

    def gradients(self, row: int) -> Iterator[tuple[Variable, Array]]:
        """Return each parameter and where its gradient lies in ``row``."""
        return zip(self.params, self._views[row], strict=False)

    def buffers(self, row: int) -> dict[str, Array]:
        """Return where the buffers lie in ``row``."""
        return dict(zip(self._names, self._views[row][len(self.params) :], strict=True))

    def scale(self, row: int, factor: float) -> None:
        """Multiply a row by ``factor``, in place."""
        with np.errstate(all="ignore"):
            np.multiply(self.own[row], self.dtype.type(factor), out=self.own[row])

    def merge(self, first: int, count: int) -> None:
        """Replace ``count`` rows from ``first`` on by their sum, the last ones first."""
        steps = [(a, a + 1) for a in reversed(range(count - 1))]
        fold(list(self.own[first : first + count]), steps, 1.0, [self.own[first]])

    def add_up(self, count: int, scale: float) -> None:
        """Make row 0 of every rank the sum of all ``count`` leaves, times ``scale``.

        Collective and blocking on several hosts. Where the rows are shared every rank must have
        written its own before any calls this, and none may touch them until all have returned.
        """
        hosts, last_steps = reduction(count, self._members.size, len(self._seen))
        share = self._width // len(self._seen)
        mine = slice(self._place * share, (self._place + 1) * share)
        own_first = [self._place, *(p for p in range(len(self._seen)) if p != self._place)]
        targets = [self._seen[place][0, mine] for place in own_first]
        subtrees = [
            ([self._seen[place][row, mine] for place, row in places], steps)
            for places, steps in hosts[self._members.rank // len(self._seen)]
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
        # Each host gets its part of this share of all hosts' sums.
        size, part = across.size, share // across.size
        nothing = np.empty((size, 0, part), self.dtype)  # of a rank without leaves
        parts = [each.reshape(size, 1, part) for each in sums] or [nothing]
        sent = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).reshape(-1, part)
        is_even = len({len(host) for host in hosts}) == 1
        counts = None if is_even else [len(sums)] * size
        got: list[Array] = list(across.all_to_all(sent, rows=counts))
        fold(got, last_steps, scale, [got[0]])
        across.all_gather(got[0], out=targets[0])
        for target in targets[1:]:
            target[...] = targets[0]
