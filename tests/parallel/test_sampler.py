"""The sampler: the same samples in the same steps for any number of ranks, and all ranks agree."""

import threading
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlight_py as fl
from flashlight_py.dataset.shares import epoch_order

SIZES = (1, 2, 3, 4, 6)
ALL_RANKS = [{"n": 20}, {"seed": 4}, {"shuffle": False}, {"drop_last": True}]


def samplers(n: int, size: int, epoch: int = 0, **options: Any) -> list[fl.DistributedSampler]:
    made = [fl.DistributedSampler(n, rank=rank, size=size, **options) for rank in range(size)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


@given(st.integers(0, 100), st.integers(0, 9), st.booleans(), st.booleans())
def test_a_step_takes_the_same_samples_for_any_number_of_ranks(
    n: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    batch = 12  # a multiple of every size
    order = epoch_order(n, 5, epoch).tolist() if shuffle else list(range(n))
    for size in SIZES:
        parts = [
            list(each)
            for each in samplers(n, size, epoch, shuffle=shuffle, seed=5, drop_last=drop_last)
        ]
        for step in range(n // batch if drop_last else -(-n // batch)):
            mine = slice(step * batch // size, (step + 1) * batch // size)
            taken = set(chain.from_iterable(part[mine] for part in parts))
            assert taken == set(order[step * batch : (step + 1) * batch])


@given(st.integers(0, 100), st.integers(1, 9), st.booleans())
def test_no_sample_twice_none_padded(n: int, size: int, shuffle: bool) -> None:
    parts = samplers(n, size, shuffle=shuffle)
    assert sorted(chain(*parts)) == list(range(n))
    assert [len(list(part)) for part in parts] == [len(part) for part in parts]


@given(st.integers(0, 100), st.integers(1, 9))
def test_with_drop_last_every_rank_has_the_same_number(n: int, size: int) -> None:
    parts = samplers(n, size, drop_last=True)
    assert {len(list(part)) for part in parts} == {n // size}
    assert len(set(chain(*parts))) == n // size * size


def test_epochs_differ_and_repeat() -> None:
    sampler = fl.DistributedSampler(30, seed=1, rank=0, size=2)
    assert sampler.epoch == 0
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(np.int64(1))  # type: ignore[arg-type]  # any integer will do
    assert sampler.epoch == 1
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert all(type(index) is int for index in first)


def test_it_serves_the_datasets() -> None:
    rows = fl.dataset.TensorDataset([np.arange(10)])
    sampler = fl.DistributedSampler(10, rank=1, size=2)
    mine = fl.dataset.ResampleDataset(rows, list(sampler))
    batches = fl.dataset.BatchDataset(mine, 2)
    assert list(chain(*(x.tolist() for (x,) in batches))) == list(sampler)


def differ(rank: int, size: int, changed: dict[str, Any]) -> str:
    options = {"n": 10, "seed": 0} | (changed if rank == 1 else {})
    with pytest.raises(fl.errors.MismatchError) as caught:
        fl.DistributedSampler(**options)
    fl.DistributedSampler(10)  # the world goes on
    return str(caught.value)


@pytest.mark.parametrize("changed", ALL_RANKS, ids=lambda changed: next(iter(changed)))
def test_ranks_that_differ_raise_on_every_rank(pool: Any, changed: dict[str, Any]) -> None:
    messages = pool(3).run(differ, changed)
    before = {"n": 10, "seed": 0, "shuffle": True, "drop_last": False}
    (name,) = changed
    differences = f"{name} (rank(s) 0, 2: {before[name]}; rank(s) 1: {changed[name]})"
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank} of 3: the ranks pass a DistributedSampler ")
        assert f"arguments: {differences}. Pass the same" in message


def other_kinds(rank: int, size: int) -> str:
    rows = fl.dataset.TensorDataset([np.arange(10)])
    with pytest.raises(fl.errors.MismatchError) as caught:
        fl.DistributedSampler(10) if rank else fl.ShardedDataset(rows, 2)
    return str(caught.value)


def test_a_sampler_here_and_a_dataset_there_raise(pool: Any) -> None:
    for message in pool(2).run(other_kinds):
        assert "object (rank(s) 0: ShardedDataset; rank(s) 1: DistributedSampler)" in message
        assert "global_batch_size (rank(s) 0: 2; rank(s) 1: nothing)" in message


def communicate_nothing(rank: int, size: int) -> None:
    """One rank iterates, in a thread, while the others wait for it elsewhere."""
    sampler = fl.DistributedSampler(10)
    if rank == 0:
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.extend(sampler))
        thread.start()
        thread.join()
        assert seen == list(sampler)
        given = fl.DistributedSampler(10, seed=42, rank=0, size=1)
        given.set_epoch(7)
        assert len(list(given)) == 10
        next(iter(given))
    fl.barrier()


def test_iterating_and_given_ranks_communicate_nothing(pool: Any) -> None:
    pool(2).run(communicate_nothing)


def evaluate(rank: int, size: int, n: int) -> tuple[float, float, float]:
    values = np.arange(n) ** 2.0
    meter = fl.meter.AverageValueMeter()
    for index in fl.DistributedSampler(n, shuffle=False):
        meter.add(values[index])
    result: tuple[float, float, float] = fl.sync_meter(meter)
    return result


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("n", [1, 7, 10])
def test_evaluation_counts_every_sample_once(pool: Any, size: int, n: int) -> None:
    for mean, _, weight in pool(size).run(evaluate, n):
        assert weight == n
        assert mean == pytest.approx((np.arange(n) ** 2.0).mean(), rel=1e-14)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": -1}, ValueError, "n must be at least 0, got -1"),
        ({"n": [1, 2]}, TypeError, "n must be an integer, got list"),
        ({"n": 3, "seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"n": 3, "seed": None}, TypeError, "seed must be an integer, got NoneType"),
    ],
)
def test_senseless_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"DistributedSampler: {message}"):
        fl.DistributedSampler(**arguments)
    with pytest.raises(ValueError, match="DistributedSampler: epoch must be at least 0, got -1"):
        fl.DistributedSampler(3).set_epoch(-1)
