"""A run that goes on from a state, on other ranks: each sample of the epoch is used once."""

import json
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlight_py as fl
from flashlight_py.dataset import PrefetchDataset, TensorDataset
from flashlight_py.dataset.shares import epoch_order

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=4)


def samplers(n: int, size: int, **options: Any) -> list[fl.DistributedSampler]:
    return [
        fl.DistributedSampler(n, seed=2, rank=rank, size=size, **options) for rank in range(size)
    ]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


@given(st.integers(0, 60), SIZES, st.integers(0, 5), st.booleans())
def test_worlds_of_any_sizes_share_one_epoch(
    n: int, sizes: list[int], steps: int, shuffle: bool
) -> None:
    """Each world takes some steps and is followed by another one; the last goes to the end."""
    used: list[int] = []
    state: dict[str, Any] | None = None
    for number, size in enumerate(sizes):
        made = samplers(n, size, shuffle=shuffle)
        for each in made:
            each.set_epoch(3)
            if state:
                each.load_state_dict(state)
        is_last = number == len(sizes) - 1
        for each in made:
            used += list(each) if is_last else list(islice(each, steps))
        state = through_json(made[0].state_dict())
        assert state["consumed"] == len(used)
        assert all(each.consumed <= len(used) for each in made)
    order = epoch_order(n, 2, 3).tolist() if shuffle else list(range(n))
    assert sorted(used) == sorted(order)


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
def test_with_drop_last_every_rank_has_as_many_left(
    n: int, before: int, after: int, steps: int
) -> None:
    first = samplers(n, before, drop_last=True)
    used = list(chain.from_iterable(list(islice(each, steps)) for each in first))
    second = samplers(n, after, drop_last=True)
    for each in second:
        each.load_state_dict(first[0].state_dict())
    assert len({len(each) for each in second}) == 1
    rest = [list(each) for each in second]
    assert len({len(each) for each in rest}) == 1
    used += chain.from_iterable(rest)
    assert len(set(used)) == len(used)
    assert {each.consumed for each in second} <= {n, first[0].consumed}
    assert second[0].consumed == n or not rest[0]


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_is_over_stays_over_until_the_next(drop_last: bool) -> None:
    first = fl.DistributedSampler(11, drop_last=drop_last, rank=0, size=4)
    assert len(list(first)) == 2 + (not drop_last)
    assert first.consumed == 11
    then = fl.DistributedSampler(11, rank=0, size=1)
    then.load_state_dict(first.state_dict())
    then.set_epoch(0)  # as a loop over epochs does
    assert (len(then), list(then)) == (0, [])
    then.set_epoch(1)
    assert (len(then), then.consumed) == (11, 0)
    assert sorted(then) == list(range(11))


def test_what_the_user_says_is_consumed_stands() -> None:
    sampler = fl.DistributedSampler(12, rank=0, size=2)
    order = list(sampler)  # as for a ResampleDataset
    sampler.set_consumed(8)
    assert list(sampler) == order  # begins where it did
    assert sampler.state_dict() == {
        "n": 12,
        "shuffle": True,
        "seed": 0,
        "epoch": 0,
        "consumed": 8,
    }
    sampler.set_epoch(1)
    next(iter(sampler))
    assert sampler.consumed == 2


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_of_what_is_left_also_of_another_size(threads: int) -> None:
    rows = TensorDataset([np.arange(21)])
    four = [fl.ShardedDataset(rows, 4, rank=rank, size=4) for rank in range(4)]
    used: list[int] = []
    for each in four:
        ahead = PrefetchDataset(PrefetchDataset(each, 0, 1), threads, 3)
        used += chain.from_iterable(x.tolist() for (x,) in islice(ahead, 2))
        assert each.consumed == 8
    three = [fl.ShardedDataset(rows, 5, rank=rank, size=3) for rank in range(3)]
    for each in three:
        each.load_state_dict(through_json(four[3].state_dict()))
        assert len(each) == 3
        assert each.weight(2) == 1.0  # three samples for three ranks
        used += chain.from_iterable(x.tolist() for (x,) in PrefetchDataset(each, threads, 3))
        assert each.consumed == 21
        each.set_epoch(1)
        assert len(each) == 5
        assert each.consumed == 0
    assert sorted(used) == list(range(21))


def test_a_sampler_goes_on_from_a_dataset() -> None:
    rows = TensorDataset([np.arange(10)])
    batches = fl.ShardedDataset(rows, 4, seed=1, rank=0, size=1)
    next(iter(batches))
    sampler = fl.DistributedSampler(10, seed=1, rank=0, size=1)
    sampler.load_state_dict(batches.state_dict())
    assert list(sampler) == epoch_order(10, 1, 0).tolist()[4:]
    batches.set_consumed(10)
    assert batches.consumed == 10


GOOD = {"n": 10, "shuffle": True, "seed": 0, "epoch": 2, "consumed": 4}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"n": 11}, ValueError, "taken with n=11, this one has 10"),
        ({"seed": 1}, ValueError, "taken with seed=1, this one has 0"),
        ({"shuffle": False}, ValueError, "taken with shuffle=False, this one has True"),
        ({"consumed": 11}, ValueError, "a state with 11 of 10 samples consumed"),
        ({"epoch": -1}, ValueError, "the state's epoch must be at least 0, got -1"),
        ({"epoch": "2"}, TypeError, "the state's epoch must be an integer, got str"),
    ],
)
def test_states_of_another_run_are_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    sampler = fl.DistributedSampler(10, rank=0, size=1)
    with pytest.raises(error, match=f"DistributedSampler: .*{message}"):
        sampler.load_state_dict(GOOD | changed)
    assert (sampler.epoch, sampler.consumed) == (0, 0)
    with pytest.raises(ValueError, match="expected a state with 'epoch', as state_dict"):
        sampler.load_state_dict({"consumed": 3})
    with pytest.raises(ValueError, match="at most n=10 samples can be consumed, got 11"):
        sampler.set_consumed(11)
