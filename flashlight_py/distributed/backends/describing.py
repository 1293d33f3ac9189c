"""Calls described for a native library, by their signatures."""

from __future__ import annotations

import functools
import threading
from types import ModuleType
from typing import Any

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.calls.arrays import MOVED, code_of, name_of, number_of
from flashlight_py.distributed.calls.call import COMPOSED, SHUTDOWN, Call

SHAPE = 8  # dimensions that a signature has room for
_SEEN = 1024  # dtypes whose names are remembered
# The numbers of the calls that others are steps of; 0: a call by itself.
_STEPS = {"": 0, SHUTDOWN: 0} | {name: number for number, name in enumerate(COMPOSED, 1)}

NAMED = "\n"
"""The end of a name of a dtype or a barrier, in front of the line of the call."""
names_seen: dict[int, str] = {}
"""Dtypes that the library does not know, by their numbers, as far as they were seen here."""


class Describer(threading.local):
    """Fills ``signature``, an ``fl_signature *`` of ``native``.

    Each thread has one of its own: the library reads it during the whole call.
    """

    def __init__(self, native: ModuleType) -> None:
        self._ffi, self._lib = native.ffi, native.lib
        self.signature = self._ffi.new("fl_signature *")

    def describe(self, call: Call, like: Array | None, code: int, root: int) -> str:
        """Write ``call`` into the signature; ``like`` has its dtype and shape.

        Behind the dimensions stands the number of a dtype that the library does not know. The
        result, empty else, is its name, or a barrier's, to go with the call in front of its line.
        """
        signature, lib, name = self.signature, self._lib, ""
        if like is None:
            signature.verb, signature.op, signature.root = code, call.op, root
            signature.dtype = call.compared * lib.FL_COMPARED
            signature.itemsize = signature.count = 0
            known = lib.FL_ANY if call.finds_shape else 0
            signature.ndim = lib.FL_REFUSED if call.refusal else known
            name = f"{SHUTDOWN}{NAMED}" if call.part_of == SHUTDOWN else name
        else:
            holds, shape = call.holds, like.shape
            dtype = code_of(like.dtype) if holds is None or call.verb.reduces else MOVED
            if holds is not None or dtype == MOVED:
                held, shape = holds or (like.dtype, shape)
                number, text = number_of(held), name_of(held)
                if len(names_seen) >= _SEEN:
                    names_seen.clear()
                names_seen[number], name = text, f"{text}{NAMED}"
                shape = (*shape, number)
            if call.compared:
                dtype |= lib.FL_COMPARED | is_cupy(like) * lib.FL_ON_GPU
            size = like.size, 0 if call.compared else like.itemsize
            signature[0] = _outlined(self._ffi, shape, *size, code, dtype, call.op, root)[0]
        signature.scale = call.scale
        signature.part_of = _STEPS[call.part_of]
        return name


# From Python each field takes 50 ns or more, and a program calls the same again and again.
@functools.lru_cache(maxsize=1024)
def _outlined(ffi: Any, shape: tuple[int, ...], count: int, itemsize: int, *numbers: int) -> Any:
    """Return the signature of a call, ``numbers`` its verb, dtype, op and root."""
    signature = ffi.new("fl_signature *")
    signature.verb, signature.dtype, signature.op, signature.root = numbers
    signature.itemsize, signature.count, signature.ndim = itemsize, count, len(shape)
    if len(shape) > SHAPE:  # the last is a hash of all from there on
        number = 0
        for extent in shape[SHAPE - 1 :]:
            number = number * 1099511628211 + extent
        shape = (*shape[: SHAPE - 1], number & (2**63 - 1))
    signature.shape[0 : len(shape)] = shape
    return signature
