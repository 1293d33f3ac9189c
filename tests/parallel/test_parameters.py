"""Initial parameters, groups, buffers and ignored names of distributed modules."""

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks
from tests.parallel.trees import Counting


def build(seed: int) -> Any:
    fl.set_seed(seed)
    return Counting(3, 2)


def state(model: Any) -> dict[str, Any]:
    return {name: np.array(array) for name, array in model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


@on_ranks(("shm", 3))
def test_broadcast_parameters_copies_parameters_and_buffers_of_root(rank: int, size: int) -> None:
    model = build(rank)
    model.seen[...], model.mean = rank, np.float64(rank)
    arrays = [param.array for param in model.params()]
    fl.broadcast_parameters(model, 1)
    assert all(p.array is a for p, a in zip(model.params(), arrays, strict=True))
    assert same({**state(build(1)), "seen": [1, 1], "mean": 1}, state(model))


@on_ranks(("shm", 4))
def test_parameter_functions_work_within_groups(rank: int, size: int) -> None:
    group = fl.split(rank % 2)
    model = build(rank)
    fl.all_reduce_parameters(model, group=group)
    first, second = (build(seed).params() for seed in (rank % 2, rank % 2 + 2))
    for param, one, other in zip(model.params(), first, second, strict=True):
        np.testing.assert_allclose(param.array, (one.array + other.array) / 2, rtol=1e-6)
    fl.broadcast_parameters(model, 1, group=group)
    reported = []
    for distribute in (
        lambda: fl.distribute_module_grads(model, group=group),
        lambda: fl.distribute_module_grads(model, hook=fl.Float16Compression(), group=group),
        lambda: fl.distribute_module_grads(model, reducer=fl.InlineReducer(0.5, group=group)),
    ):
        distribute()
        model.zero_grad()
        model(fl.input(np.full((1, 3), rank, np.float32))).backward(np.ones((1, 2), np.float32))
        reported.append(model.layer.weight.grad.tolist())
    model.zero_grad()
    plain = build(0)
    plain(fl.input(np.full((1, 3), rank, np.float32))).backward(np.ones((1, 2), np.float32))
    fl.all_reduce_gradients(plain, 0.5, group=group)
    reported.append(plain.layer.weight.grad.tolist())
    group.close()
    assert reported == [[[1.0 + rank % 2] * 3] * 2] * 4


@on_ranks(("shm", 2))
def test_broadcast_parameters_names_the_different_parameter(rank: int, size: int) -> None:
    with pytest.raises(fl.errors.MismatchError) as caught:
        fl.broadcast_parameters(fl.nn.Sequential(fl.nn.Linear(3, 1 + rank)))
    assert str(caught.value).startswith(f"[broadcast_parameters] rank {rank} of 2: expected ")
    kinds = "(rank(s) 0: float32 (1, 3); rank(s) 1: float32 (2, 3))"
    assert f"got a difference at module.0.weight {kinds}" in str(caught.value)


# Initial parameters of the ranks; the last two cases differ.
STARTS = [*("broadcast", "averaged", "same seed", "ignored"),
          *("distribute_module_grads", "DistributedOptimizer")]  # fmt: skip


@pytest.mark.parametrize("kind", STARTS)
@on_ranks(("shm", 3))
def test_warning_names_ranks_with_other_parameters_once(rank: int, size: int, kind: str) -> None:
    model = build(rank if kind != "same seed" else 0)
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer(model.params(), 0.1))
    if kind == "averaged":
        fl.all_reduce_parameters(model)
    if kind == "broadcast":
        fl.broadcast_parameters(model)
    ignore = ["layer.weight", model.layer.bias] if kind == "ignored" else []
    if ignore:
        model.other = fl.param(np.zeros(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "DistributedOptimizer":
            optimizer.step()
            optimizer.step()
        else:
            fl.distribute_module_grads(model, ignore=ignore)
    results = [f"{warning.filename.rpartition('/')[2]}: {warning.message}" for warning in caught]
    assert len(results) == (rank == 0 and kind in STARTS[-2:])
    for text in results:
        assert text.startswith(f"test_parameters.py: {kind}: rank 0 of 3: expected the same ")
        assert "got other values on rank(s) 1, 2 than on rank 0" in text
        assert "fl.broadcast_parameters(module)" in text


@on_ranks(("shm", 2))
def test_forward_copies_buffers_of_rank_0_in_training(rank: int, size: int) -> None:
    model = build(0)
    outer = fl.nn.Sequential(fl.nn.ReLU(), model)
    fl.distribute_module_grads(model)
    x = fl.input(np.full((1 + rank, 3), rank + 1, np.float32))
    after = []
    for step in range(4):
        if step == 3:
            with fl.no_sync(model):
                outer(x)
        else:
            (outer.eval() if step == 2 else outer.train())(x)
        after.append([model.seen[0].item(), float(model.mean)])
        outer.train()
    for module in (copy.deepcopy(outer), pickle.loads(pickle.dumps(model))):
        module(x)  # a copy is local to this rank
    fl.distribute_module_grads(model, broadcast_buffers=False)
    model(x)
    after.append([model.seen[0].item()])
    # Rank 1 continues from rank 0's buffer: 1 and its own 2 samples have the mean 2.
    first = [[1, 1.0], [2, 2.0], [2, 2.0], [3, 3.0], [4]]
    assert after == (first if rank == 0 else [[2, 2.0], [3, 3.0], [3, 3.0], [5, 5.0], [7]])


@on_ranks(("shm", 2))
def test_forward_copies_buffers_after_a_rank_replaces_a_buffer(rank: int, size: int) -> None:
    """The plan of the buffers is kept, unless a rank has replaced or reshaped a buffer."""
    model, results = fl.nn.BatchNorm(2), []
    fl.distribute_module_grads(model)
    x = fl.input(np.array([[0.0, 1.0], [2.0, 3.0]], np.float32) * (1 + rank))
    for step in range(4):
        if step == 2 and rank == 1:
            model.running_mean = np.full(2, 9.0, np.float32)
        model(x)
        results.append(model.running_mean.tolist())
    if rank == 1:
        model.running_mean = np.zeros(3, np.float32)
    with pytest.raises(fl.errors.MismatchError, match=r'tree\["running_mean"\] \(rank\(s\) 0: '):
        model(x)
    mean = np.zeros(2)
    for first, other in zip(*fl.all_gather_object(results), strict=True):
        np.testing.assert_allclose(first, mean * 0.9 + np.array([0.1, 0.2]), rtol=1e-6)
        np.testing.assert_allclose(other, mean * 0.9 + np.array([0.2, 0.4]), rtol=1e-6)
        mean = np.array(first)


@on_ranks(("shm", 2))
def test_ignored_parameters_and_buffers_stay_local(rank: int, size: int) -> None:
    model = build(0)
    model.own = fl.param(np.full(1 + rank, 2.0, np.float32))
    fired: list[Any] = []
    fl.distribute_module_grads(model, ignore=["own"] if rank else [model.own])
    model.own.register_grad_hook(lambda variable: fired.append(variable.shape))
    x = fl.input(np.full((1, 3), rank + 1, np.float32))
    (model(x)[0, :1] * model.own).backward(np.ones(1 + rank, np.float32))
    weight = model.layer.weight.grad[0].tolist()
    fl.distribute_module_grads(model, ignore=["own", "layer.bias", "seen", "mean"])
    assert model.layer.bias.hook is None  # hook of the first call, which the second call replaced
    assert model.before_forward is None
    optimizer = fl.optim.SGDOptimizer(model.layer.params(), 0.1 * (1 + rank), momentum=0.9)
    model.mean = np.float64(rank)
    with fl.join(model, optimizer):
        if rank:
            (model(x)[0, :1] * model.own).backward(np.ones(2, np.float32))
    assert (model.own.shape, float(model.mean), optimizer.lr) == ((1 + rank,), 3.0 * rank, 0.2)
    assert weight == [5.0] * 3  # (1 * 2 + 2 * 2 * 2) / 2
    assert model.own.grad.shape == (1 + rank,)
    assert fired == [(1 + rank,)] * (1 + rank)  # once more on rank 1, in join


@on_ranks(("shm", 2))
def test_periodic_averaging_averages_every_nth_step(rank: int, size: int) -> None:
    model = fl.nn.Linear(1, 1, bias=False)
    averaging = fl.PeriodicAveraging(model, every=3)
    model.weight.array[...] = 0
    seen = []
    for _ in range(7):
        model.weight.array[...] += rank
        averaging.step()
        seen.append(model.weight.array.item())
    other = fl.PeriodicAveraging(model, every=3)
    other.load_state_dict(averaging.state_dict())
    assert [other.step() for _ in range(2)] == [False, True]
    with pytest.raises(fl.errors.MismatchError, match="every"):
        fl.PeriodicAveraging(model, every=1 + rank)
    assert seen == [[0, 0, 1.5, 1.5, 1.5, 3, 3], [1, 2, 1.5, 2.5, 3.5, 3, 4]][rank]


@on_ranks(("shm", 3))
def test_clip_grad_norm_uses_the_norm_of_all_ranks(rank: int, size: int) -> None:
    """Rank r has r gradients, so rank 0 has none; all are scaled by the total norm."""
    group = fl.split(0)
    params = [fl.param(np.zeros(3)) for _ in range(rank)]
    for param in params:
        param.grad = np.full(3, 2.0)
    norm = fl.optim.clip_grad_norm(params, 3.0, group=group)
    group.close()
    assert norm == 6.0
    assert [param.grad.tolist() for param in params] == [[1.0] * 3] * rank


def test_parameter_functions_raise_for_invalid_arguments() -> None:
    for function in (fl.broadcast_parameters, fl.all_reduce_parameters):
        with pytest.raises(TypeError, match=r"expected a flashlight_py.nn.Module, got str"):
            function("model")  # type: ignore[operator]
    with pytest.raises(ValueError, match="every must be at least 1"):
        fl.PeriodicAveraging(build(0), every=0)
    with pytest.raises(ValueError, match="root must be a rank"):
        fl.broadcast_parameters(build(0), 1)


def test_captured_step_with_periodic_averaging_stays_eager() -> None:
    averaging = fl.PeriodicAveraging(fl.nn.Linear(3, 2), every=2)

    @fl.capture
    def step(x: np.ndarray) -> bool:
        return averaging.step()

    with pytest.warns(RuntimeWarning, match=r"it changes averaging\._steps"):
        assert [step(np.ones(3)) for _ in range(4)] == [False, True] * 2
