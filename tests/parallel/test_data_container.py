"""A rank's share of data; data, meters and profiles of groups."""

import copy
import json
import operator
import pickle
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlight_py as fl
from flashlight_py.dataset.dataset import epoch_order
from tests.distributed.conformance import on_ranks
from tests.tables import for_each

BOUND = st.none() | st.integers(-15, 15)


class OnlyGet:
    """A minimal data object; its ``shape`` is that of a sample."""

    shape = (3, 32, 32)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return range(70, 77)[operator.index(index)]


def shares(data: Any, size: int) -> list[Any]:
    return [fl.DistributedDataContainer(data, rank, size) for rank in range(size)]


@settings(max_examples=30)
@given(st.lists(st.integers(), max_size=40), st.integers(1, 8))
def test_shares_contain_every_element_once_in_order(data: list[int], size: int) -> None:
    parts = shares(data, size)
    assert list(chain(*parts)) == data
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    assert [part[i] for part in parts for i in range(len(part))] == data


@settings(max_examples=30)
@given(st.integers(0, 20), st.integers(1, 4), BOUND, BOUND, BOUND.filter(lambda step: step != 0))
def test_container_slices_and_negative_indices_equal_a_list(
    n: int, size: int, start: int | None, stop: int | None, step: int | None
) -> None:
    for part in shares(list(range(n)), size):
        elements = list(part)
        assert part[start:stop:step] == elements[start:stop:step]
        assert [part[-i - 1] for i in range(len(part))] == elements[::-1]


def test_container_accepts_any_object_with_length_and_indices() -> None:
    assert [list(part) for part in shares("abcde", 2)] == [["a", "b", "c"], ["d", "e"]]
    assert [list(part) for part in shares(OnlyGet(), 3)] == [[70, 71, 72], [73, 74], [75, 76]]
    assert [list(part) for part in shares([1], 3)] == [[1], [], []]
    rows = np.arange(10.0).reshape(5, 2)
    second = fl.DistributedDataContainer(rows, 1, 2)
    np.testing.assert_array_equal(second[:], rows[3:])
    assert np.shares_memory(second[:], rows)


