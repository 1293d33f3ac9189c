"""The shared libraries that this process has loaded."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from typing import Any

# Names of functions in builds of BLAS, NumPy's wheels first; 64_ marks 64-bit integers.
_SPELLINGS = ("scipy_{}64_", "{}64_", "scipy_{}", "{}")
_RTLD_DI_LINKMAP = 2


def mapped(name: str) -> Iterator[ctypes.CDLL]:
    """Yield the loaded libraries whose file names contain ``name``, NumPy's own first."""
    # dl_iterate_phdr(3) holds a lock in its callback: deadlock with an import that holds the GIL.
    paths, link, process = set[str](), ctypes.c_void_p(), ctypes.CDLL(None)
    process.dlinfo(ctypes.c_void_p(process._handle), _RTLD_DI_LINKMAP, ctypes.byref(link))
    address = link.value
    while address:  # of a struct link_map: address, name, section, next
        _, text, _, address = (ctypes.c_void_p * 4).from_address(address)
        paths.add(os.fsdecode(ctypes.string_at(text or b"")))
    named = [path for path in paths if name in os.path.basename(path)]
    for path in sorted(named, key=lambda path: ("numpy" not in path, path)):
        yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def functions_of(name: str, *names: str) -> Iterator[list[Any]]:
    """Yield the functions ``names`` of each library of ``mapped(name)`` that has all of them."""
    for library, spelling in itertools.product(mapped(name), _SPELLINGS):
        spelled = [spelling.format(each) for each in names]
        if all(hasattr(library, each) for each in spelled):
            yield [library[each] for each in spelled]


def blas(*names: str) -> tuple[Any, ...]:
    """Return whether NumPy's BLAS has 64-bit integers, and the addresses of functions ``names``.

    The tuple is empty if this process has loaded no BLAS.
    """
    for functions in functions_of("blas", *(f"cblas_{name}" for name in names)):
        pointers = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        return functions[0].__name__.endswith("64_"), *pointers
    return ()
