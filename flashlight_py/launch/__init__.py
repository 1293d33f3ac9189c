"""Start the ranks of a world on this machine, and end them with all that they have started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashlight_py.launch.spawning import spawn

__all__ = ["spawn"]


def __getattr__(name: str) -> Any:
    """Import ``spawn`` when it is used: the launcher needs nothing of it."""
    if name != "spawn":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashlight_py.launch.spawning import spawn

    return spawn
