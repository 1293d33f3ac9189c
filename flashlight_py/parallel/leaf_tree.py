"""In which order the leaves of a batch are added up: a binary tree by index, whoever has which.

Leaf i is a contiguous part of the batch. The tree's nodes are the aligned blocks of 1, 2, 4, ...
leaves; where the number of leaves is no power of two, a node with one child is that child. A rank
works through its neighbouring leaves as a stack machine: it pushes each, and replaces the two on
top by their sum where both children of a node are there. What is left on its stack are complete
subtrees, which go into the sums above them: so the additions are the same for any number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.device import Array, array_module
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.reducers.host_memory import hosts_of

MERGE = -1
"""In a program: replace the two on top of the stack by their sum."""

_LINE = 64  # elements: the shares of two ranks begin on lines of their own
_BLOCK_BYTES = 64 << 10  # of each array at a time: partial sums stay in a second-level cache


def program(mine: range, count: int) -> list[int]:
    """Return what a rank with the leaves ``mine`` of ``count`` does: leaves to push, and ``MERGE``.

    Example:
        >>> program(range(3), 8)
        [0, 1, -1, 2]
    """
    size = 1
    while size < count:
        size *= 2
    return _below(0, size, mine, count)


def _below(begin: int, size: int, mine: range, count: int) -> list[int]:
    end = min(begin + size, count)
    if end <= mine.start or begin >= mine.stop or begin >= end:
        return []
    if size == 1:
        return [begin]
    half = size // 2
    left, right = (_below(at, half, mine, count) for at in (begin, begin + half))
    is_whole = mine.start <= begin and end <= mine.stop
    return [*left, *right, *([MERGE] if right and is_whole else [])]


def stack_after(ops: Sequence[int]) -> tuple[list[range], int]:
    """Return the leaves of each sum that a program leaves on the stack, and the deepest stack."""
    stack: list[range] = []
    deepest = 0
    for op in ops:
        if op == MERGE:
            last = stack.pop()
            stack[-1] = range(stack[-1].start, last.stop)
        else:
            stack.append(range(op, op + 1))
            deepest = max(deepest, len(stack))
    return stack, deepest


def additions(sums: Sequence[range], count: int, within: range) -> list[tuple[int, int]]:
    """Return how sums of subtrees become that of a larger one: (a, b): add number b to number a.

    ``sums`` are the leaves of each, in order; ``within`` those of the larger subtree, of ``count``
    in all. The result is number 0.

    Example:
        >>> additions([range(2), range(2, 3), range(3, 4)], 4, range(4))
        [(1, 2), (0, 1)]
    """
    starts = {leaves.start: number for number, leaves in enumerate(sums)}
    stack: list[range] = []
    found = []
    for op in program(within, count):
        if op != MERGE:
            stack.append(range(op, op + 1))
            continue
        right = stack.pop()
        if right.start in starts:  # else the node is in one of the sums
            found.append((starts[stack[-1].start], starts[right.start]))
        stack[-1] = range(stack[-1].start, right.stop)
    return found


@functools.lru_cache(maxsize=256)
def ops_of(count: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the program of ``rank`` for a batch in which ``count`` leaves have rows.

    After its last leaf nothing is merged: one pass over memory adds up all that is left.
    """
    ops = program(contiguous_share(count, rank, ranks), count)
    while ops and ops[-1] == MERGE:
        ops.pop()
    return tuple(ops)


@functools.lru_cache(maxsize=256)
def reduction(count: int, ranks: int, per_host: int) -> TreeReduction:
    """Return how what is on the stacks of all ranks becomes one sum.

    ``per_host`` neighbouring ranks see each other's.
    """
    stacks = [stack_after(ops_of(count, rank, ranks))[0] for rank in range(ranks)]
    hosts = []
    for first in range(0, ranks, per_host):
        on_host = range(first, first + per_host)
        places = [(rank - first, row) for rank in on_host for row in range(len(stacks[rank]))]
        sums = [leaves for rank in on_host for leaves in stacks[rank]]
        mine = range(sums[0].start, sums[-1].stop) if sums else range(0)
        subtrees = []
        for leaves in stack_after(program(mine, count))[0]:
            inside = [number for number, each in enumerate(sums) if each.start in leaves]
            steps = additions([sums[number] for number in inside], count, leaves)
            subtrees.append(Subtree(leaves, [places[number] for number in inside], steps))
        hosts.append(subtrees)
    sums = [each.leaves for host in hosts for each in host]
    return TreeReduction(hosts, additions(sums, count, range(count)))


class Subtree(NamedTuple):
    """A sum that a host hands on: of which (local rank, row), and by which additions."""

    leaves: range
    places: list[tuple[int, int]]
    steps: list[tuple[int, int]]


class TreeReduction(NamedTuple):
    """The subtrees of each host, in order, and the additions of all of them."""

    hosts: list[list[Subtree]]
    steps: list[tuple[int, int]]


