"""The number of threads of NumPy's OpenBLAS, for ranks that share the cores of a host.

OpenBLAS starts one thread per core when it is loaded, so four ranks on four cores would use sixteen
threads. The launchers of this package set an environment variable that OpenBLAS reads. With other
launchers, this module changes the number after OpenBLAS is loaded.
"""

import ctypes
import re
from collections.abc import Iterator
from typing import Any

from flashlight_py import libraries, system

# Variables from which OpenBLAS reads the number of threads when it is loaded. Users may set one.
_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_NAMES = ("get_num_threads", "set_num_threads", "get_num_procs", "get_config", "get_corename")
_limited: list[tuple[Any, int]] = []
reason = ""  # origin of the number of threads, for ``describe``


def limit(threads: int) -> None:
    """Limit OpenBLAS to ``threads`` threads, unless the user has chosen a number."""
    global reason  # noqa: PLW0603 (the libraries are global, too)
    _limited.extend(limited := limit_each(threads))
    if variable := _user_choice():
        reason = f"set by {variable}"
    elif limited:
        reason = f"{threads}, the share of this rank. Set {_VARIABLES[0]} to change it"
    elif numbers := [get_threads() for get_threads, *_ in _loaded()]:
        reason = f"{max(numbers)}, unchanged"
    else:
        reason = "not set: NumPy does not use OpenBLAS. Set OMP_NUM_THREADS or its own variable"


def use_one_thread() -> tuple[int, str]:
    """Limit OpenBLAS to one thread, even if the user has chosen more.

    Returns the number of threads (0 if no OpenBLAS is loaded), and the processor types that
    OpenBLAS detected ("Haswell").
    """
    global reason  # noqa: PLW0603  (see above)
    reason = "1, so that results do not depend on the number"
    _limited.extend(limit_each(1, override_user=True))
    threads = max((get_threads() for get_threads, *_ in _loaded()), default=0)
    return threads, ", ".join(sorted({core_type for *_, core_type in _loaded()}))


def restore(limited: list[tuple[Any, int]] = _limited) -> None:
    """Restore the numbers of threads in ``limited``, and empty the list. Default: all limits."""
    while limited:  # in reverse order
        set_threads, threads = limited.pop()
        set_threads(threads)


def _user_choice() -> str:
    settings = (f"{name}={system.environ[name]}" for name in _VARIABLES if name in system.environ)
    return next(settings, "")


def limit_each(threads: int, override_user: bool = False) -> list[tuple[Any, int]]:
    """Limit each OpenBLAS to ``threads`` threads, unless the user has chosen a number.

    The user has chosen a number if an environment variable is set or the current number is not
    the default. ``override_user`` ignores this. Returns the argument of ``restore``: pairs of the
    function that sets the number, and the old number.
    """
    limited = []
    for get_threads, set_threads, default, _ in _loaded():
        previous = get_threads()
        if previous > threads and (override_user or (previous == default and not _user_choice())):
            set_threads(threads)
            limited.append((set_threads, previous))
    return limited


def _loaded() -> Iterator[tuple[Any, Any, int, str]]:
    """Yield for each OpenBLAS the functions ``get`` and ``set``, the default number, the core type.

    NumPy and SciPy may contain different copies of OpenBLAS.
    """
    # threadpoolctl 3.8 does not replace this: it lacks the default number, and is not thread-safe.
    names = [f"openblas_{name}" for name in _NAMES]
    for *functions, cores, config, core_type in libraries.functions_of("openblas", *names):
        config.restype = core_type.restype = ctypes.c_char_p
        most = map(int, re.findall(rb"MAX_THREADS=(\d+)", config()))
        yield *functions, min([cores(), *most]), core_type().decode()
