"""Global batches in parts: the same batches, and the same training, for any number of ranks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlight_py as fl
from flashlight_py.dataset import Dataset, PrefetchDataset, TensorDataset
from flashlight_py.dataset.shares import epoch_order
from tests.distributed.conformance import on_ranks

X = np.random.default_rng(1).standard_normal((21, 4))
Y = np.random.default_rng(2).standard_normal((21, 2))
BATCH = 4  # 21 samples: five batches and one of a single sample, so that some ranks get none
EPOCHS = 3


class Plain(Dataset):
    """The same samples without the fast ways of a TensorDataset."""

    def __len__(self) -> int:
        return len(X)

    def get(self, index: int) -> tuple[np.ndarray, ...]:
        return X[index], Y[index]


def parts(dataset: Dataset, batch: int, size: int, **options: Any) -> list[fl.ShardedDataset]:
    return [fl.ShardedDataset(dataset, batch, rank=r, size=size, **options) for r in range(size)]


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 6), st.booleans(), st.booleans())
def test_the_parts_of_the_ranks_make_the_global_batches(
    n: int, batch: int, size: int, shuffle: bool, drop_last: bool
) -> None:
    rows = TensorDataset([np.arange(n)])
    made = parts(rows, batch, size, shuffle=shuffle, seed=3, drop_last=drop_last)
    order = epoch_order(n, 3, 0) if shuffle else np.arange(n)
    assert {len(each) for each in made} == {n // batch if drop_last else -(-n // batch)}
    for index, items in enumerate(zip(*made, strict=True)):
        whole = order[index * batch : (index + 1) * batch]
        assert np.concatenate([x for (x,) in items]).tolist() == whole.tolist()
        lengths = [len(x) for (x,) in items]
        assert max(lengths) - min(lengths) <= 1
        weights = [each.weight(index) for each in made]
        assert weights == [length * size / len(whole) for length in lengths]
        means = [x.mean() if len(x) else 0.0 for (x,) in items]
        assert np.average(means, weights=weights) == pytest.approx(whole.mean(), rel=1e-14)


@pytest.mark.parametrize("dataset", [TensorDataset([X, Y]), Plain()], ids=["rows", "own"])
def test_an_empty_part_has_arrays_of_zero_rows(dataset: Dataset) -> None:
    first, _, third = parts(dataset, BATCH, 3)
    assert [field.shape for field in first[-1]] == [(1, 4), (1, 2)]
    assert [field.shape for field in third[-1]] == [(0, 4), (0, 2)]
    assert [field.dtype for field in third[-1]] == [X.dtype, Y.dtype]
    assert first.weight(-1) == 3.0
    assert third.weight(-1) == 0.0


def test_epochs_differ_and_repeat_also_when_prefetched() -> None:
    batches = fl.ShardedDataset(TensorDataset([np.arange(21)]), BATCH, seed=1, rank=0, size=2)
    ahead = PrefetchDataset(batches, 2, 3)

    def samples() -> list[int]:
        return [int(index) for (x,) in ahead for index in x]

    first = samples()
    batches.set_epoch(1)
    assert batches.epoch == 1
    second = samples()
    assert first != second
    batches.set_epoch(0)
    assert samples() == first


FIRST = {"n": 10, "global_batch_size": 4, "epoch": 0}  # what rank 0 gives


@pytest.mark.parametrize(("what", "value"), FIRST.items())
@on_ranks(("shm", 2))
def test_ranks_that_differ_raise_on_every_rank(rank: int, size: int, what: str, value: int) -> None:
    n, batch, epoch = (first + rank * (what == name) for name, first in FIRST.items())
    with pytest.raises(fl.errors.MismatchError) as caught:
        fl.ShardedDataset(TensorDataset([np.arange(n)]), batch).set_epoch(epoch)
    message = str(caught.value)
    assert message.startswith(f"rank {rank} of 2: the ranks pass a ShardedDataset ")
    assert f"{what} (rank(s) 0: {value}; rank(s) 1: {value + 1})" in message


def build() -> Any:
    fl.set_seed(0)
    model = fl.nn.Sequential(fl.nn.Linear(4, 5), fl.nn.Tanh(), fl.nn.Linear(5, 2))
    return model.astype(np.float64)


def train(rank: int, size: int, way: str) -> list[Any]:
    model, criterion = build(), fl.nn.MeanSquaredError()
    optimizer = fl.optim.SGDOptimizer(model.params(), 0.1, momentum=0.9)
    batches = fl.ShardedDataset(TensorDataset([X, Y]), BATCH, seed=11)
    if way == "hooks":
        fl.distribute_module_grads(model)
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        for t, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            prediction = model(fl.input(x))
            if len(x):
                (criterion(prediction, fl.no_grad(y)) * batches.weight(t)).backward()
            else:
                prediction.backward(prediction.array)  # of no rows: the gradients are zeros
            if way == "by hand":
                fl.all_reduce_gradients(model, 1 / size)
            optimizer.step()
    return [param.array.copy() for param in model.params()]


def train_plainly() -> list[Any]:
    """The same training written out on whole batches, without anything of ours that shares."""
    model, criterion = build(), fl.nn.MeanSquaredError()
    optimizer = fl.optim.SGDOptimizer(model.params(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        order = epoch_order(len(X), 11, epoch)
        for start in range(0, len(X), BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            criterion(model(fl.input(X[rows])), fl.no_grad(Y[rows])).backward()
            optimizer.step()
    return [param.array.copy() for param in model.params()]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("way", ["hooks", "by hand"])
def test_training_is_the_same_for_any_number_of_ranks(pool: Any, size: int, way: str) -> None:
    expected = train_plainly()
    for result in pool(size).run(train, way):
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def test_senseless_arguments_are_refused() -> None:
    rows = TensorDataset([np.arange(4)])
    with pytest.raises(TypeError, match=r"ShardedDataset: expected .*Dataset, got ndarray"):
        fl.ShardedDataset(np.arange(4), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="global_batch_size must be at least 1, got 0"):
        fl.ShardedDataset(rows, 0)
    with pytest.raises(TypeError, match="global_batch_size must be an integer, got float"):
        fl.ShardedDataset(rows, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be at least 0"):
        fl.ShardedDataset(rows, 2, seed=-3)
    with pytest.raises(IndexError, match=r"holds 2 batch\(es\); index 2"):
        fl.ShardedDataset(rows, 2).weight(2)
    with pytest.raises(IndexError):
        fl.ShardedDataset(rows, 2)[2]
