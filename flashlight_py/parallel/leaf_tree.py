"""In which order the leaves of a batch are added up: a binary tree by index, whoever has which.

Leaf i is a contiguous part of the batch. The tree's nodes are the aligned blocks of 1, 2, 4, ...
leaves; where the number of leaves is no power of two, a node with one child is that child. A rank
works through its neighbouring leaves as a stack machine: it pushes each, and replaces the two on
top by their sum where both children of a node are there. What is left on its stack are complete
subtrees, which go into the sums above them: so the additions are the same for any number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.device import Array

MERGE = -1
"""In a program: replace the two on top of the stack by their sum."""

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


def additions(sums: Sequence[range], count: int) -> list[tuple[int, int]]:
    """Return how sums of subtrees become that of all ``count`` leaves: (a, b): add number b to a.

    ``sums`` are the leaves of each, in order. The result is number 0.

    Example:
        >>> additions([range(2), range(2, 3), range(3, 4)], 4)
        [(1, 2), (0, 1)]
    """
    stack: list[int] = []
    found = []
    starts = {leaves.start: number for number, leaves in enumerate(sums)}
    inside = {leaf for leaves in sums for leaf in leaves if leaf != leaves.start}
    pending: list[tuple[int, int]] = []  # of the stack: the leaves that each entry has
    for op in program(range(count), count):
        if op != MERGE:
            stack.append(starts.get(op, -1))
            pending.append((op, op + 1))
            continue
        right, left = stack.pop(), stack.pop()
        (_, end), (begin, middle) = pending.pop(), pending.pop()
        pending.append((begin, end))
        if middle not in inside:  # not within one of the sums
            found.append((left, right))
        stack.append(left)
    return found


@functools.lru_cache(maxsize=256)
def plan(count: int, rank: int, ranks: int, merged: bool) -> Plan:
    """Return the plan of ``rank`` for a batch in which ``count`` leaves have rows."""
    programs = [_program_of(count, each, ranks, merged) for each in range(ranks)]
    stacks = [stack_after(ops)[0] for ops in programs]
    sums = [leaves for stack in stacks for leaves in stack]
    return Plan(programs[rank], [len(stack) for stack in stacks], additions(sums, count))


def _program_of(count: int, rank: int, ranks: int, merged: bool) -> list[int]:
    ops = program(contiguous_share(count, rank, ranks), count)
    while not merged and ops and ops[-1] == MERGE:
        ops.pop()
    return ops


def rows_needed(leaves: int, ranks: int) -> int:
    """Return the deepest stack of any rank, in any batch that is cut into at most ``leaves``."""
    return max(
        stack_after(_program_of(count, rank, ranks, True))[1]
        for count in range(1, leaves + 1)
        for rank in range(min(ranks, count))
    )


class Plan:
    """What a rank does in a step.

    ``ops``: its program. ``merged`` programs end with the sums of complete subtrees; else the last
    leaf is left on the stack with all that waits for it, and one pass over memory adds up
    everything. ``heights``: how many sums each rank has then. ``steps``: the additions of the sums
    of all ranks, in rank order.
    """

    def __init__(self, ops: list[int], heights: list[int], steps: list[tuple[int, int]]) -> None:
        self.ops, self.heights, self.steps = ops, heights, steps
        self.leaves = [op for op in ops if op != MERGE]


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
    room = [np.empty(min(block, first.size), first.dtype) for _ in sources]
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
