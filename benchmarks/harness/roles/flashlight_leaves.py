"""A training step with leaves, next to plain data-parallel training, and the final parameters."""

import hashlib
import itertools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import Call, Prepared, RankSetup
from harness.roles.flashlight import RankRole

LR = 1e-4


class Leaves(RankRole):
    """Kinds: "plain", each rank has a batch share; "leaves"; "bits", which trains first.

    The option ``hosts`` divides the ranks between simulated hosts.
    """

    def __init__(self, setup: RankSetup) -> None:
        options = dict(setup.options)
        hosts = int(options.pop("hosts", 1))
        if hosts > 1:
            host = setup.rank * hosts // setup.size
            os.environ["FLASHLIGHT_MEMORY_DOMAIN"] = f"host {host}"
        super().__init__(RankSetup(setup.rank, setup.size, setup.folder, options))

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        step, model = self._step(task)
        if task["kind"] != "bits":
            return Prepared(step)
        for _ in range(task["steps"]):
            step()
        digest = hashlib.sha256()
        for array in model.state_dict().values():
            digest.update(array.tobytes())
        return Prepared(step, digest.hexdigest())

    def _step(self, task: Mapping[str, Any]) -> tuple[Call, fl.nn.Module]:
        widths, batch, is_plain = task["widths"], task["batch"], task["kind"] == "plain"
        fl.set_seed(0)
        model = fl.nn.Sequential()
        for inputs, outputs in itertools.pairwise(widths):
            model.add(fl.nn.Linear(inputs, outputs))
            model.add(fl.nn.ReLU())
            model.add(fl.nn.Dropout(0.1 if task["kind"] == "bits" else 0.0))
        fl.broadcast_parameters(model)
        fl.distribute_module_grads(model, leaves=None if is_plain else 8)
        if task["optimizer"] == "Adam":
            optimizer: Any = fl.optim.AdamOptimizer(model.params(), LR)
        else:
            optimizer = fl.optim.SGDOptimizer(model.params(), LR, momentum=0.9)
        random = np.random.default_rng(1)
        x, y = (random.random((batch, width), "float32") for width in (widths[0], widths[-1]))
        part = slice(batch * self.rank // self.size, batch * (self.rank + 1) // self.size)
        loss = fl.nn.MeanSquaredError()

        def step() -> None:
            optimizer.zero_grad()
            for a, b in [(x[part], y[part])] if is_plain else fl.leaves(model, x, y):
                loss(model(fl.input(a)), fl.no_grad(b)).backward()
            optimizer.step()

        return step, model


def join(setup: RankSetup) -> Leaves:
    """Connect to the other ranks."""
    return Leaves(setup)
