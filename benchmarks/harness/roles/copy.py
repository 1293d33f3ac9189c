"""The limit: one core copies the same bytes once."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.role import Prepared, RankSetup, Role


class Copy(Role):
    """One rank without communication."""

    rank, size = 0, 1

    def facts(self) -> dict[str, str]:
        return {"NumPy": np.__version__}

    def barrier(self) -> None:
        """Return, because there is no other rank."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        source = np.ones(task["nbytes"], np.uint8)
        target = np.empty_like(source)
        return Prepared(lambda: np.copyto(target, source))


def join(_: RankSetup) -> Copy:
    """Return the role of the only rank."""
    return Copy()
