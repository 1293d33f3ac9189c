"""Batches: shapes, the last one, views, functions of one's own."""

from collections.abc import Sequence

import numpy as np
import pytest

from flashlight_py.dataset import BatchDataset, Dataset, ShuffleDataset, TensorDataset

X = np.arange(14.0).reshape(7, 2)
Y = np.arange(7)


class Plain(Dataset):
    """The same samples without the fast ways of a TensorDataset."""

    def __len__(self) -> int:
        return len(X)

    def get(self, index: int) -> tuple[np.ndarray, ...]:
        return X[index], Y[index]


DATASETS = pytest.mark.parametrize("dataset", [TensorDataset([X, Y]), Plain()], ids=["rows", "own"])


@DATASETS
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("policy", ["include_last", "skip_last"])
def test_batches_cut_the_samples_in_order(dataset: Dataset, batch_size: int, policy: str) -> None:
    batches = BatchDataset(dataset, batch_size, policy)  # type: ignore[arg-type]
    stop = 7 if policy == "include_last" else 7 // batch_size * batch_size
    expected = [
        (X[i : min(i + batch_size, stop)], Y[i : i + batch_size])
        for i in range(0, stop, batch_size)
    ]
    assert len(batches) == len(expected)
    for way in (list(batches), [batches[i] for i in range(len(batches))]):
        assert len(way) == len(expected)
        for (x, y), (x_expected, y_expected) in zip(way, expected, strict=True):
            np.testing.assert_array_equal(x, x_expected, strict=True)
            np.testing.assert_array_equal(y, y_expected, strict=True)


@DATASETS
def test_divisible_only_refuses_a_rest(dataset: Dataset) -> None:
    assert len(BatchDataset(dataset, 7, "divisible_only")) == 1
    with pytest.raises(ValueError, match="7 samples do not divide into batches of 2: 1 remain"):
        BatchDataset(dataset, 2, "divisible_only")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_of_arrays_are_views(batch_size: int) -> None:
    batches = BatchDataset(TensorDataset([X, Y]), batch_size)
    for x, y in [*batches, batches[0]]:
        assert np.shares_memory(x, X)
        assert np.shares_memory(y, Y)


def test_negative_index_and_index_error() -> None:
    batches = BatchDataset(TensorDataset([X]), 3)
    np.testing.assert_array_equal(batches[-1][0], X[6:])
    with pytest.raises(IndexError, match="3 sample"):
        batches[3]


def test_a_batch_function_serves_its_field() -> None:
    def ragged(values: Sequence[np.ndarray]) -> np.ndarray:
        padded = np.zeros((len(values), max(map(len, values))))
        for row, value in zip(padded, values, strict=True):
            row[: len(value)] = value
        return padded

    class Ragged(Plain):
        def get(self, index: int) -> tuple[np.ndarray, ...]:
            return np.ones(index + 1), Y[index]

    x, y = BatchDataset(Ragged(), 3, batch_functions=[ragged, None])[0]
    np.testing.assert_array_equal(x, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(y, [0, 1, 2])
    with pytest.raises(ValueError, match=r"field 0.*shapes"):
        BatchDataset(Ragged(), 3)[0]
    with pytest.raises(ValueError, match=r"batch_functions has 1 entries.*2 fields"):
        BatchDataset(Ragged(), 3, batch_functions=[ragged])[0]


def test_shuffled_rows_are_gathered() -> None:
    shuffled = ShuffleDataset(TensorDataset([X, Y]), seed=1)
    batches = list(BatchDataset(shuffled, 3))
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), [y for _, y in shuffled])
    np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), [x for x, _ in shuffled])


def test_senseless_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        BatchDataset(Plain(), 0)
    with pytest.raises(ValueError, match=r"policy must be one of .*got 'all'"):
        BatchDataset(Plain(), 2, "all")  # type: ignore[arg-type]


def test_no_samples_make_no_batch() -> None:
    batches = BatchDataset(TensorDataset([np.zeros((0, 2))]), 3)
    assert len(batches) == 0
    assert list(batches) == []
