"""Native extensions, all optional. The error for a missing extension has a reason and a remedy."""

import functools
import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from flashlight_py.errors import BackendUnavailableError

__all__ = ["EXTENSIONS", "load_extension", "optional", "is_omitted"]

# By name of the extension: its purpose, and what happens without it.
EXTENSIONS = {
    "shm": (
        "shared memory between the ranks of a host",
        "Gloo or the portable backend is used, up to 100 times slower",
    ),
    "gloo": ("Gloo over TCP between hosts", "the portable backend is used, about 10 times slower"),
    "fast": ("all_reduce of small arrays in 0.25 microseconds", "it takes a few microseconds"),
    "tagi": ("the kernels of fl.tagi", "NumPy computes them, several times slower"),
    "nn": ("the kernels of layers", "NumPy computes them, several times slower"),
    "tape": ("captured steps", "NumPy runs them, several times slower"),
    "optim": ("the steps of optimizers", "NumPy computes them, about ten times slower"),
    "nccl": ("NCCL between GPUs (the binding; the library is below)", "CuPy arrays need MPI"),
    "launch": ("the launch of NCCL's collectives", "CuPy arrays need MPI"),
}
# Debian packages that compile the extensions.
_PACKAGES = "gcc g++ python3-dev"


def load_extension(name: str) -> ModuleType:
    """Return the extension module ``flashlight_py._native._<name>``.

    Raises:
        BackendUnavailableError: If the extension was not built, or a library is missing. The error
            has the reason and a remedy.
    """
    try:
        return importlib.import_module(f"flashlight_py._native._{name}")
    except ImportError as error:
        packages = f"{_PACKAGES} libgloo-dev" if name == "gloo" else _PACKAGES
        raise BackendUnavailableError(
            f"the {name} backend is not available: {error}. Install the packages that compile it"
            f" (Debian, Ubuntu: apt-get install {packages}), then this package from its sources:"
            " pip install --force-reinstall --no-deps --no-binary=flashlight-py flashlight-py,"
            " or . in a clone"
        ) from error


@functools.cache
def optional(name: str, without: str) -> Any | None:
    """Return extension ``name``. If it is missing, log a warning once and return None.

    ``without`` says what happens without the extension. The warning is ``without`` and the reason.
    """
    try:
        return load_extension(name)
    except BackendUnavailableError as error:
        logging.getLogger("flashlight_py").warning("%s: %s", without, error)
        return None


def is_omitted(name: str) -> bool:
    """Return whether the build of the package omitted extension ``name``."""
    return not any(Path(__file__).parent.glob(f"_{name}.*"))
