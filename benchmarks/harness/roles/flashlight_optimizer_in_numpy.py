"""The steps of ``flashlight_optimizer`` with NumPy only."""

import sys

from harness.role import RankSetup
from harness.roles.flashlight_optimizer import Flashlight


def join(setup: RankSetup) -> Flashlight:
    """Return the role of the only rank, without csrc/optim."""
    sys.modules["flashlight_py._native._optim"] = None  # type: ignore[assignment]
    return Flashlight(setup)
