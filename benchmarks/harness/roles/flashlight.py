"""Common code for roles of this package: the start, and the facts for the report."""

from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import RankSetup, Role

__all__ = ["RankRole", "dtype_of", "facts"]


class RankRole(Role):
    """A rank of a world that uses a file in the team's folder."""

    def __init__(self, setup: RankSetup) -> None:
        path = str(Path(setup.folder) / "meet")
        params = {fl.DistributedConstants.FILE_PATH: path, **setup.options}
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, setup.rank, setup.size, params)
        self.rank, self.size = fl.get_world_rank(), fl.get_world_size()

    def facts(self) -> dict[str, str]:
        return {**facts(), "NumPy": np.__version__}

    def barrier(self) -> None:
        fl.barrier()

    def leave(self) -> None:
        fl.distributed_shutdown()


def facts() -> dict[str, str]:
    """Return the version, and the backends of the arrays if the package reports them."""
    describe = getattr(fl.distributed, "describe", None)
    path = (
        fl.distributed_backend().name
        if describe is None
        else "; ".join(str(describe()).splitlines())
    )
    return {"flashlight_py": fl.__version__, "path": path}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of this name; ml_dtypes has bfloat16."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
