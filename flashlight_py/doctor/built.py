"""The native extensions: which are there, and why not the others."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from flashlight_py import _native
from flashlight_py.doctor.finding import Finding, State
from flashlight_py.errors import BackendUnavailableError

__all__ = ["look"]

# What each is for, and what its absence means.
_EXTENSIONS = {
    "shm": (
        "shared memory between the ranks of a host",
        "Gloo is used instead, if it is there, and is up to 100 times slower",
    ),
    "gloo": ("Gloo over TCP between hosts", "shared memory and MPI remain"),
    "fast": ("all_reduce of small arrays in a quarter of a microsecond", "it takes a few more"),
    "tree": ("synchronize in native code", "it is done in Python"),
    "nccl": ("NCCL between GPUs (the binding; the library is below)", "CuPy arrays need MPI"),
}
_PACKAGES = {
    "ml_dtypes": ("bfloat16", "the dtype bfloat16"),
    "cloudpickle": ("notebook", "spawn of functions of notebooks"),
}


def look() -> Iterator[Finding]:
    """Report on each extension, and on the optional packages that add to NumPy arrays.

    An extension that was left out is missing; one that was not, and cannot be loaded, has failed.
    """
    for name, (purpose, without) in _EXTENSIONS.items():
        yield _of_extension(name, purpose, without)
    for name, (extra, purpose) in _PACKAGES.items():
        yield _of_package(name, extra, purpose)


def _of_extension(name: str, purpose: str, without: str) -> Finding:
    try:
        _native.load(name)
    except BackendUnavailableError as error:
        reason = str(error).partition(": ")[2] or str(error)
        state = State.MISSING if _native.left_out(name) else State.FAILED
        return Finding(name, state, f"{purpose}: {without}. Why: {reason}")
    return Finding(name, State.OK, purpose)


def _of_package(name: str, extra: str, purpose: str) -> Finding:
    if importlib.util.find_spec(name) is not None:
        return Finding(name, State.OK, purpose)
    remedy = f"pip install 'flashlight-py[{extra}]', if you need it"
    return Finding(name, State.MISSING, f"{purpose}: {name} is not installed", remedy)
