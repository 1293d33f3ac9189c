"""Rows of arrays as samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashlight_py import DistributedDataContainer, ShardedDataset
from flashlight_py.dataset import BatchDataset, Dataset, PrefetchDataset, TensorDataset
from tests.tables import for_each

X = np.arange(12.0).reshape(4, 3)
Y = np.arange(4)


def test_tensor_dataset_sample_has_one_row_of_each_array() -> None:
    dataset = TensorDataset([X, Y])
    assert len(dataset) == 4
    x, y = dataset[2]
    np.testing.assert_array_equal(x, [6, 7, 8])
    assert y == 2


def test_tensor_dataset_sample_is_a_view() -> None:
    x = X.copy()
    TensorDataset([x])[1][0][:] = -1
    np.testing.assert_array_equal(x[1], [-1, -1, -1])


def test_tensor_dataset_iteration_equals_indexing() -> None:
    dataset = TensorDataset([X, Y])
    by_iteration, by_index = list(dataset), [dataset[i] for i in range(len(dataset))]
    assert len(by_iteration) == 4
    for (x, y), (x_indexed, y_indexed) in zip(by_iteration, by_index, strict=True):
        np.testing.assert_array_equal(x, x_indexed)
        assert y == y_indexed


def test_tensor_dataset_negative_index_counts_from_the_end() -> None:
    assert TensorDataset([Y])[-1] == (3,)
    assert TensorDataset([Y])[np.int64(-4)] == (0,)


@for_each("index", [4, -5, 100])
def test_tensor_dataset_raises_index_error_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match=rf"must be in \[-4, 4\), got {index}"):
        TensorDataset([X])[index]


@for_each("index", [1.0, "1", None])
def test_tensor_dataset_raises_type_error_if_the_index_is_no_integer(index: object) -> None:
    with pytest.raises(TypeError):
        TensorDataset([X])[index]  # type: ignore[index]


@for_each("arrays", [[], [X, Y[:3]], [np.float64(1)]])
def test_tensor_dataset_raises_value_error_for_unequal_lengths(arrays: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="array"):
        TensorDataset(arrays)


def test_tensor_dataset_accepts_arrays_without_rows() -> None:
    assert list(TensorDataset([np.zeros((0, 3))])) == []


def test_tensor_dataset_raises_type_error_for_a_single_array() -> None:
    with pytest.raises(TypeError, match=r"of shape \(4, .*Pass TensorDataset\(\[array\]\)"):
        TensorDataset(X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got list in the list. Pass numpy.asarray"):
        TensorDataset([X, [1, 2, 3, 4]])  # type: ignore[list-item]


@pytest.fixture(params=["h5py", "zarr", "memmap"])
def stored(request: Any, tmp_path: Path) -> Any:
    """Return X and Y as arrays in files that are not read yet."""
    if request.param == "memmap":
        np.save(tmp_path / "x.npy", X)
        yield [np.load(tmp_path / "x.npy", mmap_mode="r"), Y]
        return
    library = pytest.importorskip(request.param, minversion="3")  # zarr: Python 3.11 or later
    if request.param == "zarr":
        yield [library.create_array(tmp_path / f"{a.ndim}.zarr", data=a) for a in (X, Y)]
        return
    with library.File(tmp_path / "rows.h5", "w") as file:
        yield [file.create_dataset(str(a.ndim), data=a) for a in (X, Y)]


@pytest.mark.parametrize("indices", [[3, 1, 2], [1, 1, 0], [0, 2, -1], [2], []])
def test_take_from_file_arrays_keeps_order_and_duplicates(stored: Any, indices: list[int]) -> None:
    taken = TensorDataset(stored).take(np.array(indices, np.int64))
    for field, array in zip(taken, (X, Y), strict=True):
        assert type(field) in (np.ndarray, np.memmap)
        np.testing.assert_array_equal(field, array[indices])


def test_arrays_in_files_work_with_every_dataset(stored: Any) -> None:
    rows, memory = TensorDataset(stored), TensorDataset([X, Y])
    pairs: list[tuple[Dataset, Dataset]] = [
        (rows, memory),
        (BatchDataset(rows, 3), BatchDataset(memory, 3)),
        (ShardedDataset(rows, 3), ShardedDataset(memory, 3)),
        (PrefetchDataset(ShardedDataset(rows, 3), 2, 2), ShardedDataset(memory, 3)),
        (TensorDataset([DistributedDataContainer(stored[0], 1, 2)[:]]), TensorDataset([X[2:]])),
    ]
    for of_file, of_memory in pairs:
        assert len(of_file) == len(of_memory)
        for ours, expected in zip(of_file, of_memory, strict=True):
            for one, other in zip(ours, expected, strict=True):
                np.testing.assert_array_equal(one, other)
