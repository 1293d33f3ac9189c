"""Samplers, shares, meters and profiles of a group: its ranks take part, and no other rank."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.dataset.shares import epoch_order
from tests.distributed.conformance import on_ranks

RANKS = [2, 0]  # of a world of three, so that no rank of the group is the one in the world
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


def use_share(rank: int, size: int, name: str) -> tuple[int, list[int]]:
    """Rank 1 of the world is no member, calls nothing in the group and is not waited for."""
    make, group = MAKERS[name], fl.new_group(RANKS)
    if not group.is_member:
        assert "not in the group of the world's ranks [2, 0]" in raised(
            ValueError, lambda: make(group=group)
        )
        return -1, []
    message = raised(ValueError, lambda: make(rank=0, size=1, group=group))
    assert "rank=0, size=1 and a group" in message
    data, place = make(group=group), {"rank": group.rank, "size": group.size}
    expected = samples(make(**place))
    assert samples(data) == samples(copy.deepcopy(data)) == expected
    group.close()
    assert "this group is closed" in raised(fl.errors.GroupClosedError, lambda: samples(data))
    return group.rank, expected


@pytest.mark.parametrize("name", MAKERS)
def test_group_decides_the_share(pool: Any, name: str) -> None:
    (second, rest), outsider, (first, begin) = pool(3).run(use_share, name)
    assert (first, second, outsider) == (0, 1, (-1, []))
    assert sorted(begin + rest) == list(range(10))


def use_epochs(rank: int, size: int, name: str) -> list[str]:
    make, group = MAKERS[name], fl.new_group(RANKS)
    if not group.is_member:
        return []
    data = make(seed=3, group=group)
    data.set_epoch(2)
    state = data.state_dict()
    assert state == {"n": 10, "shuffle": True, "seed": 3, "epoch": 2, "consumed": 0}
    data.load_state_dict({**state, "consumed": 4})
    own = samples(data)
    left = fl.all_gather(np.array(own), group=group)
    assert sorted(left) == sorted(epoch_order(10, 3, 2)[4:])
    differing = (
        lambda: make(seed=group.rank, group=group),
        lambda: data.set_epoch(3 + group.rank),
        lambda: data.load_state_dict({**state, "consumed": group.rank}),
    )
    errors = [raised(fl.errors.MismatchError, call) for call in differing]
    assert (data.epoch, data.consumed, samples(data)) == (2, 10, own)  # as it was
    # Arguments that one rank refuses are an error on the other rank, too.
    error: type[Exception] = fl.errors.MismatchError if group.rank else ValueError
    for arguments in ({"seed": -1}, {"rank": 0, "size": 1}):
        call = partial(make, group=group, **({} if group.rank else arguments))
        errors += [raised(error, call)]
    return errors


@pytest.mark.parametrize("name", ["DistributedSampler", "ShardedDataset"])
def test_epochs_are_compared_in_the_group_only(pool: Any, name: str) -> None:
    second, outsider, first = pool(3).run(use_epochs, name)
    assert outsider == []
    for rank, errors in enumerate([first, second]):
        for error, what in zip(errors, ("seed", "epoch", "consumed"), strict=False):
            assert error.startswith(f"rank {rank} of 2: the ranks pass a {name} different")
            assert f"{what} (rank(s) 0: " in error
            assert "Pass the same on every rank of this group (ranks 2, 0" in error
    assert "seed must be at least 0, got -1" in first[3]
    assert "and a group" in first[4]
    assert all(f"rank 0 called {name}, and refused its arguments" in each for each in second[3:])


def load_in_processes(rank: int, size: int) -> list[int]:
    group = fl.split(rank % 2)
    data = fl.ShardedDataset(ROWS, 4, shuffle=False, group=group)
    return samples(fl.dataset.PrefetchDataset(data, 1, 2, "processes"))


def test_worker_processes_have_the_share_of_the_group(pool: Any) -> None:
    zero, one, two = pool(3).run(load_in_processes)
    assert (sorted(zero + two), one) == (list(range(10)), list(range(10)))


@on_ranks(("shm", 3))
def test_sync_meter_adds_the_meters_of_the_group(rank: int, size: int) -> None:
    meter, group = fl.meter.AverageValueMeter(), fl.new_group(RANKS)
    meter.add(float(rank))
    if group.is_member:
        assert fl.sync_meter(meter, group=group) == (1.0, 2.0, 2.0)
    else:
        words = raised(ValueError, lambda: fl.sync_meter(meter, group=group))
        assert "not in the group" in words


def profiled(rank: int, size: int, path: str) -> None:
    group = fl.new_group(RANKS)
    profile = fl.profile(path, group=group)
    if not group.is_member:
        assert "not in the group" in raised(ValueError, profile.start)
        return
    with profile:
        group.all_reduce(np.zeros(3))


def test_profile_of_a_group_has_its_ranks_as_the_world_numbers_them(
    pool: Any, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    pool(3).run(profiled, str(path))
    trace = json.loads(path.read_text())
    calls = [e for e in trace["traceEvents"] if e.get("cat") == "collective"]
    assert {e["pid"] for e in calls if e["name"] == "all_reduce"} == {0, 2}
    assert {s["rank"] for s in trace["otherData"]["summary"]} == {0, 2}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
