"""Rows of arrays as samples, the order of an epoch, partitions and batches."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlight_py import DistributedDataContainer, ShardedDataset
from flashlight_py.dataset import (
    BatchDataset,
    Dataset,
    PrefetchDataset,
    ResampleDataset,
    ShuffleDataset,
    TensorDataset,
    partition_by_round_robin,
)
from flashlight_py.dataset.dataset import epoch_order
from tests.tables import for_each

ROWS = np.arange(12.0).reshape(4, 3)
LABELS = np.arange(4)


def test_tensor_dataset_samples_are_views_of_rows() -> None:
    dataset = TensorDataset([ROWS, LABELS])
    assert len(dataset) == 4
    assert list(TensorDataset([np.zeros((0, 3))])) == []
    for rows in (
        [*dataset],
        [dataset[i] for i in range(4)],
        [dataset[np.int64(i)] for i in range(-4, 0)],
    ):
        for (x, y), x_expected, y_expected in zip(rows, ROWS, LABELS, strict=True):
            np.testing.assert_array_equal(x, x_expected)
            assert y == y_expected
            assert np.shares_memory(x, ROWS)


@pytest.fixture(params=["h5py", "zarr", "memmap"])
def stored(request: Any, tmp_path: Path) -> Any:
    if request.param == "memmap":
        np.save(tmp_path / "x.npy", ROWS)
        yield [np.load(tmp_path / "x.npy", mmap_mode="r"), LABELS]
        return
    library = pytest.importorskip(request.param, minversion="3")  # zarr: Python 3.11 or later
    if request.param == "zarr":
        yield [library.create_array(tmp_path / f"{a.ndim}.zarr", data=a) for a in (ROWS, LABELS)]
        return
    with library.File(tmp_path / "rows.h5", "w") as file:
        yield [file.create_dataset(str(a.ndim), data=a) for a in (ROWS, LABELS)]


@for_each("indices", [[3, 1, 2], [1, 1, 0], [0, 2, -1], [2], []])
def test_take_from_file_arrays_keeps_order_and_duplicates(stored: Any, indices: list[int]) -> None:
    taken = TensorDataset(stored).take(np.array(indices, np.int64))
    for field, array in zip(taken, (ROWS, LABELS), strict=True):
        assert type(field) in (np.ndarray, np.memmap)
        np.testing.assert_array_equal(field, array[indices])


def test_arrays_in_files_work_with_every_dataset(stored: Any) -> None:
    rows, memory = TensorDataset(stored), TensorDataset([ROWS, LABELS])
    pairs: list[tuple[Dataset, Dataset]] = [
        (rows, memory),
        (BatchDataset(rows, 3), BatchDataset(memory, 3)),
        (ShardedDataset(rows, 3), ShardedDataset(memory, 3)),
        (PrefetchDataset(ShardedDataset(rows, 3), 2, 2), ShardedDataset(memory, 3)),
        (TensorDataset([DistributedDataContainer(stored[0], 1, 2)[:]]), TensorDataset([ROWS[2:]])),
    ]
    for of_file, of_memory in pairs:
        assert len(of_file) == len(of_memory)
        for ours, expected in zip(of_file, of_memory, strict=True):
            for one, other in zip(ours, expected, strict=True):
                np.testing.assert_array_equal(one, other)


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
    assert sorted(chain(*dealt(n, partitions, batch_size, allow_empty=True))) == list(range(n))


@for_each("arguments", [(-1, 0, 1, 1), (5, 2, 2, 1), (5, -1, 2, 1), (5, 0, 2, 0), (5, 0, 0, 1)])
def test_partition_rejects_invalid_arguments(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"got n={arguments[0]}, partition={arguments[1]}"):
        partition_by_round_robin(*arguments)


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


# Calls with wrong arguments or indices, and their errors.
INVALID: list[tuple[Any, Any, str]] = [
    (lambda: BatchDataset(Plain(X, Y), 2, "divisible_only"), ValueError, "of 2 samples, got 7"),
    (lambda: BatchDataset(Plain(X, Y), 0), ValueError, "batch_size must be at least 1, got 0"),
    (lambda: BatchDataset(Plain(X, Y), 2, "all"), ValueError, r"policy must be one of .*got 'all'"),  # type: ignore[arg-type]
    (lambda: BatchDataset(BASE, 4)[3], IndexError, r"must be in \[-3, 3\), got 3"),
    (lambda: ResampleDataset(BASE, [3])[1], IndexError, r"got 1"),
    (lambda: ResampleDataset(BASE, [1], n=1), ValueError, "n requires a function as indices"),
    *[(lambda indices=indices: ResampleDataset(BASE, indices), ValueError, "got")
        for indices in ([10], [-1], [0.5], [[0, 1]], [True, False])],
    *[(lambda i=i: TensorDataset([ROWS])[i], IndexError, rf"must be in \[-4, 4\), got {i}")
        for i in (4, -5, 100)],
    *[(lambda i=i: TensorDataset([ROWS])[i], TypeError, "integer") for i in (1.0, "1", None)],
    *[(lambda arrays=arrays: TensorDataset(arrays), ValueError, "array")
        for arrays in ([], [ROWS, LABELS[:3]], [np.float64(1)])],
    (lambda: TensorDataset(ROWS), TypeError, r"of shape \(4, .*Pass TensorDataset\(\[array\]\)"),  # type: ignore[arg-type]
    (lambda: TensorDataset([ROWS, [1, 2, 3, 4]]), TypeError, "got list in the list. Pass numpy"),  # type: ignore[list-item]
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
