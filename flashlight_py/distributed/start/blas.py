"""The number of threads of NumPy's OpenBLAS, in ranks that share the cores of a host.

OpenBLAS starts a thread for every core when it is loaded, so that four ranks on four cores compute
with sixteen threads. Our launchers set the variables that it reads. Under other launchers, the
number is changed in the loaded library.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any

from flashlight_py import libraries, system

# OpenBLAS reads these when it is loaded: a user who has set one has chosen.
_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_NAMES = ("get_num_threads", "set_num_threads", "get_num_procs", "get_config", "get_corename")
_limited: list[tuple[Any, int]] = []
reason = ""  # for the number of threads, in words


def limit(threads: int) -> None:
    """Limit each OpenBLAS of this process to ``threads``, unless the user has chosen a number."""
    global reason  # noqa: PLW0603  (the libraries are the process's, too)
    _limited.extend(limited := limit_each(threads))
    numbers = [get_threads() for get_threads, *_ in _loaded()]
    reason = f"{max(numbers, default=0)}, as it was"
    if variable := _chosen():
        reason = f"as {variable} says"
    elif not numbers:
        reason = "not set: NumPy's is no OpenBLAS; OMP_NUM_THREADS or its own variable chooses them"
    elif limited:
        reason = f"{threads}, this rank's share of the cores; {_VARIABLES[0]} chooses otherwise"


def use_one_thread() -> tuple[int, str]:
    """Limit each OpenBLAS of this process to one thread, even if the user has chosen more.

    Returns the number of threads, 0 without an OpenBLAS, and the instruction sets ("Haswell").
    """
    global reason  # noqa: PLW0603  (see above)
    reason = "1, so that bits do not depend on them"
    _limited.extend(limit_each(1, also_chosen=True))
    threads = max((get_threads() for get_threads, *_ in _loaded()), default=0)
    return threads, ", ".join(sorted({core_type for *_, core_type in _loaded()}))


def restore(limited: list[tuple[Any, int]] = _limited) -> None:
    """Undo and remove every limit of a list from ``limit_each``, by default of this process."""
    while limited:  # the last one first
        set_threads, threads = limited.pop()
        set_threads(threads)


def _chosen() -> str:
    """Return the first setting by which the user has chosen the number of threads, or ""."""
    settings = (f"{name}={system.environ[name]}" for name in _VARIABLES if name in system.environ)
    return next(settings, "")


def limit_each(threads: int, also_chosen: bool = False) -> list[tuple[Any, int]]:
    """Limit each OpenBLAS to ``threads``; by default only if the user has not chosen a number.

    The user has chosen if a variable is set, or if the number is not the default. Returns what
    ``restore`` takes: the changed libraries, and the number of threads that each one had.
    """
    limited = []
    for get_threads, set_threads, default, _ in _loaded():
        had = get_threads()
        if had > threads and (also_chosen or (had == default and not _chosen())):
            set_threads(threads)
            limited.append((set_threads, had))
    return limited


def _loaded() -> Iterator[tuple[Any, Any, int, str]]:
    """Yield the two functions of each OpenBLAS, its default number of threads, and its core type.

    NumPy and SciPy may each have brought one.
    """
    # threadpoolctl 3.8 lacks the default, and ignores all threads but the first that sets a number.
    names = [f"openblas_{name}" for name in _NAMES]
    for *functions, cores, config, core_type in libraries.functions_of("openblas", *names):
        config.restype = core_type.restype = ctypes.c_char_p
        most = map(int, re.findall(rb"MAX_THREADS=(\d+)", config()))
        yield *functions, min([cores(), *most]), core_type().decode()
