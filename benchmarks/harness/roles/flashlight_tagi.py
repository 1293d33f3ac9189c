"""A step of fl.tagi on one process, or on ranks that share a batch and add their updates."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.tagi import nn
from harness.role import Prepared, RankSetup
from harness.roles.flashlight import RankRole
from harness.roles.tagi_works import (
    CLASSES,
    CLOCKS,
    ERROR_VARIANCE,
    FIRST_STEPS,
    WORKS,
    batch_of,
    beginning,
)


class Flashlight(RankRole):
    """A rank with its batch share."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        work = WORKS[task["work"]]
        net: nn.Sequential = eval(work.network, dict(vars(nn)))
        net.load_state_dict(beginning(net.state_dict()))
        inputs, labels = batch_of(work)
        x = inputs.reshape(work.batch, -1)[self.rank :: self.size].reshape(-1)
        model = nn.DDPSequential(net, average=False) if self.size > 1 else net
        obs, idx, _ = fl.tagi.Utils().label_to_obs(labels[self.rank :: self.size], CLASSES)
        errors = np.full(obs.size, ERROR_VARIANCE, np.float32)
        updater = nn.OutputUpdater(net.device)

        def step() -> Any:
            mean, _ = model(x)
            updater.update_using_indices(
                model.output_z_buffer, obs, errors, idx, model.input_delta_z_buffer
            )
            model.backward()
            model.step()
            return mean

        first = [step().tolist() for _ in range(FIRST_STEPS)]
        return Prepared(step, first, clock=CLOCKS[task["clock"]])


def join(setup: RankSetup) -> Flashlight:
    """Connect to the other ranks."""
    return Flashlight(setup)
