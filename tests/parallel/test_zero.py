"""Sharding by gathering: schedule, inference and errors. test_ways.py trains with it."""

import copy
import tracemalloc
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.errors import MismatchError
from flashlight_py.parallel.gathered_shards import Flat, Reduction, shard_by_gathering
from tests.distributed.conformance import on_ranks, ranks_in
from tests.gpu import test_training as gpu_training
from tests.parallel.test_ways import RULES, Net, one_pass

ranks = ranks_in(("single", 1), ("gloo", 3), slow=[("shm", 4), ("mpi", 3)])
WIDTH, LAYERS = 256, 12


@on_ranks()
def test_two_layers_are_gathered_and_the_next_is_prefetched(rank: int, size: int) -> None:
    """The gradients of two more layers are stored in full: being computed and being sent."""
    model = fl.nn.Sequential(*(fl.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    numbers = {param: number for number, param in enumerate(model.params())}
    shard_by_gathering(model)
    x = fl.input(np.ones((1, WIDTH), "float32"))
    happened: list[str] = []
    start, send = Flat.start, Reduction.send

    def noted_start(flat: Flat) -> None:
        if flat._full is None:
            happened.append(f"gather {numbers[flat.params[0]]}")
        start(flat)

    def noted_send(reduction: Reduction) -> None:
        happened.append(f"reduce {numbers[reduction.flat.params[0]]}")
        send(reduction)

    tracemalloc.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flat, "start", noted_start)
            patch.setattr(Reduction, "send", noted_send)
            for _ in range(2):
                model.zero_grad()
                happened.clear()
                tracemalloc.reset_peak()
                F.sum(model(x)).backward()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # In pure Python, memory for received bytes is in addition.
    spare = 8 if fl.distributed_backend() is fl.DistributedBackend.PORTABLE else 4.2
    assert most / (WIDTH * WIDTH * 4) < LAYERS / size + spare
    forward = [f"gather {n}" for n in range(LAYERS)]
    backward = [f"{event} {n}" for n in range(LAYERS - 1, 0, -1) for event in ("gather", "reduce")]
    # The last layer is still gathered from the forward pass; the first weight is not needed.
    assert happened == [*forward, "reduce 11", *backward[2:], "reduce 0"]


@on_ranks()
def test_inference_gathers_parameters(rank: int, size: int) -> None:
    """The last pass has prefetched parameters that are never used before the process ends."""
    model = fl.nn.Sequential(*(fl.nn.Linear(9, 9) for _ in range(4)))
    fl.broadcast_parameters(model)
    x = fl.input(np.ones((2, 9), "float32"))
    expected = model(x).array
    shards = shard_by_gathering(model.eval())
    for _ in range(3):
        result = model(x)
        np.testing.assert_array_equal(result.array, expected)
        assert not result.has_history
    assert len(shards._gathered) == 2


@on_ranks()
def test_pass_that_raises_frees_gathered_parameters(rank: int, size: int) -> None:
    """Every rank raises at the same point; the next pass works as usual."""
    model, other = Net(), Net()
    for model_of_pass in (other, model):
        shards = shard_by_gathering(model_of_pass)
        one_pass(model_of_pass, 0, rank)
    layer = model.twice[0].weight
    hook = layer.hook

    def fail(_: Any) -> None:
        raise OSError("the disk is full")

    layer.register_grad_hook(fail)
    with pytest.raises(OSError, match="full"):
        one_pass(model, 1, rank)
    layer.register_grad_hook(hook)
    assert all(flat._full is flat.reduction is None for flat in shards._buckets)
    for model_of_pass in (model, other):
        one_pass(model_of_pass, 2, rank)
    for got, expected in zip(model.params(), other.params(), strict=True):
        if expected.grad is None:
            assert got.grad is None
        else:
            np.testing.assert_array_equal(got.grad, expected.grad)


@on_ranks(("gloo", 3))
def test_different_modules_on_ranks_raise_mismatch_error(rank: int, size: int) -> None:
    model = fl.nn.Sequential(*(fl.nn.Linear(3, 3) for _ in range(size)))
    shard_by_gathering(model)
    with pytest.raises(MismatchError, match="all_gather"):
        model[rank](fl.input(np.ones((1, 3), "float32")))


@on_ranks(("gloo", 3))
def test_sharded_parameters_raise_for_incompatible_operations(rank: int, size: int) -> None:
    model, plain = Net(), Net()
    state, weight = model.state_dict(), model.some.weight
    shard_by_gathering(model)
    with pytest.raises(ValueError, match=r"got sharded parameter 'bias'. Call fully_shard once"):
        shard_by_gathering(model)
    optimizer = RULES["sgd"](model.params())
    for refused in (
        fl.distribute_module_grads,
        fl.broadcast_parameters,
        fl.all_reduce_parameters,
        fl.all_reduce_gradients,
        lambda _: fl.DistributedOptimizer(optimizer),
        lambda _: fl.synchronize({"optimizer": optimizer}),
        lambda module: fl.synchronize([module.some.weight]),
    ):
        with pytest.raises(ValueError, match=r"parameter 0 \(shape .*\) a parameter of fl"):
            refused(model)
    with pytest.raises(ValueError, match="cannot have a gradient buffer"):
        weight.grad_buffer = np.zeros((3, 3))
    weight.grad_buffer = None  # None changes nothing
    one_pass(model, 0, rank)
    assert weight.grad is not None
    assert weight.grad.ndim == 1  # only this rank's part
    with pytest.raises(ValueError, match="before fully_shard"):
        model.astype("float32")
    with pytest.raises(ValueError, match="read-only"):
        weight.array[0] = 1
    assert repr(weight) == "Variable(sharded, shape=(3, 3), dtype=float64)"
    copied = copy.deepcopy(model)  # the copy is local to this process
    assert all(type(param) is fl.Variable for param in copied.params())
    for module in (copied, model, model.eval()):
        np.testing.assert_equal(module.state_dict(), state)
    with pytest.raises(ValueError, match="load_state_dict"):
        weight.array = state["some.weight"]
    plain.some.weight.register_grad_hook(print)
    with pytest.raises(ValueError, match=r"without gradient hook and buffer, got 'some\.weight'"):
        shard_by_gathering(plain)


@pytest.mark.slow
def test_sharding_keeps_the_array_library(pool: Any) -> None:
    """Uses stand-ins for CuPy and NCCL; tests/gpu tests real GPUs."""
    ranks = pool(2, env={"STAND_IN": "1"})
    gpu_training.test_state_dicts_of_shards_equal_the_full_state(ranks)
