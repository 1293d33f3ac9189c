"""Start the ranks of a world on this machine, and end them with all that they have started."""

from __future__ import annotations

from flashlight_py.launch.spawning import spawn

__all__ = ["spawn"]
