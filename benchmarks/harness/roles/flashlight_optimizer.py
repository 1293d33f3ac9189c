"""A step of an optimizer of fl.optim."""

import time
from collections.abc import Mapping
from typing import Any

import flashlight_py as fl
from harness.role import Prepared, RankSetup, Role
from harness.roles import flashlight
from harness.roles.optimizer_works import CHECKED, LR, RULES, WORKS, arrays


class Flashlight(Role):
    """One process."""

    def __init__(self, setup: RankSetup) -> None:
        self.rank, self.size = setup.rank, setup.size

    def facts(self) -> dict[str, str]:
        return flashlight.facts()

    def barrier(self) -> None:
        pass

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        name, _, options, _ = RULES[task["rule"]]
        params = []
        for array, grad in arrays(WORKS[task["work"]]):
            params.append(fl.param(array))
            params[-1].grad = grad
        optimizer = getattr(fl.optim, name)(params, LR, **options)
        optimizer.step()
        first = params[0].array.reshape(-1)[:CHECKED].tolist()
        return Prepared(optimizer.step, first, clock=time.process_time)


def join(setup: RankSetup) -> Flashlight:
    """Return the role of the only rank."""
    return Flashlight(setup)
