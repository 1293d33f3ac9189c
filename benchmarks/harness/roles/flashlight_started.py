"""The verbs of this package on ranks that a launcher has started, or has even initialised."""

import flashlight_py as fl
from harness.role import Place
from harness.roles.flashlight_collectives import Flashlight


class Started(Flashlight):
    """Ranks that initialise the world where the launcher has not done so."""

    def __init__(self, _: Place) -> None:
        self._is_initialised = fl.is_distributed_init()
        if not self._is_initialised:
            fl.distributed_init()
        self.rank, self.size = fl.get_world_rank(), fl.get_world_size()

    def leave(self) -> None:
        if not self._is_initialised:
            fl.distributed_shutdown()


def join(place: Place) -> Started:
    """Be one of the ranks."""
    return Started(place)
