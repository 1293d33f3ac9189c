"""The order of an epoch: a permutation, the same everywhere, another one for each epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlight_py.dataset.shares import epoch_order

SEEDS = st.integers(0, 2**80)


@given(st.integers(0, 500), SEEDS, st.integers(0, 10**6))
def test_it_is_a_permutation_and_repeatable(n: int, seed: int, epoch: int) -> None:
    order = epoch_order(n, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    np.testing.assert_array_equal(order, epoch_order(n, seed, epoch))


@pytest.mark.parametrize(
    ("seed", "epoch", "expected"),
    [
        (0, 0, [6, 3, 8, 1, 4, 5, 9, 2, 7, 0]),
        (0, 1, [1, 3, 8, 6, 2, 0, 7, 5, 4, 9]),
        (1, 0, [4, 6, 1, 3, 9, 8, 2, 0, 5, 7]),
        (2**70, 3, [3, 9, 4, 1, 6, 5, 7, 2, 0, 8]),
    ],
)
def test_it_is_the_same_with_every_numpy(seed: int, epoch: int, expected: list[int]) -> None:
    """A change here would change the training of everyone who relies on a seed."""
    assert epoch_order(10, seed, epoch).tolist() == expected
    thousand = epoch_order(1000, 7, 7)
    assert int((thousand * np.arange(1000)).sum()) == 250631684


def test_a_large_seed_and_a_later_epoch_are_not_the_same() -> None:
    """As words in a row, seed 1 in epoch 5 and seed 1 + 5 * 2**32 in epoch 0 would be."""
    assert epoch_order(50, 1, 5).tolist() != epoch_order(50, 1 + 5 * 2**32, 0).tolist()


def test_every_sample_is_first_about_as_often() -> None:
    firsts = np.bincount([epoch_order(8, 3, epoch)[0] for epoch in range(4000)], minlength=8)
    # Expected 500 each, with a standard deviation of 21.
    assert (abs(firsts - 500) < 100).all(), firsts
