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


def test_tensor_dataset_samples_are_views_of_rows() -> None:
    dataset = TensorDataset([X, Y])
    assert len(dataset) == 4
    assert list(TensorDataset([np.zeros((0, 3))])) == []
    for rows in (
        [*dataset],
        [dataset[i] for i in range(4)],
        [dataset[np.int64(i)] for i in range(-4, 0)],
    ):
        for (x, y), x_expected, y_expected in zip(rows, X, Y, strict=True):
            np.testing.assert_array_equal(x, x_expected)
            assert y == y_expected
            assert np.shares_memory(x, X)


# Calls with wrong indices or arrays, and their errors.
INVALID: list[tuple[Any, Any, str]] = [
    *[(lambda i=i: TensorDataset([X])[i], IndexError, rf"must be in \[-4, 4\), got {i}")
        for i in (4, -5, 100)],
    *[(lambda i=i: TensorDataset([X])[i], TypeError, "integer") for i in (1.0, "1", None)],
    *[(lambda arrays=arrays: TensorDataset(arrays), ValueError, "array")
        for arrays in ([], [X, Y[:3]], [np.float64(1)])],
    (lambda: TensorDataset(X), TypeError, r"of shape \(4, .*Pass TensorDataset\(\[array\]\)"),  # type: ignore[arg-type]
    (lambda: TensorDataset([X, [1, 2, 3, 4]]), TypeError, "got list in the list. Pass numpy.asarr"),  # type: ignore[list-item]
]  # fmt: skip


@for_each("call error words", INVALID)
def test_tensor_dataset_raises_for_invalid_indices_and_arrays(
    call: Any, error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


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


@for_each("indices", [[3, 1, 2], [1, 1, 0], [0, 2, -1], [2], []])
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
