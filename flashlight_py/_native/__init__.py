"""The native extensions. Each is optional: absent, it has a reason and a remedy."""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from flashlight_py.errors import BackendUnavailableError

__all__ = ["EXTENSIONS", "load", "optional", "left_out"]

# What each is for, and what its absence means.
EXTENSIONS = {
    "shm": (
        "shared memory between the ranks of a host",
        "Gloo is used instead, if it is there, and is up to 100 times slower",
    ),
    "gloo": ("Gloo over TCP between hosts", "shared memory and MPI remain"),
    "fast": ("all_reduce of small arrays in a quarter of a microsecond", "it takes a few more"),
    "tagi": ("the kernels of fl.tagi", "it computes with NumPy alone, some times slower"),
    "nn": ("the kernels of layers", "they are computed in NumPy, some times slower"),
    "tape": ("captured steps in native code", "fl.capture runs them in NumPy, some times slower"),
    "optim": ("the steps of optimizers", "they are done in NumPy, some ten times slower"),
    "nccl": ("NCCL between GPUs (the binding; the library is below)", "CuPy arrays need MPI"),
    "launch": ("the launch of NCCL's collectives", "CuPy arrays need MPI"),
}
# What an extension needs on the system, and the Debian package that has it.
_LIBRARIES = {"gloo": ("libgloo", "libgloo-dev")}


def load(name: str) -> ModuleType:
    """Return the extension module ``flashlight_py._native._<name>``.

    Raises:
        BackendUnavailableError: it was not built, or a library it needs cannot be loaded; the
            message says why and what to do.
    """
    try:
        return importlib.import_module(f"flashlight_py._native._{name}")
    except ImportError as error:
        reason = left_out(name) or f"{error}. {_remedy(name)}"
        raise BackendUnavailableError(f"the {name} backend is not available: {reason}") from error


@functools.cache
def optional(name: str, without: str) -> Any | None:
    """Return the extension module as :func:`load`; if it is missing, log a warning, return None.

    The warning says what happens ``without`` the extension, and why it is missing.
    """
    try:
        return load(name)
    except BackendUnavailableError as error:
        logging.getLogger("flashlight_py").warning("%s: %s", without, error)
        return None


def left_out(name: str) -> str:
    """Return why the extension was left out when the package was built; empty if it was not."""
    note = Path(__file__).with_name(f"{name}.missing.txt")
    return note.read_text(encoding="utf-8").strip() if note.exists() else ""


def _remedy(name: str) -> str:
    again = "nstall flashlight-py again: pip install --force-reinstall --no-deps ."
    if name not in _LIBRARIES:
        return f"I{again}"
    library, package = _LIBRARIES[name]
    install = f"install it (Debian, Ubuntu: apt-get install {package})"
    return f"If {library} is missing, {install} and i{again}"
