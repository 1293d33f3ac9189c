"""``DataParallel``: the processes of one machine compute shares of each batch for this one."""

from __future__ import annotations

from flashlight_py.parallel.workers.wrapper import DataParallel

__all__ = ["DataParallel"]
