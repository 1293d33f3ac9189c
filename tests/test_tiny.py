"""A quick test of the package in ten seconds: worlds of two ranks over shared memory and Gloo.

Without native code, the worlds use the portable backend.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.launch.loop import SIGKILL
from tests.distributed.conformance import check_message_ring, on_ranks, ranks_in
from tests.distributed.harness import RankPool, run_outcomes
from tests.distributed.programs import every_verb, run_program
from tests.launch.launcher import launch, write

BACKENDS = [name for name in ("shm", "gloo") if find_spec(f"flashlight_py._native._{name}")]
BACKENDS = BACKENDS or ["portable"]
ranks = ranks_in(*((name, 2) for name in BACKENDS))


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test of a public name if its optional package was deleted."""
    return pytest.mark.skipif(name not in fl.__all__, reason=f"there is no fl.{name}")


def train(rank: int, size: int, captured: bool) -> list[Any]:
    """Train on this rank's share of one batch, and return the parameters."""
    random = np.random.default_rng(0)
    x = random.random((8, 3), dtype=np.float32)[rank * 8 // size : (rank + 1) * 8 // size]
    fl.set_seed(0)
    model = fl.nn.Sequential()
    model.add(fl.nn.Linear(3, 4))
    model.add(fl.nn.ReLU())
    model.add(fl.nn.Linear(4, 1))
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model)
    optimizer = fl.optim.SGDOptimizer(model.params(), 0.1, momentum=0.9)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        fl.nn.MeanSquaredError()(model(fl.input(x)), fl.no_grad(y)).backward()
        optimizer.step()

    run: Any = fl.capture(step) if captured else step
    for _ in range(10):
        run(x, x.sum(axis=1, keepdims=True))
    assert not captured or run.replays > 0 or BACKENDS == ["portable"]
    return [param.array for param in model.params()]


@on_ranks()
def test_checkpoint_restores_the_saved_state(rank: int, size: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    model = fl.nn.Linear(3, 1)
    fl.broadcast_parameters(model)
    saved = [param.array.copy() for param in model.params()]
    fl.save(folder, module=model, step=7)
    for param in model.params():
        param.array[...] = 0
    loaded = fl.load(folder, module=model)
    assert loaded.step == 7
    for param, before in zip(model.params(), saved, strict=True):
        np.testing.assert_array_equal(param.array, before)


def tagi_step() -> float:
    tagi_nn: Any = import_module("flashlight_py.tagi.nn")
    fl.tagi.manual_seed(0)
    net = tagi_nn.Sequential(tagi_nn.Linear(2, 8), tagi_nn.ReLU(), tagi_nn.Linear(8, 1))
    updater = tagi_nn.OutputUpdater(net.device)
    x = np.random.default_rng(0).uniform(-1, 1, (16, 2))
    errors = []
    for _ in range(10):
        mean, _ = net(x)
        errors.append(float(np.mean((np.asarray(mean).reshape(-1) - x[:, 0]) ** 2)))
        updater.update(net.output_z_buffer, x[:, :1], 0.05**2, net.input_delta_z_buffer)
        net.backward()
        net.step()
    return errors[-1] / errors[0]


def killed(rank: int, size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), SIGKILL)
    fl.all_reduce(np.ones(3))


def test_verbs_return_correct_results(ranks: RankPool) -> None:
    ranks.run(run_program, every_verb(ranks.size, "float32", (5,)))
    ranks.run(check_message_ring, 100)


@on_ranks()
def test_mismatch_raises_on_all_ranks(rank: int, size: int) -> None:
    with pytest.raises(fl.errors.MismatchError):
        fl.all_reduce(np.ones(3 + rank))


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=needs("capture"))])
def test_two_ranks_train_like_one(ranks: RankPool, captured: bool) -> None:
    alone = train(0, 1, captured)
    for params in ranks.run(train, captured):
        for got, expected in zip(params, alone, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_rank_raises_on_the_other_ranks(backend: str) -> None:
    survivor, dead = run_outcomes(killed, 2, params={"BACKEND": backend})
    assert dead.exit_code == -SIGKILL
    assert "PeerLostError" in survivor.error_classes


@needs("tagi")
def test_tagi_reduces_the_error() -> None:
    assert tagi_step() < 0.5


def test_flrun_starts_ranks(tmp_path: Path) -> None:
    program = """
    import numpy as np, flashlight_py as fl
    fl.distributed_init()
    print(fl.all_reduce(np.ones(1)))
    """
    done = launch("-n", 2, write(tmp_path, program), code=0)
    assert sorted(done.stdout.splitlines()) == ["[0] [2.]", "[1] [2.]"]
