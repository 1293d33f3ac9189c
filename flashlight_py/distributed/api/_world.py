"""The group that a verb acts on."""

from __future__ import annotations

from flashlight_py.distributed import world
from flashlight_py.distributed.group import ProcessGroup

__all__ = ["of"]


def of(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, or the world in place of None."""
    return world.current_world().group if group is None else group
