"""A step of a large perceptron with this package, with and without communication."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.gpu import share_gpus
from harness.gpu_trace import record
from harness.role import Call, Prepared, RankSetup
from harness.roles.flashlight import RankRole

LR, MOMENTUM = 1e-6, 0.9
STEPS_BEFORE, STEPS_TRACED = 3, 3


class Mlp(RankRole):
    """Kinds of steps: "alone", "overlap", and "after", which reduces after the backward pass.

    They run on the CPU, or on a GPU (``device``). ``trace`` is the file for a trace of the GPU.
    """

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        widths, batch, kind = task["widths"], task["batch"], task["kind"]
        device = self._gpu() if task["device"] == "cuda" else "cpu"
        fl.set_seed(0)
        model = fl.nn.Sequential()
        for inputs, outputs in itertools.pairwise(widths):
            model.add(fl.nn.Linear(inputs, outputs))
            model.add(fl.nn.ReLU())
        model.to(device)
        if kind == "overlap":
            fl.distribute_module_grads(model)
        reduce = self._reduce_afterwards(model) if kind == "after" else None
        step = _step(model, reduce, batch, widths, device)
        return Prepared(step, self._trace(step, task["trace"]) if "trace" in task else None)

    def _gpu(self) -> str:
        import cupy

        share_gpus(self.rank, self.size, cupy.cuda.runtime.getDeviceCount())
        return fl.distributed.use_local_device()

    def _trace(self, step: Call, file: str) -> dict[str, float] | str:
        """Return a summary of rank 0's GPU in a step; all ranks make the same number of steps."""
        for _ in range(STEPS_BEFORE):
            step()
        if self.rank == 0:
            return record(step, STEPS_TRACED, Path(file))
        for _ in range(STEPS_TRACED):
            step()
        return {}

    def _reduce_afterwards(self, model: fl.nn.Module) -> Callable[[], None]:
        return lambda: fl.all_reduce_gradients(model, 1 / self.size)


def _step(
    model: fl.nn.Module,
    reduce: Callable[[], None] | None,
    batch: int,
    widths: list[int],
    device: str,
) -> Call:
    random = np.random.default_rng(fl.get_world_rank())
    x, target = (
        fl.device.to_device(random.random((batch, width), "float32"), device)
        for width in (widths[0], widths[-1])
    )
    optimizer = fl.optim.SGDOptimizer(model.params(), LR, MOMENTUM)
    loss = fl.nn.MeanSquaredError()

    def step() -> float:
        optimizer.zero_grad()
        error = loss(model(fl.input(x)), fl.input(target))
        error.backward()
        if reduce is not None:
            reduce()
        optimizer.step()
        return error.scalar()

    return step


def join(setup: RankSetup) -> Mlp:
    """Connect to the other ranks."""
    return Mlp(setup)
