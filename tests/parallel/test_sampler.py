"""Samples of each rank: samplers, sharded data sets and containers, their epochs and state."""

import copy
import json
import operator
import pickle
import threading
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlight_py as fl
from flashlight_py.dataset import Dataset, PrefetchDataset, TensorDataset
from flashlight_py.dataset.dataset import epoch_order
from tests.dataset.test_datasets import Plain
from tests.distributed.conformance import on_ranks
from tests.tables import for_each

SIZES = (1, 2, 3, 4, 6)
few = settings(max_examples=30)


def samplers(n: int, size: int, epoch: int = 0, **options: Any) -> list[fl.DistributedSampler]:
    made = [fl.DistributedSampler(n, rank=rank, size=size, **options) for rank in range(size)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


@few
@given(st.integers(0, 100), st.integers(0, 9), st.booleans(), st.booleans())
def test_sampler_step_has_equal_samples_for_any_number_of_ranks(
    n: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    batch = 12  # a multiple of every size
    order = epoch_order(n, 5, epoch).tolist() if shuffle else list(range(n))
    for size in SIZES:
        parts = [
            list(sampler)
            for sampler in samplers(n, size, epoch, shuffle=shuffle, seed=5, drop_last=drop_last)
        ]
        for step in range(n // batch if drop_last else -(-n // batch)):
            share = slice(step * batch // size, (step + 1) * batch // size)
            taken = set(chain.from_iterable(part[share] for part in parts))
            assert taken == set(order[step * batch : (step + 1) * batch])
        stop = n - n % size if drop_last else n
        assert sorted(chain(*parts)) == sorted(order[:stop])
        assert len({len(part) for part in parts}) <= (1 if drop_last else 2)


def test_sampler_epochs_differ_and_repeat() -> None:
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


@on_ranks(("shm", 3))
@for_each(
    "kind name value",
    [
        *(("DistributedSampler", *item) for item in {"n": 20, "seed": 4, "shuffle": False}.items()),
        *(("ShardedDataset", *item) for item in {"n": 20, "global_batch_size": 5}.items()),
        ("DistributedSampler", "drop_last", True),
    ],
)
def test_every_rank_raises_mismatch_error_if_arguments_differ(
    rank: int, size: int, kind: str, name: str, value: Any
) -> None:
    def make(n: int = 10, global_batch_size: int = 4, **options: Any) -> Any:
        if kind == "DistributedSampler":
            return fl.DistributedSampler(n, **options)
        return fl.ShardedDataset(TensorDataset([np.arange(n)]), global_batch_size, **options)

    same = {"n": 10, "global_batch_size": 4, "seed": 0, "shuffle": True, "drop_last": False}
    with pytest.raises(fl.errors.MismatchError) as caught:
        make(**(same | {name: value} if rank == 1 else same))
    difference = f"{name} (rank(s) 0, 2: {same[name]}; rank(s) 1: {value})"
    start = f"{kind}: rank {rank} of 3: expected the same arguments on every rank"
    assert str(caught.value).startswith(start)
    assert f", got {difference}. Pass the same arguments" in str(caught.value)
    make()  # the world remains usable


@on_ranks(("shm", 2))
def test_sampler_and_dataset_on_different_ranks_raise_mismatch_error(rank: int, size: int) -> None:
    rows = fl.dataset.TensorDataset([np.arange(10)])
    with pytest.raises(fl.errors.MismatchError) as caught:
        fl.DistributedSampler(10) if rank else fl.ShardedDataset(rows, 2)
    message = str(caught.value)
    assert "object (rank(s) 0: ShardedDataset; rank(s) 1: DistributedSampler)" in message
    assert "global_batch_size (rank(s) 0: 2; rank(s) 1: nothing)" in message


@on_ranks(("shm", 2))
def test_iteration_and_explicit_ranks_do_not_communicate(rank: int, size: int) -> None:
    """One rank iterates in a thread while the other ranks wait for it in another call."""
    sampler = fl.DistributedSampler(10)
    if rank == 0:
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.extend(sampler))
        thread.start()
        thread.join()
        assert seen == list(sampler)
        explicit = fl.DistributedSampler(10, seed=42, rank=0, size=1)
        explicit.set_epoch(7)
        assert len(list(explicit)) == 10
        next(iter(explicit))
    fl.barrier()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": -1}, ValueError, "n must be at least 0, got -1"),
        ({"n": [1, 2]}, TypeError, "n must be an integer, got list"),
        ({"n": 3, "seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"n": 3, "seed": None}, TypeError, "seed must be an integer, got NoneType"),
    ],
)
def test_sampler_raises_for_invalid_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"DistributedSampler: {message}"):
        fl.DistributedSampler(**arguments)
    with pytest.raises(ValueError, match="DistributedSampler: epoch must be at least 0, got -1"):
        fl.DistributedSampler(3).set_epoch(-1)


WORLDS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


@few
@given(st.integers(0, 60), WORLDS, st.integers(0, 5), st.booleans())
def test_worlds_of_different_sizes_share_one_epoch(
    n: int, sizes: list[int], steps: int, shuffle: bool
) -> None:
    """Each world takes some steps and is followed by the next; the last one ends the epoch."""
    used: list[int] = []
    state: dict[str, Any] | None = None
    for number, size in enumerate(sizes):
        made = samplers(n, size, 3, seed=2, shuffle=shuffle)
        for sampler in made:
            if state:
                sampler.load_state_dict(state)
        is_last = number == len(sizes) - 1
        for sampler in made:
            left, taken = len(sampler), list(sampler) if is_last else list(islice(sampler, steps))
            assert len(taken) == (left if is_last else min(left, steps))
            used += taken
        state = through_json(made[0].state_dict())
        assert state["consumed"] == len(used)
        assert all(sampler.consumed <= len(used) for sampler in made)
    order = epoch_order(n, 2, 3).tolist() if shuffle else list(range(n))
    assert sorted(used) == sorted(order)


@few
@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
def test_drop_last_leaves_equal_numbers_on_every_rank(
    n: int, before: int, after: int, steps: int
) -> None:
    first = samplers(n, before, seed=2, drop_last=True)
    assert {len(sampler) for sampler in first} == {n // before}
    used = list(chain.from_iterable(list(islice(sampler, steps)) for sampler in first))
    second = samplers(n, after, seed=2, drop_last=True)
    for sampler in second:
        sampler.load_state_dict(first[0].state_dict())
    assert len({len(sampler) for sampler in second}) == 1
    rest = [list(sampler) for sampler in second]
    assert len({len(part) for part in rest}) == 1
    used += chain.from_iterable(rest)
    assert len(set(used)) == len(used)
    assert {sampler.consumed for sampler in second} <= {n, first[0].consumed}
    assert second[0].consumed == n or not rest[0]


@pytest.mark.parametrize("drop_last", [False, True])
def test_completed_epoch_stays_empty_until_the_next(drop_last: bool) -> None:
    first = fl.DistributedSampler(11, drop_last=drop_last, rank=0, size=4)
    assert len(list(first)) == 2 + (not drop_last)
    assert first.consumed == 11
    then = fl.DistributedSampler(11, rank=0, size=1)
    then.load_state_dict(first.state_dict())
    then.set_epoch(0)  # like a loop over epochs
    assert (len(then), list(then)) == (0, [])
    then.set_epoch(1)
    assert (len(then), then.consumed) == (11, 0)
    assert sorted(then) == list(range(11))


@pytest.mark.parametrize("threads", [0, 2])
def test_dataset_batches_remaining_samples_with_another_size(threads: int) -> None:
    rows = TensorDataset([np.arange(21)])
    four = [fl.ShardedDataset(rows, 4, rank=rank, size=4) for rank in range(4)]
    used: list[int] = []
    for dataset in four:
        ahead = PrefetchDataset(PrefetchDataset(dataset, 0, 1), threads, 3)
        used += chain.from_iterable(x.tolist() for (x,) in islice(ahead, 2))
        assert dataset.consumed == 8
    three = [fl.ShardedDataset(rows, 5, rank=rank, size=3) for rank in range(3)]
    for dataset in three:
        dataset.load_state_dict(through_json(four[3].state_dict()))
        assert len(dataset) == 3
        assert dataset.weight(2) == 1.0  # three samples for three ranks
        used += chain.from_iterable(x.tolist() for (x,) in PrefetchDataset(dataset, threads, 3))
        assert dataset.consumed == 21
        dataset.set_epoch(1)
        assert len(dataset) == 5
        assert dataset.consumed == 0
    assert sorted(used) == list(range(21))


def test_sampler_loads_the_state_of_a_dataset_and_sets_consumed() -> None:
    rows = TensorDataset([np.arange(10)])
    batches = fl.ShardedDataset(rows, 4, seed=1, rank=0, size=1)
    next(iter(batches))
    sampler = fl.DistributedSampler(10, seed=1, rank=0, size=1)
    sampler.load_state_dict(batches.state_dict())
    rest = epoch_order(10, 1, 0).tolist()[4:]
    assert list(sampler) == rest
    for data in (batches, sampler):
        data.set_consumed(8)
        assert data.consumed == 8
    assert list(sampler) == rest  # starts at the same position
    sampler.set_consumed(8)
    assert sampler.state_dict() == batches.state_dict()


GOOD = {"n": 10, "shuffle": True, "seed": 0, "epoch": 2, "consumed": 4}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"n": 11}, ValueError, "a state with n=10, got 11"),
        ({"seed": 1}, ValueError, "a state with seed=0, got 1"),
        ({"shuffle": False}, ValueError, "a state with shuffle=True, got False"),
        ({"consumed": 11}, ValueError, r"consumed must be in \[0, 10\], got 11"),
        ({"epoch": -1}, ValueError, "the state's epoch must be at least 0, got -1"),
        ({"epoch": "2"}, TypeError, "the state's epoch must be an integer, got str"),
    ],
)
def test_load_state_dict_raises_for_states_of_another_run(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    sampler = fl.DistributedSampler(10, rank=0, size=1)
    with pytest.raises(error, match=f"DistributedSampler: .*{message}"):
        sampler.load_state_dict(GOOD | changed)
    assert (sampler.epoch, sampler.consumed) == (0, 0)
    with pytest.raises(ValueError, match="expected a state with 'epoch', as state_dict"):
        sampler.load_state_dict({"consumed": 3})
    with pytest.raises(ValueError, match=r"samples must be in \[0, n\], got 11 for n=10"):
        sampler.set_consumed(11)


X = np.random.default_rng(1).standard_normal((21, 4))
Y = np.random.default_rng(2).standard_normal((21, 2))
BATCH = 4  # 21 samples: five batches and a single sample, so some parts are empty


def parts(dataset: Dataset, batch: int, size: int, **options: Any) -> list[fl.ShardedDataset]:
    return [fl.ShardedDataset(dataset, batch, rank=r, size=size, **options) for r in range(size)]


@few
@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 6), st.booleans(), st.booleans())
def test_parts_of_the_ranks_form_the_global_batches(
    n: int, batch: int, size: int, shuffle: bool, drop_last: bool
) -> None:
    rows = TensorDataset([np.arange(n)])
    made = parts(rows, batch, size, shuffle=shuffle, seed=3, drop_last=drop_last)
    order = epoch_order(n, 3, 0) if shuffle else np.arange(n)
    assert {len(batches) for batches in made} == {n // batch if drop_last else -(-n // batch)}
    for index, items in enumerate(zip(*made, strict=True)):
        global_batch = order[index * batch : (index + 1) * batch]
        assert np.concatenate([x for (x,) in items]).tolist() == global_batch.tolist()
        lengths = [len(x) for (x,) in items]
        assert max(lengths) - min(lengths) <= 1
        weights = [batches.weight(index) for batches in made]
        assert weights == [length * size / len(global_batch) for length in lengths]
        means = [x.mean() if len(x) else 0.0 for (x,) in items]
        assert np.average(means, weights=weights) == pytest.approx(global_batch.mean(), rel=1e-14)


@pytest.mark.parametrize("dataset", [TensorDataset([X, Y]), Plain(X, Y)], ids=["rows", "own"])
def test_empty_part_has_arrays_with_zero_rows(dataset: Dataset) -> None:
    first, _, third = parts(dataset, BATCH, 3)
    assert [field.shape for field in first[-1]] == [(1, 4), (1, 2)]
    assert [field.shape for field in third[-1]] == [(0, 4), (0, 2)]
    assert [field.dtype for field in third[-1]] == [X.dtype, Y.dtype]
    assert first.weight(-1) == 3.0
    assert third.weight(-1) == 0.0


def test_dataset_raises_for_invalid_arguments() -> None:
    rows = TensorDataset([np.arange(4)])
    with pytest.raises(TypeError, match=r"ShardedDataset: expected .*Dataset, got ndarray"):
        fl.ShardedDataset(np.arange(4), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="global_batch_size must be at least 1, got 0"):
        fl.ShardedDataset(rows, 0)
    with pytest.raises(TypeError, match="global_batch_size must be an integer, got float"):
        fl.ShardedDataset(rows, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be at least 0"):
        fl.ShardedDataset(rows, 2, seed=-3)
    with pytest.raises(IndexError, match=r"must be in \[-len, len\), got 2 for 2 batch"):
        fl.ShardedDataset(rows, 2).weight(2)
    with pytest.raises(IndexError):
        fl.ShardedDataset(rows, 2)[2]


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
