"""Shared libraries that this process has loaded."""

import ctypes
import itertools
import os
from collections.abc import Iterator
from typing import Any

# Spellings of function names in BLAS builds. NumPy's wheels use the first. 64_: 64-bit integers.
_SPELLINGS = ("scipy_{}64_", "{}64_", "scipy_{}", "{}")
_RTLD_DI_LINKMAP = 2


def loaded_libraries(name: str) -> Iterator[ctypes.CDLL]:
    """Yield loaded libraries with ``name`` in their file names, NumPy's libraries first.

    Yield nothing on macOS and Windows, which have no dlinfo(3).
    """
    # dl_iterate_phdr(3) could deadlock: its callback has the loader's lock and needs the GIL.
    link, named = ctypes.c_void_p(), set[str]()
    try:
        process = ctypes.CDLL(None)
        dlinfo = process.dlinfo
    except (AttributeError, TypeError):
        return
    dlinfo(ctypes.c_void_p(process._handle), _RTLD_DI_LINKMAP, ctypes.byref(link))
    address = link.value
    while address:  # fields of struct link_map: address, name, section, next
        _, text, _, address = (ctypes.c_void_p * 4).from_address(address)
        if name in os.path.basename(path := os.fsdecode(ctypes.string_at(text or b""))):
            named.add(path)
    for path in sorted(named, key=lambda path: ("numpy" not in path, path)):
        yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def functions_of(name: str, *names: str) -> Iterator[list[Any]]:
    """For each loaded library that has all functions ``names``, yield a list of these functions.

    ``name`` is a part of the library's file name. Functions may have the affixes of a BLAS build.
    """
    for library, spelling in itertools.product(loaded_libraries(name), _SPELLINGS):
        spelled = [spelling.format(function_name) for function_name in names]
        if all(hasattr(library, function_name) for function_name in spelled):
            yield [library[function_name] for function_name in spelled]


def blas(*names: str) -> tuple[Any, ...]:
    """Return a flag and the addresses of NumPy's BLAS functions ``names``, or () without a BLAS.

    The flag is True if that BLAS has 64-bit integers.
    """
    for functions in functions_of("blas", *names):
        pointers = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        return functions[0].__name__.endswith("64_"), *pointers
    return ()
