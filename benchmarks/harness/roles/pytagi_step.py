"""A step of pytagi on one thread."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytagi
import pytagi.nn

from harness.role import Prepared, RankSetup, Role
from harness.roles.tagi_works import (
    CLASSES,
    CLOCKS,
    ERROR_VARIANCE,
    FIRST_STEPS,
    WORKS,
    batch_of,
    beginning,
)


class PyTagi(Role):
    """One process."""

    rank, size = 0, 1

    def facts(self) -> dict[str, str]:
        return {"pytagi": pytagi.__version__.strip(), "threads": "1", "NumPy": np.__version__}

    def barrier(self) -> None:
        """Return, because there is no other rank."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        work = WORKS[task["work"]]
        net = eval(work.network, dict(vars(pytagi.nn)))
        net.set_threads(1)
        x, labels = batch_of(work)
        net(x)  # the first call creates the parameters of convolutions
        state = beginning(net.state_dict())
        net.load_state_dict({k: tuple(a.tolist() for a in entry) for k, entry in state.items()})
        obs, idx, _ = pytagi.Utils().label_to_obs(labels, CLASSES)
        obs, errors = obs.astype(np.float32), np.full(obs.size, ERROR_VARIANCE, np.float32)
        updater = pytagi.nn.OutputUpdater(net.device)

        def step() -> Any:
            mean, _ = net(x)
            updater.update_using_indices(
                net.output_z_buffer, obs, errors, idx, net.input_delta_z_buffer
            )
            net.backward()
            net.step()
            return mean

        first = [np.array(step()).tolist() for _ in range(FIRST_STEPS)]
        return Prepared(step, first, clock=CLOCKS[task["clock"]])


def join(_: RankSetup) -> PyTagi:
    """Return the role of the only rank."""
    return PyTagi()
