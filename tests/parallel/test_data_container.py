"""A rank's share of any data: neighbouring elements, nobody's twice, usable like the data."""

import operator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlight_py as fl
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import run_ranks

BOUND = st.none() | st.integers(-15, 15)


class OnlyGet:
    """The least that data may be; ``shape`` is that of a sample."""

    shape = (3, 32, 32)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return range(70, 77)[operator.index(index)]


def shares(data: Any, size: int) -> list[Any]:
    return [fl.DistributedDataContainer(data, rank, size) for rank in range(size)]


@given(st.lists(st.integers(), max_size=40), st.integers(1, 8))
def test_every_element_is_in_one_share_and_in_order(data: list[int], size: int) -> None:
    parts = shares(data, size)
    assert list(chain(*parts)) == data
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert [part[i] for part in parts for i in range(len(part))] == data


@given(st.integers(0, 20), st.integers(1, 4), BOUND, BOUND, BOUND.filter(lambda step: step != 0))
def test_slices_and_negative_indices_are_those_of_a_list(
    n: int, size: int, start: int | None, stop: int | None, step: int | None
) -> None:
    for part in shares(list(range(n)), size):
        elements = list(part)
        assert part[start:stop:step] == elements[start:stop:step]
        assert [part[-i - 1] for i in range(len(part))] == elements[::-1]


def test_anything_with_a_length_and_indices_will_do() -> None:
    assert [list(part) for part in shares("abcde", 2)] == [["a", "b", "c"], ["d", "e"]]
    assert [list(part) for part in shares(OnlyGet(), 3)] == [[70, 71, 72], [73, 74], [75, 76]]
    assert [list(part) for part in shares([1], 3)] == [[1], [], []]
    rows = np.arange(10.0).reshape(5, 2)
    second = fl.DistributedDataContainer(rows, 1, 2)
    np.testing.assert_array_equal(second[:], rows[3:])
    assert np.shares_memory(second[:], rows)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_share_of_a_dataset_is_a_dataset(size: int) -> None:
    x, y = np.arange(14.0).reshape(7, 2), np.arange(7)
    seen = []
    for part in shares(fl.dataset.TensorDataset([x, y]), size):
        batches = fl.dataset.PrefetchDataset(fl.dataset.BatchDataset(part, 2), 1, 2)
        assert len(batches) == -(-len(part) // 2)
        seen += list(batches)
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in seen]), x)
    np.testing.assert_array_equal(np.concatenate([batch[1] for batch in seen]), y)


def test_tuples_in_a_list_can_be_batched() -> None:
    samples = [(np.full(2, i), i) for i in range(5)]
    x, y = fl.dataset.BatchDataset(fl.DistributedDataContainer(samples, 1, 2), 2)[0]
    assert x.tolist() == [[3, 3], [4, 4]]
    assert y.tolist() == [3, 4]


def test_without_a_world_everything_is_ours() -> None:
    assert list(fl.DistributedDataContainer([1, 2, 3])) == [1, 2, 3]


@on_ranks(("shm", 2), ("shm", 3))
def test_the_world_decides_by_default(rank: int, size: int) -> None:
    part = fl.DistributedDataContainer(range(10))
    assert len(part) == {2: [5, 5], 3: [4, 3, 3]}[size][rank]
    whole = fl.all_reduce(np.array([len(part), sum(part)]))
    assert whole.tolist() == [10, 45]


def make_before_init(rank: int, size: int, path: str) -> None:
    """What was made too early would have all samples on every rank: refused when it is used."""
    container = fl.DistributedDataContainer([1, 2, 3])
    sampler = fl.DistributedSampler(3)
    batches = fl.ShardedDataset(fl.dataset.TensorDataset([np.arange(3)]), 2)
    assert len(list(container)) == len(list(sampler)) == 3
    init = fl.DistributedInit.FILE_SYSTEM
    fl.distributed_init(init, rank, size, {fl.DistributedConstants.FILE_PATH: path})
    for use in (
        lambda: container[0],
        lambda: container[:2],
        lambda: list(sampler),
        lambda: sampler.set_epoch(1),
        lambda: batches[0],
        lambda: batches.set_epoch(1),
    ):
        with pytest.raises(fl.errors.NotInitializedError, match=r"made as rank 0 of 1.*anew"):
            use()
    fl.distributed_shutdown()
    assert list(container) == [1, 2, 3]


def test_what_was_made_before_init_is_refused(tmp_path: Any) -> None:
    run_ranks(make_before_init, 2, str(tmp_path / "run"), init=None)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"x": [1, 2]}, TypeError, r"keys of a dict are no positions.*TensorDataset"),
        ({1, 2}, TypeError, r"set cannot be indexed"),
        (np.array(3), TypeError, r"ndarray has no length"),
        (iter([1]), TypeError, r"cannot be indexed"),
    ],
)
def test_data_that_cannot_be_shared_out_is_refused(
    data: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"DistributedDataContainer: .*{message}"):
        fl.DistributedDataContainer(data)


@pytest.mark.parametrize(
    ("rank", "size", "error", "message"),
    [
        (2, 2, ValueError, r"rank must be in \[0, size\), got rank=2, size=2"),
        (-1, 2, ValueError, r"rank must be at least 0, got -1"),
        (0, 0, ValueError, r"got rank=0, size=0"),
        (1, None, ValueError, r"both rank and size, or neither.*rank=1, size=None"),
        (None, 2, ValueError, r"both rank and size, or neither.*rank=None, size=2"),
        (0.0, 2, TypeError, r"rank must be an integer, got float"),
    ],
)
def test_senseless_places_are_refused(
    rank: Any, size: Any, error: type[Exception], message: str
) -> None:
    for make in (
        lambda: fl.DistributedDataContainer([1, 2], rank, size),
        lambda: fl.DistributedSampler(2, rank=rank, size=size),
        lambda: fl.ShardedDataset(fl.dataset.TensorDataset([np.ones(2)]), 1, rank=rank, size=size),
    ):
        with pytest.raises(error, match=message):
            make()


def test_wrong_indices_raise() -> None:
    part = fl.DistributedDataContainer([1, 2, 3], 1, 2)
    with pytest.raises(IndexError, match=r"DistributedDataContainer holds 1 .* index 1 is out"):
        part[1]
    with pytest.raises(IndexError):
        part[-2]
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        part["a"]
    with pytest.raises(TypeError, match=r"type OnlyGet, has no slices.*single elements"):
        fl.DistributedDataContainer(OnlyGet())[1:2]
