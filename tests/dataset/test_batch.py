"""Batches, reordered datasets and their errors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flashlight_py.dataset import (
    BatchDataset,
    Dataset,
    ResampleDataset,
    ShuffleDataset,
    TensorDataset,
)
from tests.tables import for_each

X = np.arange(14.0).reshape(7, 2)
Y = np.arange(7)


class Plain(Dataset):
    """The samples of a TensorDataset without its fast paths."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def get(self, index: int) -> tuple[np.ndarray, ...]:
        return self.x[index], self.y[index]


@for_each("dataset", [TensorDataset([X, Y]), Plain(X, Y)])
@for_each("batch_size", [1, 2, 3, 7, 8])
@for_each("policy", ["include_last", "skip_last"])
def test_batch_dataset_keeps_the_order(dataset: Dataset, batch_size: int, policy: str) -> None:
    batches = BatchDataset(dataset, batch_size, policy)  # type: ignore[arg-type]
    stop = 7 if policy == "include_last" else 7 // batch_size * batch_size
    expected = [
        (X[i : min(i + batch_size, stop)], Y[i : i + batch_size])
        for i in range(0, stop, batch_size)
    ]
    assert len(batches) == len(expected)
    for ordered in (list(batches), [batches[i] for i in range(len(batches))]):
        assert len(ordered) == len(expected)
        for (x, y), (x_expected, y_expected) in zip(ordered, expected, strict=True):
            np.testing.assert_array_equal(x, x_expected, strict=True)
            np.testing.assert_array_equal(y, y_expected, strict=True)


def test_batches_of_a_tensor_dataset_are_views() -> None:
    for batch_size in (1, 3):
        batches = BatchDataset(TensorDataset([X, Y]), batch_size)
        for x, y in [*batches, batches[0]]:
            assert np.shares_memory(x, X)
            assert np.shares_memory(y, Y)
    np.testing.assert_array_equal(batches[-1][0], X[6:])
    assert list(BatchDataset(TensorDataset([np.zeros((0, 2))]), 3)) == []
    assert len(BatchDataset(Plain(X, Y), 7, "divisible_only")) == 1


def test_batch_function_applies_to_its_field() -> None:
    def ragged(values: Sequence[np.ndarray]) -> np.ndarray:
        padded = np.zeros((len(values), max(map(len, values))))
        for row, value in zip(padded, values, strict=True):
            row[: len(value)] = value
        return padded

    class Ragged(Plain):
        def get(self, index: int) -> tuple[np.ndarray, ...]:
            return np.ones(index + 1), Y[index]

    rows = Ragged(X, Y)
    x, y = BatchDataset(rows, 3, batch_functions=[ragged, None])[0]
    np.testing.assert_array_equal(x, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(y, [0, 1, 2])
    with pytest.raises(ValueError, match=r"field 0.*shapes"):
        BatchDataset(rows, 3)[0]
    with pytest.raises(ValueError, match=r"expected 2 batch_functions.* got 1"):
        BatchDataset(rows, 3, batch_functions=[ragged])[0]


def test_batches_of_a_shuffled_dataset_gather_rows() -> None:
    shuffled = ShuffleDataset(TensorDataset([X, Y]), seed=1)
    batches = list(BatchDataset(shuffled, 3))
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), [y for _, y in shuffled])
    np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), [x for x, _ in shuffled])


BASE = TensorDataset([np.arange(10, 20)])


def values(dataset: ResampleDataset) -> list[int]:
    return [int(value) for (value,) in dataset]


def test_resample_dataset_follows_indices_or_a_function() -> None:
    indices = np.array([3, 3, 0])
    dataset = ResampleDataset(BASE, indices)
    indices[:] = 1  # the dataset has a copy
    assert values(dataset) == [13, 13, 10]
    assert [dataset[i][0] for i in (0, -1)] == [13, 10]
    assert values(ResampleDataset(BASE, [])) == []
    assert values(ResampleDataset(BASE, lambda i: 9 - i)) == list(range(19, 9, -1))
    assert values(ResampleDataset(BASE, lambda i: i // 2, n=4)) == [10, 10, 11, 11]


# Calls with wrong arguments, and their errors.
INVALID: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: BatchDataset(Plain(X, Y), 2, "divisible_only"), ValueError, "of 2 samples, got 7"),
    (lambda: BatchDataset(Plain(X, Y), 0), ValueError, "batch_size must be at least 1, got 0"),
    (lambda: BatchDataset(Plain(X, Y), 2, "all"), ValueError, r"policy must be one of .*got 'all'"),  # type: ignore[arg-type]
    (lambda: BatchDataset(BASE, 4)[3], IndexError, r"must be in \[-3, 3\), got 3"),
    (lambda: ResampleDataset(BASE, [3])[1], IndexError, r"got 1"),
    (lambda: ResampleDataset(BASE, [1], n=1), ValueError, "n requires a function as indices"),
    *[(lambda indices=indices: ResampleDataset(BASE, indices), ValueError, "got")
        for indices in ([10], [-1], [0.5], [[0, 1]], [True, False])],
]  # fmt: skip


@for_each("call error words", INVALID)
def test_datasets_raise_for_invalid_arguments(call: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_shuffle_dataset_draws_equal_orders_from_equal_seeds() -> None:
    first, second = ShuffleDataset(BASE, seed=3), ShuffleDataset(BASE, seed=3)
    orders = []
    for _ in range(3):
        assert values(first) == values(second)
        orders.append(tuple(values(first)))
        first.resample()
        second.resample()
    assert len({*orders, tuple(range(10, 20))}) == 4
    assert sorted(orders[0]) == list(range(10, 20))
    assert values(ShuffleDataset(BASE, seed=4)) != list(orders[0])
    first.set_seed(3)
    first.resample()
    assert values(first) == list(orders[0])
