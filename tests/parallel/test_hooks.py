"""Training with communication hooks: results close to training without, equal on all ranks."""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks
from tests.distributed.hook_steps import HOOKS, make
from tests.tables import for_each

SAMPLES, FEATURES, OUTPUTS, STEPS = 120, 12, 6, 150
# Allowed increase of the loss after STEPS steps, compared with no hook.
WORSE = {"Float16Compression": 1.001, "Bfloat16Compression": 1.01, "PowerSGDCompression": 1.05}


def build(dtype: str = "float64") -> Any:
    fl.set_seed(0)
    model = fl.nn.Sequential(
        fl.nn.Linear(FEATURES, 24), fl.nn.Tanh(), fl.nn.Linear(24, 18), fl.nn.Tanh()
    )
    model.add(fl.nn.Linear(18, OUTPUTS))
    return model.astype(np.dtype(dtype))


def data(dtype: str = "float64") -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    x = random.standard_normal((SAMPLES, FEATURES))
    y = np.tanh(x @ random.standard_normal((FEATURES, OUTPUTS)) / 3)
    return x.astype(dtype), y.astype(dtype)


def backward(model: Any, rank: int, size: int, dtype: str = "float64") -> float:
    x, y = (array[rank::size] for array in data(dtype))
    loss = fl.nn.MeanSquaredError()(model(fl.input(x)), fl.no_grad(y))
    loss.backward()
    return float(loss.scalar())


def train(rank: int, size: int, name: str | None, dtype: str) -> tuple[float, bytes]:
    """Return the final loss over all ranks, and the bits of this rank's parameters."""
    model = build(dtype)
    hook = None if name is None else make(name)
    fl.distribute_module_grads(model, hook=hook)
    optimizer = fl.optim.SGDOptimizer(model.params(), 0.3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = backward(model, rank, size, dtype)
        optimizer.step()
    mean = float(fl.all_reduce(np.array(loss), op="avg"))
    return mean, b"".join(param.array.tobytes() for param in model.params())


WORLDS = [(2, "shm", "float32"), pytest.param(3, "gloo", "float64", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("size", "backend", "dtype"), WORLDS)
def test_training_with_a_hook_ends_near_training_without(
    pool: Any, size: int, backend: str, dtype: str
) -> None:
    ranks = pool(size, params={"BACKEND": backend})
    exact, _ = train(0, 1, None, dtype)
    assert exact < 0.03  # it starts at 0.65
    for name in HOOKS:
        reports = ranks.run(train, name, dtype)
        assert len({bits for _, bits in reports}) == 1, name
        assert reports[0][0] < WORSE[name] * exact, name


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
@on_ranks(("shm", 2))
def test_full_bucket_is_sent_during_the_pass(rank: int, size: int, inline_bytes: int) -> None:
    """The hook only reduces, so its bits equal those without a hook."""
    reports = []  # per bucket: its number and whether each gradient exists

    def hook(bucket: Any) -> Any:
        reports.append((bucket.index, [param.grad is not None for param in model.params()]))
        bucket.inline_bytes = min(bucket.inline_bytes, inline_bytes)
        return bucket.all_reduce(bucket.flat)

    model = build()
    fl.distribute_module_grads(model, hook=hook, bucket_bytes=24 * 18 * 8)
    for _ in range(2):
        for param in model.params():
            param.zero_grad()
        backward(model, rank, size)
    expected = build()
    fl.distribute_module_grads(expected)
    backward(expected, rank, size)
    for param, other in zip(model.params(), expected.params(), strict=True):
        assert param.grad.tobytes() == other.grad.tobytes()
    assert reports[:3] == reports[3:]
    assert [index for index, _ in reports[:3]] == [0, 1, 2]
    first, second, third = (complete for _, complete in reports[:3])
    assert first[:2] == [False, False]  # gradients of the first layer are complete last
    assert first[3:] == [True, True, True]
    assert not second[0]
    assert third == [True] * 6


@on_ranks(("shm", 2))
@for_each("name", ["Float16Compression", "PowerSGDCompression"])
def test_hook_receives_accumulated_gradients(rank: int, size: int, name: str) -> None:
    """Two passes in no_sync and one outside are one step of the hook."""
    model, hook = build(), make(name)
    fl.distribute_module_grads(model, hook=hook)
    with fl.no_sync(model):
        for _ in range(2):
            backward(model, rank, size)
        assert hook.bytes_per_step == 0
    backward(model, rank, size)
    single, other = build(), make(name)
    fl.distribute_module_grads(single, scale=3 / size, hook=other)
    backward(single, rank, size)
    assert hook.bytes_per_step == other.bytes_per_step > 0
    for param, reference in zip(model.params(), single.params(), strict=True):
        np.testing.assert_allclose(param.grad, reference.grad, rtol=1e-3, atol=1e-4)


@on_ranks(("shm", 2))
def test_failed_pass_restores_the_state_of_the_hook(rank: int, size: int) -> None:
    model, hook = build(), make("PowerSGDCompression")
    fl.distribute_module_grads(model, hook=hook)
    backward(model, rank, size)
    before = {k: a for k, a in hook.state_dict().items() if not k.startswith("step")}
    first = model.params()[0]
    inner = first.hook

    def explode(variable: Any) -> None:
        inner(variable)  # the bucket is complete and being sent
        raise ArithmeticError("on purpose")

    first.register_grad_hook(explode)
    with pytest.raises(ArithmeticError):
        backward(model, rank, size)
    after = {k: a for k, a in hook.state_dict().items() if not k.startswith("step")}
    np.testing.assert_equal(after, before)


def test_hook_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="a communication hook must be callable"):
        fl.distribute_module_grads(build(), hook=fl.Float16Compression)  # type: ignore[arg-type]
    words = "PowerSGDCompression: the dtype must be float32 or float64"
    with pytest.raises(TypeError, match=words):
        fl.distribute_module_grads(build("float16"), hook=fl.PowerSGDCompression())