def rows_needed(leaves: int, ranks: int) -> int:
    """Return the deepest stack of any rank, in any batch that is cut into at most ``leaves``."""
    return max(
        stack_after(ops_of(count, rank, ranks))[1]
        for count in range(1, leaves + 1)
        for rank in range(min(ranks, count))
    )


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


class HostRanks(NamedTuple):
    """Ranks that see each other's memory, and this rank's counterparts on other hosts.

    ``across`` is None where all ranks are on one host.
    """

    local: ProcessGroup
    across: ProcessGroup | None


def join_hosts(members: ProcessGroup) -> HostRanks:
    """Find out who shares memory. Collective on several hosts, and blocking.

    Hosts with unequal numbers of ranks, or with ranks that are no neighbours, count as one, which
    then turns out to share no memory.
    """
    hosts = hosts_of(members)
    per_host = len(hosts[0])
    expected = [[*range(at, at + per_host)] for at in range(0, members.size, per_host)]
    if len(hosts) == 1 or per_host == 1 or hosts != expected:
        return HostRanks(members, None)
    host, place = divmod(members.rank, per_host)
    return HostRanks(members.split(host), members.split(place))


# Ranks read each other's rows where they lie and NumPy adds them, block by block: a kernel would
# wait for the same memory, and the order is that of a tree, which no verb has. Between hosts each
# rank exchanges the host's sums of its share of the elements, by all_to_all and all_gather, which
# move as much as an all_reduce.
class Rows:
    """All parameters' gradients of one dtype, and all buffers', side by side in each row.

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
        hosts: HostRanks,
    ) -> None:
        self.params = params
        self.dtype = dtype
        self._members, self._across = members, hosts.across
        arrays = [*(param.data for param in params), *buffers.values()]
        sizes, shapes = [a.size for a in arrays], [a.shape for a in arrays]
        step = _LINE * members.size
        self._width = max(1, -(-sum(sizes) // step)) * step  # each rank's share is as large
        shape = depth, self._width
        local = hosts.local
        with local.journal.recording("shared_empty", like=(dtype, shape)):
            self._seen = local.backend().shared_by_all(shape, dtype)
        self._place = local.rank if len(self._seen) > 1 else 0
        self.own = self._seen[self._place]
        if members.all_reduce(np.array(len(self._seen)), op="min") < local.size:
            self._seen, self._place, self._across = [self.own], 0, members
        self.own[...] = 0
        ends = np.cumsum([0, *sizes]).tolist()
        self._views = [
            [row[a:b].reshape(s) for a, b, s in zip(ends, ends[1:], shapes, strict=False)]
            for row in self.own
        ]
        self._names = list(buffers)

    @property
    def is_shared(self) -> bool:
        """Whether this rank sees other ranks' rows."""
        return len(self._seen) > 1

    def gradients(self, row: int) -> list[Array]:
        """Return where the parameters' gradients lie in ``row``, in their order."""
        return self._views[row][: len(self.params)]

    def buffers(self, row: int) -> dict[str, Array]:
        """Return where the buffers lie in ``row``."""
        views = self._views[row][len(self.params) :]
        return dict(zip(self._names, views, strict=True))

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

        Each rank takes its share of the elements: it reads them where they lie in the memory of the
        host's ranks, exchanges the host's sums with its counterparts elsewhere, and writes the
        result into row 0 of all ranks of the host.
        """
        plan = reduction(count, self._members.size, len(self._seen))
        share = self._width // len(self._seen)
        mine = slice(self._place * share, (self._place + 1) * share)
        own_first = [self._place, *(p for p in range(len(self._seen)) if p != self._place)]
        targets = [self._seen[place][0, mine] for place in own_first]
        host = plan.hosts[self._members.rank // len(self._seen)]
        if self._across is None:
            sources = [self._seen[place][row, mine] for place, row in host[0].places]
            fold(sources, host[0].steps, scale, targets)
            return
        sums = []
        for subtree in host:
            sources = [self._seen[place][row, mine] for place, row in subtree.places]
            sums.append(sources[0] if len(sources) == 1 else np.empty_like(sources[0]))
            if len(sources) > 1:
                fold(sources, subtree.steps, 1.0, [sums[-1]])
        # Each host gets its part of this share of all hosts' sums.
        size, part = self._across.size, share // self._across.size
        sent = sums[0].reshape(size, part) if len(sums) == 1 else None
        if sent is None:
            sent = np.empty((size, len(sums), part), self.dtype)
            for number, each in enumerate(sums):
                sent[:, number] = each.reshape(size, part)
            sent = sent.reshape(size * len(sums), part)
        is_even = len({len(subtrees) for subtrees in plan.hosts}) == 1
        counts = None if is_even else [len(sums)] * size
        got: list[Array] = list(self._across.all_to_all(sent, counts))
        fold(got, plan.steps, scale, [got[0]])
        self._across.all_gather(got[0], targets[0])
        for target in targets[1:]:
            target[...] = targets[0]
