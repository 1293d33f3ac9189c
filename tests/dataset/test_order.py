"""Order of an epoch and partitions of samples."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlight_py.dataset import partition_by_round_robin
from flashlight_py.dataset.dataset import epoch_order
from tests.tables import for_each

SEEDS = st.integers(0, 2**80)


@given(st.integers(0, 500), SEEDS, st.integers(0, 10**6))
def test_epoch_order_is_a_repeatable_permutation(n: int, seed: int, epoch: int) -> None:
    order = epoch_order(n, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    np.testing.assert_array_equal(order, epoch_order(n, seed, epoch))


@for_each(
    "seed epoch expected",
    [
        (0, 0, [6, 3, 8, 1, 4, 5, 9, 2, 7, 0]),
        (0, 1, [1, 3, 8, 6, 2, 0, 7, 5, 4, 9]),
        (1, 0, [4, 6, 1, 3, 9, 8, 2, 0, 5, 7]),
        (2**70, 3, [3, 9, 4, 1, 6, 5, 7, 2, 0, 8]),
    ],
)
def test_epoch_order_is_equal_with_every_numpy(seed: int, epoch: int, expected: list[int]) -> None:
    """A change of these numbers changes the training of every user with a fixed seed."""
    assert epoch_order(10, seed, epoch).tolist() == expected
    thousand = epoch_order(1000, 7, 7)
    assert int((thousand * np.arange(1000)).sum()) == 250631684


def test_epoch_order_differs_between_a_large_seed_and_a_later_epoch() -> None:
    """As a sequence of words, seed 1 in epoch 5 would equal seed 1 + 5 * 2**32 in epoch 0."""
    assert epoch_order(50, 1, 5).tolist() != epoch_order(50, 1 + 5 * 2**32, 0).tolist()


def test_epoch_order_puts_each_sample_first_equally_often() -> None:
    firsts = np.bincount([epoch_order(8, 3, epoch)[0] for epoch in range(4000)], minlength=8)
    # Expected 500 each, with a standard deviation of 21.
    assert (abs(firsts - 500) < 100).all(), firsts


def dealt(*arguments: int, **options: bool) -> list[list[int]]:
    n, partitions, batch_size = arguments
    return [
        partition_by_round_robin(n, i, partitions, batch_size, **options).tolist()
        for i in range(partitions)
    ]


@for_each(
    "n partitions batch_size expected",
    [
        (8, 2, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (7, 2, 1, [[0, 2, 4], [1, 3, 5]]),
        (7, 2, 2, [[0, 1, 4, 5], [2, 3, 6]]),
        (11, 2, 4, [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10]]),
        (9, 2, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 3, 4, [[], [], []]),
        (0, 2, 1, [[], []]),
    ],
)
def test_partition_assigns_batches_in_turn(
    n: int, partitions: int, batch_size: int, expected: list[list[int]]
) -> None:
    assert dealt(n, partitions, batch_size) == expected
    assert dealt(9, 2, 4, allow_empty=True) == [[0, 1, 2, 3, 8], [4, 5, 6, 7]]
    assert dealt(2, 3, 4, allow_empty=True) == [[0], [1], []]


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 9))
def test_partitions_are_disjoint_and_equally_long(n: int, partitions: int, batch_size: int) -> None:
    parts = dealt(n, partitions, batch_size)
    samples = sorted(chain(*parts))
    assert samples == list(range(len(samples)))
    assert n - len(samples) < partitions
    assert len({-(-len(part) // batch_size) for part in parts}) == 1
    assert all(part == sorted(part) for part in parts)


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 9))
def test_partitions_have_every_sample_once(n: int, partitions: int, batch_size: int) -> None:
    assert sorted(chain(*dealt(n, partitions, batch_size, allow_empty=True))) == list(range(n))


@for_each("arguments", [(-1, 0, 1, 1), (5, 2, 2, 1), (5, -1, 2, 1), (5, 0, 2, 0), (5, 0, 0, 1)])
def test_partition_rejects_invalid_arguments(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"got n={arguments[0]}, partition={arguments[1]}"):
        partition_by_round_robin(*arguments)
