"""The order in which leaves are added up: one tree, whoever has which leaf."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.parallel.leaf_tree import additions, fold, push, reduction, rows_needed, stack_of


def in_words(leaves: range, count: int) -> list[str]:
    """What is on the stack of a rank that merges whenever it can."""
    stack: list[range] = []
    words: list[str] = []
    for leaf in leaves:
        words.append(str(leaf))
        for _ in range(push(stack, range(leaf, leaf + 1), count)):
            last = words.pop()
            words[-1] = f"({words[-1]}+{last})"
    return words


def test_the_tree_of_eight_leaves() -> None:
    assert in_words(range(8), 8) == ["(((0+1)+(2+3))+((4+5)+(6+7)))"]
    assert in_words(range(6), 6) == ["(((0+1)+(2+3))+(4+5))"]
    assert in_words(range(7), 7) == ["(((0+1)+(2+3))+((4+5)+6))"]
    assert in_words(range(3, 6), 8) == ["3", "(4+5)"]


@pytest.mark.parametrize("hosts", ["one", "two", "as many as ranks"])
def test_any_number_of_ranks_adds_up_the_same_tree(hosts: str) -> None:
    for count, ranks in itertools.product(range(1, 10), range(1, 12)):
        per_host = {"one": ranks, "two": ranks // 2}.get(hosts, 1)
        if not per_host or ranks % per_host:
            continue
        stacks = []
        for rank in range(ranks):
            leaves, depth = stack_of(count, rank, ranks)
            assert [*itertools.chain(*leaves)] == [*contiguous_share(count, rank, ranks)]
            assert depth <= rows_needed(count, ranks)
            *merged, last = [*contiguous_share(count, rank, ranks)] or [None]
            stacks.append([*in_words(merged, count), *([] if last is None else [str(last)])])
            assert len(stacks[-1]) == len(leaves)
        by_host, steps = reduction(count, ranks, per_host)
        sums = []
        for host, subtrees in enumerate(by_host):
            for places, own_steps in subtrees:
                parts = [stacks[host * per_host + place][row] for place, row in places]
                sums.append(added(parts, own_steps))
        assert added(sums, steps) == in_words(range(count), count)[0], (count, ranks)


def added(sums: list[str], steps: Sequence[tuple[int, int]]) -> str:
    for a, b in steps:
        sums[a] = f"({sums[a]}+{sums[b]})"
    return sums[0]


def test_a_rank_holds_few_rows() -> None:
    assert [rows_needed(8, ranks) for ranks in (1, 2, 3, 4, 5, 8, 9)] == [4, 3, 3, 2, 2, 1, 1]
    assert additions([range(2), range(2, 3), range(3, 4)], 4) == [(1, 2), (0, 1)]


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_folding_adds_in_the_order_of_the_steps_into_all_targets(scale: float) -> None:
    random = np.random.default_rng(0)
    a, b, c = random.standard_normal((3, 40_000), dtype=np.float32)
    expected = (a + (b + c)) * np.float32(scale)
    other = np.zeros_like(a)
    fold([a, b, c], [(1, 2), (0, 1)], scale, [a, other])
    assert a.tobytes() == other.tobytes() == expected.tobytes()
