"""Rows of arrays as samples."""

from __future__ import annotations

import numpy as np
import pytest

from flashlight_py.dataset import TensorDataset

X = np.arange(12.0).reshape(4, 3)
Y = np.arange(4)


def test_a_sample_holds_one_row_of_each_array() -> None:
    dataset = TensorDataset([X, Y])
    assert len(dataset) == 4
    x, y = dataset[2]
    np.testing.assert_array_equal(x, [6, 7, 8])
    assert y == 2


def test_a_sample_is_a_view() -> None:
    x = X.copy()
    TensorDataset([x])[1][0][:] = -1
    np.testing.assert_array_equal(x[1], [-1, -1, -1])


def test_iteration_returns_what_indexing_returns() -> None:
    dataset = TensorDataset([X, Y])
    by_iteration, by_index = list(dataset), [dataset[i] for i in range(len(dataset))]
    assert len(by_iteration) == 4
    for (x, y), (x_indexed, y_indexed) in zip(by_iteration, by_index, strict=True):
        np.testing.assert_array_equal(x, x_indexed)
        assert y == y_indexed


def test_a_negative_index_counts_from_the_end() -> None:
    assert TensorDataset([Y])[-1] == (3,)
    assert TensorDataset([Y])[np.int64(-4)] == (0,)


@pytest.mark.parametrize("index", [4, -5, 100])
def test_an_index_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"4 sample.*index {index}"):
        TensorDataset([X])[index]


@pytest.mark.parametrize("index", [1.0, "1", None])
def test_an_index_must_be_an_integer(index: object) -> None:
    with pytest.raises(TypeError):
        TensorDataset([X])[index]  # type: ignore[index]


@pytest.mark.parametrize("arrays", [[], [X, Y[:3]], [np.float64(1)]])
def test_arrays_that_do_not_fit_are_refused(arrays: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="array"):
        TensorDataset(arrays)


def test_no_samples_are_a_dataset_too() -> None:
    assert list(TensorDataset([np.zeros((0, 3))])) == []


def test_one_array_is_not_taken_for_a_list_of_its_rows() -> None:
    with pytest.raises(TypeError, match=r"of shape \(4, .*write TensorDataset\(\[array\]\)"):
        TensorDataset(X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got list among them; make one by numpy.asarray"):
        TensorDataset([X, [1, 2, 3, 4]])  # type: ignore[list-item]
