"""Other orders and parts of a dataset."""

import numpy as np
import pytest

from flashlight_py.dataset import ResampleDataset, ShuffleDataset, TensorDataset

BASE = TensorDataset([np.arange(10, 20)])


def values(dataset: ResampleDataset) -> list[int]:
    return [int(value) for (value,) in dataset]


def test_indices_decide_order_and_repetition() -> None:
    dataset = ResampleDataset(BASE, [3, 3, 0])
    assert values(dataset) == [13, 13, 10]
    assert [dataset[i][0] for i in (0, -1)] == [13, 10]
    with pytest.raises(IndexError):
        dataset[3]


def test_a_function_decides() -> None:
    assert values(ResampleDataset(BASE, lambda i: 9 - i)) == list(range(19, 9, -1))
    assert values(ResampleDataset(BASE, lambda i: i // 2, n=4)) == [10, 10, 11, 11]


def test_the_indices_are_copied() -> None:
    indices = np.array([1, 2])
    dataset = ResampleDataset(BASE, indices)
    indices[:] = 0
    assert values(dataset) == [11, 12]


def test_no_indices_are_fine() -> None:
    assert values(ResampleDataset(BASE, [])) == []


@pytest.mark.parametrize("indices", [[10], [-1], [0.5], [[0, 1]], [True, False]])
def test_wrong_indices_are_refused(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="got"):
        ResampleDataset(BASE, indices)


def test_n_belongs_to_a_function() -> None:
    with pytest.raises(ValueError, match="n goes with a function"):
        ResampleDataset(BASE, [1], n=1)


def test_a_shuffle_holds_every_sample_once() -> None:
    shuffled = values(ShuffleDataset(BASE, seed=3))
    assert sorted(shuffled) == list(range(10, 20))
    assert shuffled != sorted(shuffled)


def test_the_same_seed_draws_the_same_orders() -> None:
    first, second = ShuffleDataset(BASE, seed=3), ShuffleDataset(BASE, seed=3)
    orders = []
    for _ in range(3):
        assert values(first) == values(second)
        orders.append(tuple(values(first)))
        first.resample()
        second.resample()
    assert len(set(orders)) == 3
    assert values(ShuffleDataset(BASE, seed=4)) != list(orders[0])


def test_set_seed_starts_anew() -> None:
    dataset = ShuffleDataset(BASE, seed=3)
    order = values(dataset)
    dataset.resample()
    dataset.set_seed(3)
    dataset.resample()
    assert values(dataset) == order
