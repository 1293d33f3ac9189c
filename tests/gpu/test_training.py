"""Training gives the same parameters on 1, 2 and 4 GPU ranks and in one process on the CPU."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.gpu import verbs

pytestmark = pytest.mark.gpu

SAMPLES, STEPS = 60, 20


def train(rank: int, size: int, device: str, kind: str, sharded: bool = False) -> list[np.ndarray]:
    """Train on this rank's share, one full batch per step; return the parameters."""
    fl.set_seed(0)
    if device == "cuda":
        verbs.cupy()
        device = fl.distributed.use_local_device()
    model = fl.nn.Sequential(
        fl.nn.Linear(10, 50, dtype="float64"), fl.nn.ReLU(), fl.nn.Linear(50, 1, dtype="float64")
    )
    model.to(device)
    if sharded:
        fl.fully_shard(model)
    else:
        fl.broadcast_parameters(model)
        fl.distribute_module_grads(model)
    optimizer: Any = (
        fl.optim.AdamOptimizer(model.params(), 0.01, weight_decay=0.01)
        if kind == "adam"
        else fl.optim.SGDOptimizer(model.params(), 0.01, 0.9, 0.001, nesterov=kind == "nesterov")
    )
    random = np.random.default_rng(1)
    x, y = random.random((SAMPLES, 10)), random.random((SAMPLES, 1))
    inputs, targets = (fl.device.to_device(array[rank::size], device) for array in (x, y))
    for _ in range(STEPS):
        optimizer.zero_grad()
        fl.nn.MeanSquaredError()(model(fl.input(inputs)), fl.no_grad(targets)).backward()
        optimizer.step()
    return [fl.device.to_device(param.array, "cpu") for param in model.params()]


@pytest.mark.parametrize(
    ("kind", "sharded"), [("sgd", False), ("nesterov", False), ("adam", False), ("adam", True)]
)
def test_training_on_gpus_equals_a_cpu_process(ranks: Any, kind: str, sharded: bool) -> None:
    expected = train(0, 1, "cpu", kind)
    for got in ranks.run(train, "cuda", kind, sharded):
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def state_after_a_step(rank: int, size: int, device: str) -> tuple[Any, Any]:
    """Step once from a loaded state; return the states of the model and of the optimizer."""
    if device == "cuda":
        verbs.cupy()
        device = fl.distributed.use_local_device()
    model = fl.nn.Sequential(fl.nn.Linear(5, 3), fl.nn.ReLU(), fl.nn.Linear(3, 2))
    model.astype("float64").to(device)
    if device != "cpu":
        fl.fully_shard(model)
    optimizer = fl.optim.AdamOptimizer(model.params(), 0.01)
    shapes = [param.shape for param in model.params()]
    model.load_state_dict(
        {name: np.full(param.shape, 0.125) for name, param in model.named_params().items()}
    )
    moments = [np.full(shape, 0.5) for shape in shapes]
    optimizer.load_state_dict({"lr": 0.01, "steps": [3] * 4, "mean": moments, "square": moments})
    x = fl.device.to_device(np.ones((2, 5)), device)
    for context in (fl.no_sync(model) if device != "cpu" else nullcontext(), nullcontext()):
        with context:
            fl.autograd.functions.sum(model(fl.input(x))).backward()
    optimizer.step()
    if device != "cpu":
        with pytest.raises(ValueError, match="without data"), fl.join(model):
            pass
    state = optimizer.state_dict()
    arrays = [*model.state_dict().values(), *state["mean"], *state["square"]]
    return [fl.device.to_device(array, "cpu") for array in arrays], state["steps"]


def test_state_dicts_of_shards_equal_the_full_state(ranks: Any) -> None:
    expected, steps = state_after_a_step(0, 1, "cpu")
    for got, count in ranks.run(state_after_a_step, "cuda"):
        assert count == steps == [4] * 4
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def leave_one_out(rank: int, size: int) -> list[bool]:
    """Let each rank use its own layer of ``size + 1`` layers; no rank uses the last one."""
    verbs.cupy()
    device = fl.distributed.use_local_device()
    layers = [fl.nn.Linear(2, 1) for _ in range(size + 1)]
    model = fl.nn.Sequential(*layers).to(device)
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model)
    x = fl.device.to_device(np.ones((1, 2), np.float32), device)
    fl.autograd.functions.sum(layers[rank](fl.input(x))).backward()
    return [layer.weight.grad is not None for layer in layers]


def test_gradient_is_none_if_no_rank_used_the_parameter(ranks: Any) -> None:
    for used in ranks.run(leave_one_out):
        assert used == [True] * (len(used) - 1) + [False]


def test_module_keeps_its_values_after_a_round_trip_to_the_gpu() -> None:
    model = fl.nn.Linear(3, 4)
    before = [param.array.copy() for param in model.params()]
    model.to("cuda:0")
    assert all(fl.device.device_of(param.array) == "cuda:0" for param in model.params())
    model.to("cpu")
    for param, values in zip(model.params(), before, strict=True):
        np.testing.assert_array_equal(param.array, values)
