"""Data-parallel modules: parameters, buffers and gradients of all ranks, and their mismatches."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import DistributedError
from tests.distributed.conformance import on_ranks, ranks_in
from tests.parallel.trees import Counting


def build(seed: int = 0) -> Any:
    fl.set_seed(seed)
    return fl.nn.Sequential(fl.nn.Linear(6, 8), fl.nn.Tanh(), fl.nn.Linear(8, 3)).astype(np.float64)


@on_ranks(("shm", 2))
def test_reducer_sums_in_the_gradient_buffer_of_the_user(rank: int, size: int) -> None:
    layer, buffer = fl.nn.Linear(1, 2), np.zeros((2, 1), np.float32)
    fl.broadcast_parameters(layer)
    layer.weight.grad_buffer = buffer
    fl.distribute_module_grads(layer, reducer=fl.InlineReducer(1.0))
    layer(fl.input(np.full((1, 1), rank + 1, np.float32))).backward(np.ones((1, 2), np.float32))
    assert np.shares_memory(layer.weight.grad, buffer)
    assert buffer.tolist() == [[3.0], [3.0]]


class Branches(fl.nn.Module):
    """Two layers, of which each rank uses only one."""

    def __init__(self) -> None:
        fl.set_seed(0)
        self.layers = [fl.nn.Linear(2, 1), fl.nn.Linear(2, 1), fl.nn.Linear(2, 1)]
        for i, layer in enumerate(self.layers):
            setattr(self, f"layer{i}", layer.astype(np.float64))

    def forward(self, x: Any, which: int) -> Any:
        return self.layers[which](x)


@on_ranks(("shm", 2))
def test_join_keeps_none_for_unused_parameters(rank: int, size: int) -> None:
    """Only rank 0 has data in the second pass; in the last pass no rank counts samples."""
    model = Branches()
    fl.distribute_module_grads(model)
    gradients = []
    with fl.join(model) as joined:
        for step in range(1 + 2 * (rank == 0)):
            model.zero_grad()
            joined.count(0 if step == 2 else 1)
            model(fl.input(np.ones((1, 2))), rank if step == 0 else 2).backward()
            gradients.append([param.grad is not None for param in model.params()[::2]])
    expected = [[True, True, False], [False, False, True], [False] * 3]
    assert gradients == expected[: len(gradients)]


@on_ranks(("shm", 2))
def test_used_flags_work_in_any_dtype(rank: int, size: int) -> None:
    """Uses buckets of several dtypes; the last bucket, with the flags, is float16."""
    model = Branches()
    model.layer0.astype(np.float16)
    model.layer1.astype(np.float32)
    fl.distribute_module_grads(model)
    x = np.ones((1, 2), model.layers[rank].weight.dtype)
    model(fl.input(x), rank).backward(np.ones((1, 1), x.dtype))
    *grads, weight, bias = [param.grad for param in model.params()]
    assert weight is bias is None
    assert [grad.dtype.name for grad in grads] == ["float16"] * 2 + ["float32"] * 2
    assert all((grad == 0.5).all() for grad in grads)


@pytest.mark.parametrize(("difference", "number"), [("shape", 2), ("count", 4), ("dtype", 0)])
@on_ranks(("shm", 2))
def test_every_rank_raises_mismatch_error_if_modules_differ(
    rank: int, size: int, difference: str, number: int
) -> None:
    width = 8 + (rank if difference == "shape" else 0)
    layers = [fl.nn.Linear(6, 8), fl.nn.Linear(8, width)]
    if difference == "count" and rank == 1:
        layers.append(fl.nn.Linear(8, 8))
    model = fl.nn.Sequential(*layers)
    if difference == "dtype" and rank == 1:
        model.astype(np.float64)
    words = rf"rank {rank} of 2: .* in parameter {number} \(rank\(s\) 0: .*; rank\(s\) 1: "
    with pytest.raises(fl.errors.MismatchError, match=words):
        fl.distribute_module_grads(model)


def test_distribute_module_grads_raises_for_invalid_arguments() -> None:
    model = build()
    with pytest.raises(TypeError, match="Module"):
        fl.distribute_module_grads("model")  # type: ignore[arg-type]
    reducer = fl.InlineReducer(1.0)
    options = {"scale": 1.0, "group": fl.split(0), "bucket_bytes": 10}
    for name, value in {**options, "hook": fl.Float16Compression()}.items():
        with pytest.raises(ValueError, match=f"Pass {name} to the constructor of the reducer"):
            fl.distribute_module_grads(model, reducer=reducer, **{name: value})
    with pytest.raises(ValueError, match="bucket_bytes must be positive"):
        fl.distribute_module_grads(model, bucket_bytes=0)
    with pytest.raises(ValueError, match=r"ignore .*, got '0.wait'. Use: 0.bias, 0.weight"):
        fl.distribute_module_grads(model, ignore=["0.wait"])
    with pytest.raises(ValueError, match="must contain parameters or buffers of this module"):
        fl.distribute_module_grads(model, ignore=build().params()[:1])
    with pytest.raises(TypeError, match="ignore must contain names and Variables, got int"):
        fl.distribute_module_grads(model, ignore=[3])  # type: ignore[list-item]
    with (
        pytest.raises(ValueError, match="distribute_module_grads or fully_shard on this module"),
        fl.no_sync(build()),
    ):
        pass
    with pytest.raises(ValueError, match="expected at least one parameter with calc_grad"):
        fl.distribute_module_grads(fl.nn.Sequential(fl.nn.ReLU()))


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 100}, {"reducer": True}, {"hook": True}])
@on_ranks(("shm", 2))
def test_check_finite_names_rank_and_parameter(
    rank: int, size: int, options: dict[str, Any]
) -> None:
    """First rank 1 has a NaN, then the sums of finite gradients overflow."""
    if "hook" in options:
        options = {"hook": fl.Float16Compression()}
    elif "reducer" in options:
        options = {"reducer": fl.InlineReducer(1.0)}
    model = build()
    fl.distribute_module_grads(model, scale=None if options else 1.0, check_finite=True, **options)
    outputs = []
    large = 0.6 * np.finfo(float).max
    for value in (1.0, np.nan if rank == 1 else 1.0, large, 1.0):
        for param in model.params():
            param.zero_grad()
        try:
            model(fl.input(np.full((1, 6), 0.1))).backward(np.full((1, 3), value))
            assert all(np.isfinite(param.grad).all() for param in model.params())
            outputs.append("")
        except FloatingPointError as error:
            assert all(param.grad is None for param in model.params())
            outputs.append(str(error))
    assert outputs[0] == outputs[3] == ""
    words = "expected finite gradients, got NaN or infinity"
    assert f"rank {rank} of 2: {words} (rank 1: 2.bias" in outputs[1]
    assert "only in the sums over ranks" in outputs[2] or "hook" in options


@on_ranks(("shm", 2))
def test_check_finite_must_be_equal_on_all_ranks(rank: int, size: int) -> None:
    with pytest.raises(fl.errors.MismatchError, match="check_finite"):
        fl.distribute_module_grads(build(), check_finite=rank == 1)


ranks = ranks_in(("shm", 2), slow=[("gloo", 3)])


class Net(fl.nn.Module):
    """Two layers by name, more in a list, and a scale that is not trained."""

    def __init__(self) -> None:
        fl.set_seed(0)
        self.first, self.last = fl.nn.Linear(3, 3), fl.nn.Linear(3, 1)
        self.middle = [fl.nn.Linear(3, 3)]
        self.scale = fl.Variable(np.ones(1, np.float32), calc_grad=False)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.middle:
            x = layer(x)
        return self.last(x) * self.scale


def backward(model: fl.nn.Module) -> None:
    model(fl.input(np.full((2, 3), fl.get_world_rank() + 1, np.float32))).sum().backward()


def replace_all(model: Net) -> None:
    fresh = Net()
    model.first, model.last, model.middle = fresh.first, fresh.last, fresh.middle


CHANGES: dict[str, Callable[[Net], Any]] = {
    "one": lambda model: setattr(model.first, "weight", fl.param(np.ones((3, 3), np.float32))),
    "all": replace_all,
    "in a list": lambda model: model.middle.__setitem__(0, fl.nn.Linear(3, 3)),
    "appended": lambda model: model.middle.append(fl.nn.Linear(3, 3)),
    "unfrozen": lambda model: setattr(model.scale, "calc_grad", True),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks()
def test_backward_raises_for_a_new_parameter_until_redistribution(
    rank: int, size: int, change: str
) -> None:
    model = Net()
    fl.distribute_module_grads(model)
    backward(model)
    CHANGES[change](model)
    name = "'scale'.*" * (change == "unfrozen")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{name}assigned, added or unfrozen"):
            backward(model)
    fl.distribute_module_grads(model)
    backward(model)
    grads = [param.grad for param in model.params() if param.grad is not None]
    assert len(grads) == len([p for p in model.params() if p.calc_grad])
    for grad in grads:
        assert np.array_equal(grad, fl.all_gather(grad[None])[0])


@on_ranks()
def test_backward_raises_for_a_new_parameter_of_a_sharded_module(rank: int, size: int) -> None:
    model = Net()
    fl.fully_shard(model, across_hosts=True)
    backward(model)
    CHANGES["in a list"](model)
    with pytest.raises(ValueError, match="assigned, added or unfrozen"):
        backward(model)


@on_ranks()
def test_all_ranks_raise_if_one_rank_has_a_new_parameter(rank: int, size: int) -> None:
    model = Net()
    fl.distribute_module_grads(model)
    if rank == 0:
        replace_all(model)
    words = "got 'first.weight', which was assigned"
    with pytest.raises(ValueError if rank == 0 else DistributedError, match=words):
        backward(model)
    fl.barrier()


@on_ranks()
def test_parameters_can_be_frozen_removed_and_ignored(rank: int, size: int) -> None:
    model = Net()
    fl.distribute_module_grads(model, ignore=["last.weight"])
    model.middle.clear()
    model.first.bias.calc_grad = False
    backward(model)
    model.eval()
    model.train()
    backward(model)
    assert not np.array_equal(*fl.all_gather(model.last.weight.grad.ravel()[None])[:2])


@pytest.mark.parametrize(("average", "result"), [(False, [6, 4, None]), (True, [2, 4 / 3, None])])
@on_ranks(("shm", 3))
def test_optimizer_reduces_sums_means_and_missing_gradients(
    rank: int, size: int, average: bool, result: list[Any]
) -> None:
    params = [fl.param(np.zeros(3, np.float32)), fl.param(np.zeros((2, 2))), fl.param(np.zeros(1))]
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer(params, 1.0), average=average)
    params[0].grad = np.full(3, rank + 1, np.float32)
    if rank == 1:
        params[1].grad = np.full((2, 2), 4.0)
    optimizer.step()
    assert [None if p.grad is None else p.grad.ravel()[0] for p in params] == result


@on_ranks(("shm", 2))
def test_optimizer_reduces_arbitrary_updates(rank: int, size: int) -> None:
    """Like a Bayesian network, which reduces changes of means and variances."""
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer([fl.param(np.zeros(1))], 1.0))
    means, variances = np.full((2, 3), rank, np.float32), np.full(4, rank + 1.0)[::-1]
    large = [np.full(3 << 20, rank + number, np.float32) for number in range(3)]  # several buckets
    updates = (means, fl.Variable(variances), np.full((), 1j * rank), *large)
    result = optimizer.reduce(updates)
    assert all(one is other for one, other in zip(result, updates, strict=True))
    assert optimizer.reduce([]) == []
    assert (means == 0.5).all()
    assert (variances == 1.5).all()
    assert updates[2] == 0.5j
    assert all((update == number + 0.5).all() for number, update in enumerate(large))


@on_ranks(("shm", 2))
def test_optimizer_raises_mismatch_error_if_shapes_differ(rank: int, size: int) -> None:
    params = [fl.param(np.zeros(2)), fl.param(np.zeros([(2, 3), (3, 2)][rank]))]
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer(params, 1.0))
    updates = [np.full(2, rank, np.float64)] * 1 + [np.zeros(1)] * rank
    where = f"rank {rank} of 2: DistributedOptimizer"
    kinds = "(rank(s) 0: float64 (2, 3); rank(s) 1: float64 (3, 2))"
    difference = "expected the same shapes and dtypes on every rank, got a difference at index 1"
    words = re.escape(f"{where}: parameters: {difference} {kinds}")
    with pytest.raises(fl.errors.MismatchError, match=words):
        optimizer.step()
    kinds = "(rank(s) 0: nothing; rank(s) 1: float64 (1,))"
    words = re.escape(f"{where}.reduce: updates: {difference} {kinds}")
    with pytest.raises(fl.errors.MismatchError, match=words):
        optimizer.reduce(updates)
    assert (updates[0] == rank).all()


def test_optimizer_forwards_to_the_inner_optimizer() -> None:
    inner = fl.optim.SGDOptimizer([fl.param(np.zeros(2))], 0.5, momentum=0.9)
    outer = fl.DistributedOptimizer(inner)
    assert outer.optimizer is inner
    assert outer.params is inner.params
    outer.lr = 0.25
    assert inner.lr == outer.lr == 0.25
    outer.params[0].grad = np.ones(2)
    outer.step()
    assert outer.state_dict()["velocity"][0] is inner.state_dict()["velocity"][0]
    other = fl.DistributedOptimizer(fl.optim.SGDOptimizer([fl.param(np.zeros(2))], 1, 0.9))
    other.load_state_dict(outer.state_dict())
    assert other.state_dict()["velocity"][0].tolist() == [1, 1]
    assert other.lr == 0.25
    outer.zero_grad()
    assert inner.params[0].grad is None
    assert repr(outer) == "DistributedOptimizer(SGDOptimizer, average=True)"
    with pytest.raises(ValueError, match="at least 0"):
        outer.lr = -1


def test_optimizer_raises_for_invalid_optimizers_and_updates() -> None:
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer([fl.param(np.zeros(2))], 0.5))
    with pytest.raises(TypeError, match="got DistributedOptimizer"):
        fl.DistributedOptimizer(optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got str"):
        fl.DistributedOptimizer("sgd")  # type: ignore[arg-type]
    same = np.zeros(2)
    with pytest.raises(ValueError, match="twice"):
        optimizer.reduce([same, same])
    with pytest.raises(TypeError, match="got float"):
        optimizer.reduce([1.5])
    with pytest.raises(TypeError, match=r"DistributedOptimizer\.reduce: .*got int64"):
        optimizer.reduce([np.zeros(2, np.int64)])


@pytest.mark.parametrize("first", ["module", "optimizer"])
def test_optimizer_raises_if_gradients_are_already_reduced(first: str) -> None:
    model = fl.nn.Linear(2, 1)
    inner = fl.optim.SGDOptimizer(model.params(), 0.5)
    if first == "module":
        fl.distribute_module_grads(model)
        with pytest.raises(ValueError, match="of a module under distribute_module_grads"):
            fl.DistributedOptimizer(inner)
        return
    outer = fl.DistributedOptimizer(inner)
    outer.step()
    fl.distribute_module_grads(model)
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(1, 2\)\) of a module under"):
        outer.step()
    model.params()[0].clear_grad_hook()
    with pytest.raises(ValueError, match="parameter 1 "):
        outer.step()


def counting(seed: int) -> Any:
    fl.set_seed(seed)
    return Counting(3, 2)


def state(model: Any) -> dict[str, Any]:
    return {name: np.array(array) for name, array in model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


@on_ranks(("shm", 3))
def test_broadcast_parameters_copies_parameters_and_buffers_of_root(rank: int, size: int) -> None:
    model = counting(rank)
    model.seen[...], model.mean = rank, np.float64(rank)
    arrays = [param.array for param in model.params()]
    fl.broadcast_parameters(model, 1)
    assert all(p.array is a for p, a in zip(model.params(), arrays, strict=True))
    assert same({**state(counting(1)), "seen": [1, 1], "mean": 1}, state(model))


@on_ranks(("shm", 4))
def test_parameter_functions_work_within_groups(rank: int, size: int) -> None:
    group = fl.split(rank % 2)
    model = counting(rank)
    fl.all_reduce_parameters(model, group=group)
    first, second = (counting(seed).params() for seed in (rank % 2, rank % 2 + 2))
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
    plain = counting(0)
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
    model = counting(rank if kind != "same seed" else 0)
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
        assert text.startswith(f"test_data_parallel.py: {kind}: rank 0 of 3: expected the same ")
        assert "got other values on rank(s) 1, 2 than on rank 0" in text
        assert "fl.broadcast_parameters(module)" in text


@on_ranks(("shm", 2))
def test_forward_copies_buffers_of_rank_0_in_training(rank: int, size: int) -> None:
    model = counting(0)
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
    model = counting(0)
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
        fl.PeriodicAveraging(counting(0), every=0)
    with pytest.raises(ValueError, match="root must be a rank"):
        fl.broadcast_parameters(counting(0), 1)


def test_captured_step_with_periodic_averaging_stays_eager() -> None:
    averaging = fl.PeriodicAveraging(fl.nn.Linear(3, 2), every=2)

    @fl.capture
    def step(x: np.ndarray) -> bool:
        return averaging.step()

    with pytest.warns(RuntimeWarning, match=r"it changes averaging\._steps"):
        assert [step(np.ones(3)) for _ in range(4)] == [False, True] * 2
