"""Prefetching changes when a sample is made, and nothing else."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from flashlight_py.dataset import BatchDataset, Dataset, PrefetchDataset, TensorDataset


class Recording(Dataset):
    """Samples 0, 1, ...; index ``bad`` fails; counts what was asked for."""

    def __init__(self, size: int, bad: int = -1) -> None:
        self.size, self.bad = size, bad
        self.asked: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.size

    def get(self, index: int) -> tuple[int]:
        self.asked.append(index)
        self.threads.add(threading.current_thread().name)
        if index == self.bad:
            raise LookupError(f"sample {index} is broken")
        return (index,)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("prefetch_size", [1, 4, 100])
@pytest.mark.parametrize("size", [0, 1, 20])
def test_order_and_content_stay(threads: int, prefetch_size: int, size: int) -> None:
    dataset = PrefetchDataset(Recording(size), threads, prefetch_size)
    for _ in range(2):
        assert list(dataset) == [(i,) for i in range(size)]


def test_samples_are_made_by_other_threads() -> None:
    base = Recording(20)
    list(PrefetchDataset(base, 2, 4))
    assert threading.main_thread().name not in base.threads


def test_no_more_than_the_prefetch_size_is_made_ahead() -> None:
    base = Recording(50)
    iterator = iter(PrefetchDataset(base, 2, 4))
    for used in range(1, 20):
        next(iterator)
        assert max(base.asked) < used + 4
    del iterator


@pytest.mark.parametrize("bad", [0, 3, 9])
def test_an_error_is_raised_at_the_turn_of_its_sample(bad: int) -> None:
    iterator = iter(PrefetchDataset(Recording(10, bad), 3, 5))
    assert [next(iterator) for _ in range(bad)] == [(i,) for i in range(bad)]
    with pytest.raises(LookupError, match=f"sample {bad} is broken"):
        next(iterator)


def test_leaving_halfway_ends_the_threads() -> None:
    for sample in PrefetchDataset(Recording(1000), 3, 10):
        if sample == (5,):
            break


def test_indexing_works_without_threads() -> None:
    dataset = PrefetchDataset(Recording(5), 2, 2)
    assert dataset[-1] == (4,)
    with pytest.raises(IndexError):
        dataset[5]


def test_batches_can_be_prefetched() -> None:
    x = np.arange(10)
    batches = PrefetchDataset(BatchDataset(TensorDataset([x]), 4), 2, 2)
    np.testing.assert_array_equal(np.concatenate([batch for (batch,) in batches]), x)


@pytest.mark.parametrize(("threads", "prefetch_size"), [(-1, 1), (1, 0)])
def test_senseless_arguments_are_refused(threads: int, prefetch_size: int) -> None:
    with pytest.raises(ValueError, match="got threads="):
        PrefetchDataset(Recording(1), threads, prefetch_size)
