"""What every role that uses this package needs: the start, and what to report of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import Place

__all__ = ["dtype_of", "facts", "initialise"]


def initialise(place: Place) -> None:
    """Meet the other ranks through a file of the team's folder."""
    params = {fl.DistributedConstants.FILE_PATH: str(Path(place.folder) / "meet"), **place.options}
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, place.rank, place.size, params)


def facts() -> dict[str, str]:
    """Return the version, and which paths the arrays take, where the package knows."""
    describe = getattr(fl.distributed, "describe", None)
    path = (
        fl.distributed_backend().name
        if describe is None
        else "; ".join(str(describe()).splitlines())
    )
    return {"flashlight_py": fl.__version__, "path": path}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of that name; bfloat16 is ml_dtypes'."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found
