"""The verbs of this package on ranks that a launcher started and may have initialised."""

import flashlight_py as fl
from harness.role import RankSetup
from harness.roles.flashlight_collectives import Flashlight


class Started(Flashlight):
    """Ranks that initialise the world unless the launcher has done it."""

    def __init__(self, _: RankSetup) -> None:
        self._is_initialised = fl.is_distributed_init()
        if not self._is_initialised:
            fl.distributed_init()
        self.rank, self.size = fl.get_world_rank(), fl.get_world_size()

    def leave(self) -> None:
        if not self._is_initialised:
            fl.distributed_shutdown()


def join(setup: RankSetup) -> Started:
    """Return the role of one rank."""
    return Started(setup)
