"""Checkpoints of GPU state: arrays and random generators are copied to the host and back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.gpu import verbs

pytestmark = pytest.mark.gpu


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
