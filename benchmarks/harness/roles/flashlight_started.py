"""The verbs of this package on ranks that a launcher has started, or has even initialised."""

from __future__ import annotations

from collections.abc import Mapping

import flashlight_py as fl
from harness.role import Place
from harness.roles.flashlight_collectives import Flashlight
from harness.roles.verbs import Builder

GROUP = "benchmark"


class Started(Flashlight):
    """With the option ``through="ray.util.collective"``, as a user calls that."""

    def __init__(self, place: Place) -> None:
        self._is_initialised = fl.is_distributed_init()
        if not self._is_initialised:
            fl.distributed_init()
        self.rank, self.size = fl.get_world_rank(), fl.get_world_size()
        self._through = place.options.get("through")
        if self._through:
            from ray.util import collective

            fl.launch.ray_collective.register()
            collective.init_collective_group(self.size, self.rank, "FLASHLIGHT", GROUP)

    @property
    def builders(self) -> Mapping[str, Builder]:
        if not self._through:
            return super().builders
        from ray.util import collective

        return {"all_reduce": lambda x: (lambda: collective.allreduce(x, GROUP), x)}

    def leave(self) -> None:
        if self._through:
            from ray.util import collective

            collective.destroy_collective_group(GROUP)
        if not self._is_initialised:
            fl.distributed_shutdown()


def join(place: Place) -> Started:
    """Be one of the ranks."""
    return Started(place)
