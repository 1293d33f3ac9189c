"""What the environment of a rank says of its place, and of where to meet."""

from __future__ import annotations

__all__ = ["rank_variables"]


def rank_variables(rank: int, size: int, file: str) -> dict[str, str]:
    """Return what tells ``distributed_init`` that this is ``rank`` of ``size``, on one host."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {**{name: str(value) for name, value in place.items()}, "FLASHLIGHT_FILE": file}
