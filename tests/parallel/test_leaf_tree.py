"""The order in which leaves are added up: one tree, whoever has which leaf."""

from __future__ import annotations

import numpy as np
import pytest

from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.parallel.leaf_tree import MERGE, fold, plan, program, rows_needed, stack_after


def in_words(ops: list[int]) -> list[str]:
    """What a program leaves on its stack."""
    stack: list[str] = []
    for op in ops:
        if op == MERGE:
            last = stack.pop()
            stack[-1] = f"({stack[-1]}+{last})"
        else:
            stack.append(str(op))
    return stack


def test_the_tree_of_eight_leaves() -> None:
    assert in_words(program(range(8), 8)) == ["(((0+1)+(2+3))+((4+5)+(6+7)))"]
    assert in_words(program(range(6), 6)) == ["(((0+1)+(2+3))+(4+5))"]
    assert in_words(program(range(3, 6), 8)) == ["3", "(4+5)"]


@pytest.mark.parametrize("merged", [True, False])
def test_any_number_of_ranks_adds_up_the_same_tree(merged: bool) -> None:
    for count in range(1, 10):
        (expected,) = in_words(program(range(count), count))
        for ranks in range(1, 12):
            sums = []
            for rank in range(ranks):
                mine = plan(count, rank, ranks, merged)
                assert mine.leaves == list(contiguous_share(count, rank, ranks))
                stack, deepest = stack_after(mine.ops)
                assert len(stack) == mine.heights[rank]
                assert deepest <= rows_needed(count, ranks)
                sums += in_words(mine.ops)
            for a, b in mine.steps:
                sums[a] = f"({sums[a]}+{sums[b]})"
            assert sums[0] == expected, (count, ranks)


def test_a_rank_holds_few_rows() -> None:
    assert [rows_needed(8, ranks) for ranks in (1, 2, 3, 4, 5, 8, 9)] == [4, 3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_folding_adds_in_the_order_of_the_steps_into_all_targets(scale: float) -> None:
    random = np.random.default_rng(0)
    a, b, c = random.standard_normal((3, 40_000), dtype=np.float32)
    expected = (a + (b + c)) * np.float32(scale)
    other = np.zeros_like(a)
    fold([a, b, c], [(1, 2), (0, 1)], scale, [a, other])
    assert a.tobytes() == other.tobytes() == expected.tobytes()
