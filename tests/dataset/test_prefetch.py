"""Prefetching by threads and processes changes only the time at which a sample is made."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashlight_py.dataset import BatchDataset, Dataset, PrefetchDataset, TensorDataset
from tests.tables import for_each


@pytest.fixture(autouse=True)
def _nothing_left(leaves_nothing: None) -> Iterator[None]:
    """Check for leftovers after the resource tracker of multiprocessing has ended."""
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


class Recording(Dataset):
    """Samples 0, 1, ...; records the requested indices."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.size

    def get(self, index: int) -> tuple[int]:
        self.asked.append(index)
        self.threads.add(threading.current_thread().name)
        return (index,)


@for_each("threads", [0, 1, 3])
@for_each("prefetch_size", [1, 4, 100])
@for_each("size", [0, 1, 20])
def test_prefetch_keeps_order_and_content(threads: int, prefetch_size: int, size: int) -> None:
    dataset = PrefetchDataset(Recording(size), threads, prefetch_size)
    for _ in range(2):
        assert list(dataset) == [(i,) for i in range(size)]


def test_prefetch_makes_samples_in_other_threads() -> None:
    base = Recording(20)
    list(PrefetchDataset(base, 2, 4))
    assert threading.main_thread().name not in base.threads


def test_prefetch_makes_at_most_prefetch_size_samples_in_advance() -> None:
    base = Recording(50)
    iterator = iter(PrefetchDataset(base, 2, 4))
    for used in range(1, 20):
        next(iterator)
        assert max(base.asked) < used + 4
    del iterator


def test_prefetch_indexing_works_without_threads() -> None:
    dataset = PrefetchDataset(Recording(5), 2, 2)
    assert dataset[-1] == (4,)
    with pytest.raises(IndexError):
        dataset[5]


class Failing(Dataset):
    """Samples (index, process); sample ``bad`` raises or ends its process."""

    def __init__(self, size: int, bad: int = -1, failure: str = "") -> None:
        self.size, self.bad, self.failure = size, bad, failure

    def __len__(self) -> int:
        return self.size

    def get(self, index: int) -> Any:
        if index == self.bad:
            WAYS[self.failure]()
        return (index, os.getpid(), threading.Lock() if self.failure == "unpicklable" else None)


class StrangeError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__("strange")


def broken() -> None:
    raise LookupError("broken")


def strange() -> None:
    raise StrangeError(1, 2)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: dict[str, Any] = {
    "raise": broken,
    "strange": strange,
    "kill": kill,
    "exit": lambda: sys.exit(3),
    "unpicklable": lambda: None,
}


def noisy(sample: Any, rng: np.random.Generator) -> Any:
    return (sample[0] + rng.integers(1000, size=sample[0].shape), *sample[1:])


def rows() -> Dataset:
    return BatchDataset(TensorDataset([np.arange(40).reshape(20, 2), np.arange(20)]), 3)


def samples(dataset: Dataset) -> list[Any]:
    return [[field.tolist() for field in sample] for sample in dataset]


def test_transform_gives_equal_samples_for_any_workers() -> None:
    kinds = [(0, "threads"), (1, "threads"), (3, "threads"), (2, "processes")]
    for epoch in (0, 3):
        results = []
        for threads, workers in kinds if epoch else kinds[:3]:
            ahead = PrefetchDataset(rows(), threads, 4, workers, transform=noisy, seed=5)  # type: ignore[arg-type]
            ahead.set_epoch(epoch)
            results.append(samples(ahead))
        assert results[1:] == results[:-1]
        assert results[0] == [[x.tolist() for x in ahead[index]] for index in range(len(ahead))]
        assert results[0] != samples(rows())
        ahead.set_epoch(epoch + 1)
        assert results[0] != [[x.tolist() for x in ahead[index]] for index in range(len(ahead))]


def test_processes_make_samples_and_end_if_an_iteration_is_left_early() -> None:
    for number, (index, process, _) in enumerate(PrefetchDataset(Failing(99), 2, 4, "processes")):
        assert index == number
        assert process != os.getpid()
        if index == 8:
            break
    assert list(PrefetchDataset(Failing(0), 2, 4, "processes")) == []


ENDS: dict[str, tuple[type[Exception], str]] = {
    "raise": (LookupError, "broken"),
    "strange": (RuntimeError, "sample 3 raised an exception that cannot .*: (?s:.*)StrangeError"),
    "exit": (RuntimeError, "sample 3 would end this process: (?s:.*)<lambda>(?s:.*)SystemExit: 3"),
    "kill": (RuntimeError, "got the end of a worker process"),
}


@for_each("failure", ENDS)
def test_prefetch_raises_if_a_worker_process_raises_exits_or_is_killed(failure: str) -> None:
    error, message = ENDS[failure]
    results = []
    with pytest.raises(error, match=message) as caught:
        results += PrefetchDataset(Failing(6, 3, failure), 1, 1, "processes")
    if failure == "raise":
        assert "in broken" in str(caught.value.__cause__)  # the worker's traceback
    assert [index for index, *_ in results] == [0, 1, 2]


@for_each("bad", [0, 3, 9])
def test_prefetch_raises_an_error_at_its_sample(bad: int) -> None:
    iterator = iter(PrefetchDataset(Failing(10, bad, "raise"), 3, 6))
    assert [next(iterator)[0] for _ in range(bad)] == [*range(bad)]
    with pytest.raises(LookupError, match="broken"):
        next(iterator)


def test_prefetch_raises_type_error_if_data_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="pickle"):
        list(PrefetchDataset(Failing(2, 9, "unpicklable"), 1, 1, "processes"))
    with pytest.raises(TypeError, match=r"PrefetchDataset: .* cannot be pickled.*lambda") as caught:
        list(PrefetchDataset(rows(), 1, 1, "processes", transform=lambda x, rng: x))
    assert caught.value.__cause__ is not None


def test_prefetch_needs_a_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError, match=r"^PrefetchDataset: the current folder was"):
        list(PrefetchDataset(rows(), 1, 1, "processes"))


def test_threads_end_if_an_iteration_is_left_early() -> None:
    for index, *_ in PrefetchDataset(Failing(1000), 3, 10):
        if index == 5:
            break


@for_each(
    "options message",
    [
        ({"threads": -1}, "got threads="),
        ({"prefetch_size": 0}, "got threads="),
        ({"workers": "fibres"}, "workers must be one of"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_prefetch_raises_value_error_for_invalid_arguments(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefetchDataset(rows(), **{"threads": 1, "prefetch_size": 1, **options})
    with pytest.raises(ValueError, match="epoch must be at least 0"):
        PrefetchDataset(rows(), 1, 1).set_epoch(-1)
