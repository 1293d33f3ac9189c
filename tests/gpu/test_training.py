"""Training on GPUs: the same parameters on any number of ranks, hooks, checkpoints."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed import hook_steps
from tests.gpu import verbs
from tests.gpu.conftest import one_gpu_for_several
from tests.launch.launcher import run

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


# NCCL scales before it adds, and adds float16 differently. The other results differ by rounding
# only.
TOLERANCE = {"Float16Compression": 4e-3, "PowerSGDCompression": 1e-10}


def both_ways(rank: int, size: int, name: str) -> tuple[list[bytes], float]:
    """Run three steps on CuPy and on NumPy arrays; return CuPy's bits and the difference."""
    hooks = [hook_steps.make(name) for _ in range(2)]
    bits, worst = [], 0.0
    for step in range(3):
        arrays = hook_steps.gradients(rank, step, "float64")
        on_gpu = [verbs.on_gpu(array) for array in arrays]
        hook_steps.reduce(hooks[0], on_gpu)
        hook_steps.reduce(hooks[1], arrays)
        got = hook_steps.flat([fl.device.to_device(array, "cpu") for array in on_gpu])
        expected = hook_steps.flat(arrays)
        bits.append(got.tobytes())
        worst = max(worst, float(abs(got - expected).max() / abs(expected).max()))
        hooks[0].load_state_dict(hooks[0].state_dict())
    assert hooks[0].bytes_per_step == hooks[1].bytes_per_step
    return bits, worst


@pytest.mark.parametrize("name", TOLERANCE)
def test_hooks_give_equal_results_for_cupy_and_numpy_arrays(ranks: Any, name: str) -> None:
    results = ranks.run(both_ways, name)
    assert all(bits == results[0][0] for bits, _ in results)
    assert max(worst for _, worst in results) <= TOLERANCE[name]


def trained(rank: int, size: int, folder: Path, stop: int | None) -> list[np.ndarray]:
    """Train with dropout for 6 steps from the last checkpoint, or stop early."""
    cupy = verbs.cupy()
    device = fl.distributed.use_local_device()
    fl.set_seed(rank)
    generator = cupy.random.default_rng(rank)
    model = fl.nn.Sequential(fl.nn.Linear(4, 8), fl.nn.Dropout(0.5), fl.nn.Linear(8, 1))
    model.to(device)
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model)
    optimizer = fl.optim.AdamOptimizer(model.params(), 0.01)
    parts: dict[str, Any] = {"module": model, "optimizer": optimizer, "rng": generator}
    result = fl.load(folder, **parts)
    for step in range(0 if result is None else result.step, 6):
        if step == stop:
            break
        inputs = generator.random((16, 4), dtype=cupy.float32)
        optimizer.zero_grad()
        fl.nn.MeanSquaredError()(model(fl.input(inputs)), fl.no_grad(inputs[:, :1])).backward()
        optimizer.step()
        fl.save(folder, **parts, step=step + 1)
    return [fl.device.to_device(param.array, "cpu") for param in model.params()]


def test_gpu_run_continues_from_a_checkpoint_with_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    expected = ranks.run(trained, tmp_path / "whole", None)
    ranks.run(trained, tmp_path / "stopped", 3)
    for got, reference in zip(
        ranks.run(trained, tmp_path / "stopped", None), expected, strict=True
    ):
        for one, other in zip(got, reference, strict=True):
            np.testing.assert_array_equal(one, other)


PROGRAM = Path(__file__).parents[2] / "examples" / "DistributedTraining.py"
OPTIONS = ("--epochs", "4", "--samples", "512", "--batch-size", "8")
SHARING = " ".join(f"{name}={value}" for name, value in one_gpu_for_several("$RANK").items())


def losses(size: int, device: str) -> list[float]:
    """Train on ``size`` ranks that the launcher starts, and return the loss of each epoch."""
    import cupy

    program = [sys.executable, str(PROGRAM), *OPTIONS, "--device", device]
    command = [sys.executable, "-m", "flashlight_py.launch", "-n", str(size), "--no-python"]
    if device == "cuda" and cupy.cuda.runtime.getDeviceCount() < size:
        command += ["sh", "-c", f'{SHARING} exec "$@"', "sh"]
    done = run([*command, *program], code=0, timeout=25)
    return [float(text) for text in re.findall(r"Mean Squared Error: (\S+)", done.stdout)]


@pytest.mark.parametrize("size", [1, 2])
def test_example_has_the_losses_of_the_cpu(size: int) -> None:
    expected, result = losses(size, "cpu"), losses(size, "cuda")
    assert len(result) == 4
    np.testing.assert_allclose(result, expected, rtol=1e-4)
