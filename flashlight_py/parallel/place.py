"""This process's share of the data: that of its rank in the world, or one passed."""

from __future__ import annotations

from dataclasses import dataclass

from flashlight_py.distributed import get_world_rank, get_world_size
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.errors import NotInitializedError


@dataclass(frozen=True)
class Place:
    """Share ``rank`` of ``size``, and whether the world said so."""

    rank: int
    size: int
    of_world: bool

    def require_world(self, what: str) -> None:
        """Check that the world that the place is of is still the one that ``what`` is used in.

        A process that is alone now (after a shutdown, or forked by a rank to load data) may keep
        its share.

        Raises:
            NotInitializedError: the world is another one, such as the one initialised since.
        """
        if not self.of_world or get_world_size() == 1:
            return
        rank, size = get_world_rank(), get_world_size()
        if (rank, size) != (self.rank, self.size):
            raise NotInitializedError(
                f"rank {rank} of {size}: this {what} was made as rank {self.rank} of {self.size}, "
                "for a world that is no more; make it anew, after distributed_init"
            )


def find_place(what: str, rank: int | None, size: int | None) -> Place:
    """Return the place passed, or the world's where both are None.

    Raises:
        TypeError: ``rank`` or ``size`` is not an integer.
        ValueError: only one is given, or ``rank`` is not in [0, size).
    """
    if rank is None and size is None:
        return Place(get_world_rank(), get_world_size(), of_world=True)
    if rank is None or size is None:
        raise ValueError(
            f"{what}: pass both rank and size, or neither for those of the world; "
            f"got rank={rank}, size={size}"
        )
    place = Place(whole_number(what, "rank", rank), whole_number(what, "size", size), False)
    if place.rank >= place.size:
        raise ValueError(f"{what}: rank must be in [0, size), got rank={rank}, size={size}")
    return place
