"""The memory of the leaves' gradients: rows that work as a stack, and their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.memory.host_memory import hosts_of
from flashlight_py.parallel.leaf_tree import MERGE, Subtree, fold, reduction

_LINE = 64  # elements: the shares of two ranks begin on lines of their own


class Joined(NamedTuple):
    """Ranks that see each other's memory, and this rank's counterparts on other hosts.

    ``across`` is None where all ranks are on one host.
    """

    local: ProcessGroup
    across: ProcessGroup | None


def join_hosts(members: ProcessGroup) -> Joined:
    """Find out who shares memory. Collective on several hosts, and blocking.

    Hosts with unequal numbers of ranks, or with ranks that are no neighbours, count as one, which
    then turns out to share no memory.
    """
    hosts = hosts_of(members)
    per_host = len(hosts[0])
    expected = [[*range(at, at + per_host)] for at in range(0, members.size, per_host)]
    if len(hosts) == 1 or per_host == 1 or hosts != expected:
        return Joined(members, None)
    host, place = divmod(members.rank, per_host)
    return Joined(members.split(host), members.split(place))


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
        hosts: Joined,
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
        sums = [self._folded(subtree, mine) for subtree in host]
        heights = [len(subtrees) for subtrees in plan.hosts]
        result = self._exchanged(sums, heights, plan.steps, scale, share)
        self._across.all_gather(result, targets[0])
        for target in targets[1:]:
            target[...] = targets[0]

    def _folded(self, subtree: Subtree, mine: slice) -> Array:
        sources = [self._seen[place][row, mine] for place, row in subtree.places]
        if len(sources) > 1:
            result = np.empty_like(sources[0])
            fold(sources, subtree.steps, 1.0, [result])
            return result
        return sources[0]

    def _exchanged(
        self,
        sums: list[Array],
        heights: list[int],
        steps: Sequence[tuple[int, int]],
        scale: float,
        share: int,
    ) -> Array:
        """Return this rank's part of this share of the sum of all hosts."""
        assert self._across is not None
        size, part = self._across.size, share // self._across.size
        parts = [each.reshape(size, part) for each in sums]
        if len(parts) == 1:
            sent = parts[0]
        else:
            sent = np.empty((size, len(parts), part), self.dtype)
            for number, each in enumerate(parts):
                sent[:, number] = each
            sent = sent.reshape(size * len(parts), part)
        is_even = len(set(heights)) == 1
        got: list[Array] = list(
            self._across.all_to_all(sent, None if is_even else [len(sums)] * size)
        )
        fold(got, steps, scale, [got[0]])
        return got[0]


def merges_after(ops: Sequence[int], position: int) -> int:
    """Return how many times a program merges right after the leaf at ``position``."""
    count = 0
    while position + 1 + count < len(ops) and ops[position + 1 + count] == MERGE:
        count += 1
    return count
