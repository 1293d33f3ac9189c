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
from typing import NamedTuple

import numpy as np

from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.device import Array, array_module

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
def reduction(count: int, ranks: int, per_host: int) -> Reduction:
    """Return how what is on the stacks of all ranks becomes one sum.

    ``per_host`` neighbouring ranks see each other's.
    """
    stacks = [stack_after(ops_of(count, rank, ranks))[0] for rank in range(ranks)]
    hosts = []
    for first in range(0, ranks, per_host):
        on_host = range(first, first + per_host)
        places = [(rank - first, row) for rank in on_host for row in range(len(stacks[rank]))]
        sums = [leaves for rank in on_host for leaves in stacks[rank]]
        hosts.append(_host(places, sums, count))
    subtrees = [each.leaves for host in hosts for each in host]
    return Reduction(hosts, additions(subtrees, count, range(count)))


def _host(places: list[tuple[int, int]], sums: list[range], count: int) -> list[Subtree]:
    if not sums:
        return []
    found = []
    for leaves in stack_after(program(range(sums[0].start, sums[-1].stop), count))[0]:
        inside = [number for number, each in enumerate(sums) if each.start in leaves]
        steps = additions([sums[number] for number in inside], count, leaves)
        found.append(Subtree(leaves, [places[number] for number in inside], steps))
    return found


class Subtree(NamedTuple):
    """A sum that a host hands on: of which (local rank, row), and by which additions."""

    leaves: range
    places: list[tuple[int, int]]
    steps: list[tuple[int, int]]


class Reduction(NamedTuple):
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
