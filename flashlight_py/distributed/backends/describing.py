"""Calls described for a native library: the addresses of arrays, and the call's signature."""

from __future__ import annotations

import functools
import math
import threading
from types import ModuleType
from typing import Any

from flashlight_py import _native
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.calls.arrays import MOVED, code_of, name_of, number_of
from flashlight_py.distributed.calls.call import COMPOSED, Call
from flashlight_py.distributed.verbs import SCATTER
from flashlight_py.errors import BackendUnavailableError

_SHAPE = 8  # dimensions that a signature has room for
_SEEN = 1024  # dtypes whose names are remembered
# The numbers of the calls that others are steps of; 0: a call by itself.
_STEPS = {"": 0} | {name: number for number, name in enumerate(COMPOSED, 1)}

NAMED = "\n"
"""The end of a dtype's name, in front of the line of the call."""
names_seen: dict[int, str] = {}
"""Dtypes that the library does not know, by their numbers, as far as they were seen here."""


class Describer(threading.local):
    """Fills a ``signature`` (an ``fl_signature *`` of ``ffi``), natively where that is there.

    Each thread has one of its own: the library reads it during the whole call.
    """

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi
        self.signature = ffi.new("fl_signature *")
        self._place = int(ffi.cast("uintptr_t", self.signature))
        try:
            # From Python each field of the signature takes 100 ns, the address 1 us.
            self._native: ModuleType | None = _native.load("fast")
        except BackendUnavailableError:
            self._native = None

    def describe(
        self, array: Array, verb: int, dtype: int, op: int, scale: float, root: int
    ) -> None:
        """Write the call of ``verb`` with ``array`` into the signature."""
        if self._native is not None:
            self._native.describe(self._place, array, verb, dtype, op, scale, root)
        else:
            self.outline(array.shape, array.itemsize, verb, dtype, op, scale, root)

    def outline(self, shape: tuple[int, ...], itemsize: int, *call: float) -> None:
        """Write a call with an array of ``shape`` into the signature.

        ``call`` is verb, dtype, op, scale and root, as of ``describe``.
        """
        written = _outlined(self._ffi, shape, itemsize, *call)
        self._ffi.memmove(self.signature, written, len(written))

    def add_number(self, number: int, shape: tuple[int, ...]) -> None:
        """Compare ``number`` as well, behind the dimensions of the ``shape`` that was written."""
        signature = self.signature
        signature.ndim = len(shape) + 1
        for d, extent in enumerate(_folded((*shape, number))):
            signature.shape[d] = extent

    def pointer(self, array: Array | None) -> Any:
        """Return the address of the elements, NULL where there is no array."""
        if array is None:
            return self._ffi.NULL
        address = array.ctypes.data if self._native is None else self._native.address(array)
        return self._ffi.cast("void *", address)


def describe(
    describer: Describer, lib: Any, call: Call, like: Array | None, code: int, root: int
) -> str:
    """Write ``call`` into the signature of ``describer``; ``like`` has its dtype and shape.

    Behind the dimensions stands the number of a dtype that the library does not know. The result is
    its name, which is to go with the call; else it is empty.
    """
    signature, name = describer.signature, ""
    if like is None:
        signature.verb, signature.op, signature.scale = code, call.op, call.scale
        signature.root = root
        signature.dtype = call.compared * lib.FL_COMPARED
        signature.itemsize = signature.count = 0
        signature.ndim = lib.FL_ANY if call.verb is SCATTER else 0
    else:
        holds = call.holds
        dtype = code_of(like.dtype) if holds is None or call.verb.reduces else MOVED
        flags = lib.FL_COMPARED | is_cupy(like) * lib.FL_ON_GPU if call.compared else 0
        if flags:
            describer.outline(like.shape, 0, code, dtype | flags, call.op, call.scale, root)
        else:
            describer.describe(like, code, dtype, call.op, call.scale, root)
        if holds is not None or dtype == MOVED:
            held, shape = holds or (like.dtype, like.shape)
            number, name = number_of(held), name_of(held)
            if len(names_seen) >= _SEEN:
                names_seen.clear()
            names_seen[number] = name
            describer.add_number(number, shape)
    signature.part_of = _STEPS[call.part_of]
    return name


@functools.lru_cache(maxsize=1024)  # a program calls the same again and again
def _outlined(
    ffi: Any, shape: tuple[int, ...], itemsize: int, verb: int, dtype: int, op: int, *rest: float
) -> bytes:
    """Return the signature of a call, ``rest`` of it scale and root, as it lies in memory."""
    signature = ffi.new("fl_signature *")
    signature.verb, signature.dtype, signature.op = verb, dtype, op
    signature.scale, signature.root = rest
    signature.itemsize, signature.count = itemsize, math.prod(shape)
    signature.ndim = len(shape)
    for d, extent in enumerate(_folded(shape)):
        signature.shape[d] = extent
    return bytes(ffi.buffer(signature))


def _folded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``shape``, of many dimensions with a hash in the place of the last; as csrc/fast."""
    if len(shape) <= _SHAPE:
        return shape
    number = 0
    for extent in shape[_SHAPE - 1 :]:
        number = number * 1099511628211 + extent
    return (*shape[: _SHAPE - 1], number & (2**63 - 1))
