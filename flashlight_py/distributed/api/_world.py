"""The group that a verb acts on."""

from __future__ import annotations

from flashlight_py.distributed import world
from flashlight_py.distributed.group import ProcessGroup

__all__ = ["of"]


def of(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, or the world in place of None.

    Raises:
        TypeError: it is no group, such as a list of ranks.
    """
    if group is None:
        return world.current_world().group
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            "group must be a ProcessGroup, as new_group(ranks) and split(color) make it; got "
            f"{type(group).__name__}"
        )
    return group
