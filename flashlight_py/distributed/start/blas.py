"""How many threads NumPy's OpenBLAS computes with, in ranks that share the cores of a host.

Each rank's OpenBLAS starts a thread for every core when it is loaded, so that four ranks on four
cores compute with sixteen threads. Launchers of ours set the variables that it reads; under others
the library is asked, which works after it was loaded as well.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from flashlight_py import libraries, system

# OpenBLAS reads these when it is loaded: a user who has set one has chosen.
_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Names of its functions: those of NumPy's and SciPy's wheels first; 64_ is for 64-bit integers.
_SPELLINGS = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


class _OpenBlas(NamedTuple):
    """One loaded OpenBLAS; NumPy and SciPy may each have brought their own."""

    library: ctypes.CDLL
    spelling: str

    def ask(self, name: str, *arguments: int, kind: Any = ctypes.c_int) -> Any:
        function = self.library[self.spelling.format(name)]
        function.restype = kind
        return function(*map(ctypes.c_int, arguments))

    def default(self) -> int:
        """Return the threads that it has unless somebody has chosen: one for each core."""
        config = self.ask("get_config", kind=ctypes.c_char_p).decode()
        most, cores = re.search(r"MAX_THREADS=(\d+)", config), int(self.ask("get_num_procs"))
        return min(cores, int(most[1])) if most else cores


_limited: list[tuple[_OpenBlas, int]] = []  # and how many threads each had
_said = ""


def limit(threads: int) -> None:
    """Have each OpenBLAS of this process compute with ``threads``, unless somebody has chosen.

    Choosing is setting a variable that it reads, or another number than its default before.
    """
    global _said  # noqa: PLW0603  (the libraries are the process's, too)
    if choice := chosen():
        _said = f"as {choice} says"
    elif not (found := list(_loaded())):
        _said = "not set: NumPy's is no OpenBLAS; OMP_NUM_THREADS or its own variable chooses them"
    elif limited := limit_each(threads):
        _limited.extend(limited)
        _said = f"{threads}, this rank's share of the cores; {_VARIABLES[0]} chooses otherwise"
    else:
        _said = f"{max(each.ask('get_num_threads') for each in found)}, as it was"


def use_one_thread() -> tuple[int, str]:
    """Have each OpenBLAS of this process compute with one thread, whoever has chosen more.

    Returns:
        How many threads they compute with now, 0 where there is no OpenBLAS, and their core types.
    """
    global _said  # noqa: PLW0603  (see above)
    _said = "1, so that bits do not depend on them"
    _limited.extend(limit_each(1, also_chosen=True))
    found = list(_loaded())
    threads = max((each.ask("get_num_threads") for each in found), default=0)
    # Other instructions (Haswell's, say) make other bits.
    cores = {each.ask("get_corename", kind=ctypes.c_char_p).decode() for each in found}
    return threads, ", ".join(sorted(cores))


def restore() -> None:
    """Restore the number of threads that each OpenBLAS had before any was changed here."""
    global _said  # noqa: PLW0603  (see above)
    _said = ""
    restore_each(_limited)


def chosen() -> str:
    """Return the setting by which somebody has chosen the threads; empty: nobody has."""
    settings = (f"{name}={system.environ[name]}" for name in _VARIABLES if name in system.environ)
    return next(settings, "")


def limit_each(threads: int, also_chosen: bool = False) -> list[tuple[_OpenBlas, int]]:
    """Have each OpenBLAS whose threads nobody has chosen compute with ``threads`` at most.

    Returns:
        Those of which that is fewer than before, and how many they had: for ``restore_each``.
    """
    limited = []
    for each in _loaded():
        had = each.ask("get_num_threads")
        if had > threads and (also_chosen or had == each.default()):
            each.ask("set_num_threads", threads)
            limited.append((each, had))
    return limited


def restore_each(limited: list[tuple[_OpenBlas, int]]) -> None:
    """Undo ``limit_each``, what was limited last first; empties the list."""
    while limited:
        library, threads = limited.pop()
        library.ask("set_num_threads", threads)


def describe() -> str:
    """Return how many threads there are and why; empty before ``limit``."""
    return _said


def _loaded() -> Iterator[_OpenBlas]:
    """Find the libraries that this process has mapped; none where the system does not say."""
    for library in libraries.mapped("openblas"):
        for spelling in _SPELLINGS:
            if hasattr(library, spelling.format("set_num_threads")):
                yield _OpenBlas(library, spelling)
                break