def test_container_of_samples_can_be_batched() -> None:
    x, y = np.arange(14.0).reshape(7, 2), np.arange(7)
    for data in (fl.dataset.TensorDataset([x, y]), list(zip(x, y, strict=True))):
        seen = []
        for part in shares(data, 3):
            batches = fl.dataset.PrefetchDataset(fl.dataset.BatchDataset(part, 2), 1, 2)
            assert len(batches) == -(-len(part) // 2)
            seen += list(batches)
        np.testing.assert_array_equal(np.concatenate([batch[0] for batch in seen]), x)
        np.testing.assert_array_equal(np.concatenate([batch[1] for batch in seen]), y)


@on_ranks(("single", 1), ("shm", 3))
def test_container_uses_the_world_by_default(rank: int, size: int) -> None:
    part = fl.DistributedDataContainer(range(10))
    assert len(part) == {1: [10], 3: [4, 3, 3]}[size][rank]
    totals = fl.all_reduce(np.array([len(part), sum(part)]))
    assert totals.tolist() == [10, 45]


@on_ranks(("shm", 2), fresh=True, init=None)
def test_shares_raise_if_they_were_made_before_init(rank: int, size: int, tmp_path: Any) -> None:
    """An object made before init would contain all samples on every rank, so its use raises."""
    container = fl.DistributedDataContainer([1, 2, 3])
    sampler = fl.DistributedSampler(3)
    batches = fl.ShardedDataset(fl.dataset.TensorDataset([np.arange(3)]), 2)
    assert len(list(container)) == len(list(sampler)) == 3
    init = fl.DistributedInit.FILE_SYSTEM
    fl.distributed_init(init, rank, size, {"FILE_PATH": str(tmp_path / "run")})
    for use in (
        lambda: container[0],
        lambda: container[:2],
        lambda: list(sampler),
        lambda: sampler.set_epoch(1),
        lambda: batches[0],
        lambda: batches.set_epoch(1),
    ):
        with pytest.raises(fl.errors.NotInitializedError, match=r"as rank 0 of 1.*Make a new"):
            use()
    fl.distributed_shutdown()
    assert list(container) == [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"x": [1, 2]}, TypeError, r"got the mapping dict.*TensorDataset"),
        ({1, 2}, TypeError, r"got set, which has no \[\]"),
        (np.array(3), TypeError, r"got ndarray, which has no length"),
        (iter([1]), TypeError, r"which has no \[\]"),
    ],
)
def test_container_raises_type_error_for_unsuitable_data(
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
def test_shares_raise_for_invalid_rank_or_size(
    rank: Any, size: Any, error: type[Exception], message: str
) -> None:
    for make in (
        lambda: fl.DistributedDataContainer([1, 2], rank, size),
        lambda: fl.DistributedSampler(2, rank=rank, size=size),
        lambda: fl.ShardedDataset(fl.dataset.TensorDataset([np.ones(2)]), 1, rank=rank, size=size),
    ):
        with pytest.raises(error, match=message):
            make()


def test_container_raises_for_invalid_indices() -> None:
    part = fl.DistributedDataContainer([1, 2, 3], 1, 2)
    with pytest.raises(
        IndexError, match=r"DistributedDataContainer: index must be in \[-1, 1\), got 1"
    ):
        part[1]
    with pytest.raises(IndexError):
        part[-2]
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        part["a"]
    with pytest.raises(TypeError, match=r"data with slices, got OnlyGet.*single indices"):
        fl.DistributedDataContainer(OnlyGet())[1:2]


RANKS = [2, 0]  # of a world of three; every rank differs from its world rank
ROWS = fl.dataset.TensorDataset([np.arange(10)])
MAKERS: dict[str, Callable[..., Any]] = {
    "DistributedSampler": partial(fl.DistributedSampler, 10),
    "ShardedDataset": partial(fl.ShardedDataset, ROWS, 4),
    "DistributedDataContainer": partial(fl.DistributedDataContainer, range(10)),
}


def raised(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def samples(data: Any) -> list[int]:
    return [int(i) for item in data for i in (item[0] if isinstance(item, tuple) else [item])]


@on_ranks(("shm", 3))
@for_each("name", MAKERS)
def test_shares_use_rank_and_size_of_the_group(rank: int, size: int, name: str) -> None:
    """Rank 1 of the world is not a member; it makes no call, and no rank waits for it."""
    make, group = MAKERS[name], fl.new_group(RANKS)
    if not group.is_member:
        words = raised(ValueError, lambda: make(group=group))
        assert "a member of the group of world ranks [2, 0]" in words
        return
    message = raised(ValueError, lambda: make(rank=0, size=1, group=group))
    assert "rank=0, size=1 and a group" in message
    assert group.rank == RANKS.index(rank)
    data, rank_and_size = make(group=group), {"rank": group.rank, "size": group.size}
    expected = samples(make(**rank_and_size))
    copies = copy.deepcopy(data), pickle.loads(pickle.dumps(data))
    assert samples(data) == samples(copies[0]) == samples(copies[1]) == expected
    assert sorted(fl.all_gather(np.array(expected), group=group)) == list(range(10))
    group.close()
    assert "this group is closed" in raised(fl.errors.GroupClosedError, lambda: samples(data))


@on_ranks(("shm", 3))
@for_each("name", ["DistributedSampler", "ShardedDataset"])
def test_epochs_are_compared_within_the_group(rank: int, size: int, name: str) -> None:
    make, group = MAKERS[name], fl.new_group(RANKS)
    if not group.is_member:
        return
    data = make(seed=3, group=group)
    data.set_epoch(2)
    state = data.state_dict()
    assert state == {"n": 10, "shuffle": True, "seed": 3, "epoch": 2, "consumed": 0}
    data.load_state_dict({**state, "consumed": 4})
    local_samples = samples(data)
    left = fl.all_gather(np.array(local_samples), group=group)
    assert sorted(left) == sorted(epoch_order(10, 3, 2)[4:])
    differing = (
        lambda: make(seed=group.rank, group=group),
        lambda: data.set_epoch(3 + group.rank),
        lambda: data.load_state_dict({**state, "consumed": group.rank}),
    )
    errors = [raised(fl.errors.MismatchError, call) for call in differing]
    assert (data.epoch, data.consumed, samples(data)) == (2, 10, local_samples)  # unchanged
    # Invalid arguments on one rank raise on the other rank as well.
    error: type[Exception] = fl.errors.MismatchError if group.rank else ValueError
    for arguments in ({"seed": -1}, {"rank": 0, "size": 1}):
        call = partial(make, group=group, **({} if group.rank else arguments))
        errors += [raised(error, call)]
    for text, field in zip(errors, ("seed", "epoch", "consumed"), strict=False):
        assert text.startswith(f"{name}: rank {group.rank} of 2: expected the same arguments")
        assert f"{field} (rank(s) 0: " in text
        assert "on every rank of this group (ranks 2, 0" in text
    other = f"rank 0 called {name}, and rejected its arguments"
    reasons = ("seed must be at least 0, got -1", "and a group")
    for text, reason in zip(errors[3:], reasons, strict=True):
        assert (other if group.rank else reason) in text


VALUES = np.random.default_rng(3).standard_normal(60)


@on_ranks(("single", 1), ("shm", 2), ("shm", 4))
def test_sync_meter_adds_the_meters_of_all_ranks(rank: int, size: int) -> None:
    average, squares = fl.meter.AverageValueMeter(), fl.meter.MSEMeter()
    for value in VALUES[rank::size]:
        average.add(value)
        squares.add(np.array([value]), np.array([0.0]))
    before = average.value()
    results = [fl.sync_meter(average) for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert average.value() == before
    mean, variance, weight = results[0]
    assert mean == pytest.approx(VALUES.mean(), rel=1e-12)
    assert variance == pytest.approx(VALUES.var(ddof=1), rel=1e-12)
    assert weight == 60
    assert fl.sync_meter(squares) == pytest.approx((VALUES**2).mean(), rel=1e-12)
    with pytest.raises(TypeError, match="Meter"):
        fl.sync_meter(3.0)  # type: ignore[arg-type]


@on_ranks(("shm", 3))
def test_sync_meter_adds_the_meters_of_the_group(rank: int, size: int) -> None:
    meter, group = fl.meter.AverageValueMeter(), fl.new_group(RANKS)
    meter.add(float(rank))
    if group.is_member:
        assert fl.sync_meter(meter, group=group) == (1.0, 2.0, 2.0)
    else:
        words = raised(ValueError, lambda: fl.sync_meter(meter, group=group))
        assert "a member of the group" in words


def profiled(rank: int, size: int, path: str) -> None:
    group = fl.new_group(RANKS)
    profile = fl.profile(path, group=group)
    if not group.is_member:
        assert "a member of the group" in raised(ValueError, profile.start)
        return
    with profile:
        group.all_reduce(np.zeros(3))


def test_profile_of_a_group_uses_world_ranks(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    pool(3).run(profiled, str(path))
    trace = json.loads(path.read_text())
    calls = [e for e in trace["traceEvents"] if e.get("cat") == "collective"]
    assert {e["pid"] for e in calls if e["name"] == "all_reduce"} == {0, 2}
    assert {s["rank"] for s in trace["otherData"]["summary"]} == {0, 2}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
