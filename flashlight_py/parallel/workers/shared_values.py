"""Values between this process and its workers: their form as a pickle, arrays in shared memory.

In the form a number stands for each array, so that any nesting of tuples, dicts and objects is
carried. The memory has no name: a process and those it has started map it.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.memory.memory_room import reserve
from flashlight_py.launch.pickling import dumps

_ALIGNMENT = 64

Part: TypeAlias = "Variable | Array"


# A module's form is pickled without its parameters for each pass, some 0.1 ms for a small one,
# and sent where it has changed: modes, ratios, frozen parameters and buffers reach the workers
# without a list of what may change.
def take_apart(
    value: Any, is_part: Callable[[Any], bool], main_can_be_imported: bool = True, what: str = ""
) -> tuple[bytes, list[Any]]:
    """Return the form of ``value`` and its parts, each once, in the order in which they are met."""
    parts: dict[int, tuple[int, Any]] = {}

    # Its number, and of a Variable its calc_grad.
    def stand_in(value: Any) -> tuple[int, bool | None] | None:
        if not is_part(value):
            return None
        number, _ = parts.setdefault(id(value), (len(parts), value))
        return number, value.calc_grad if isinstance(value, Variable) else None

    form = dumps(value, main_can_be_imported, stand_in, what)
    return form, [part for _, part in parts.values()]


def put_together(form: bytes, find: Callable[[int, bool | None], Any]) -> Any:
    """Return the value of ``form``, with what ``find`` returns for what stands for each part."""
    unpickler = pickle.Unpickler(io.BytesIO(form))
    unpickler.persistent_load = lambda stand_in: find(*stand_in)  # type: ignore[method-assign]
    return unpickler.load()


def is_data(value: Any) -> bool:
    """Return whether ``value`` is a Variable or an array: what inputs and results consist of."""
    return isinstance(value, (Variable, np.ndarray)) or is_cupy(value)


def array_of(part: Part) -> Array:
    """Return the array of an input or a result."""
    return part.data if isinstance(part, Variable) else part


# Memory -------------------------------------------------------------------------------------------


class ArrayPlace(NamedTuple):
    """The place of an array in a memory: its first byte, its shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


def lay_out(arrays: Sequence[Array]) -> tuple[list[ArrayPlace], int]:
    """Return places for arrays like these, one after the other, and how many bytes they take."""
    if any(array.dtype.hasobject for array in arrays):
        raise TypeError("an array of Python objects cannot lie in memory that processes share")
    sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    offsets = list(accumulate(sizes, initial=0))
    places = [ArrayPlace(at, a.shape, a.dtype) for at, a in zip(offsets, arrays, strict=False)]
    return places, offsets[-1]


class WorkerMemory:
    """Bytes that grow as needed; a process that has inherited ``fd`` makes it with that."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("flashlight workers") if fd is None else fd
        os.set_inheritable(self.fd, False)
        self._map: mmap.mmap | None = None

    def put(self, arrays: Sequence[Array]) -> list[ArrayPlace]:
        """Write ``arrays`` over whatever was there; return where they lie."""
        places, size = lay_out(arrays)
        self.reserve(size)
        for view, array in zip(self.views(places), arrays, strict=True):
            view[...] = array
        return places

    def reserve(self, size: int) -> None:
        """Make it at least ``size`` bytes; the new ones are zeros. Raises a MemoryError."""
        if size > os.fstat(self.fd).st_size:
            reserve(self.fd, size, "arrays for the workers of DataParallel")

    def views(self, places: Iterable[ArrayPlace]) -> list[Array]:
        """Return the arrays at ``places``: not copies, and valid for as long as they are used."""
        found = []
        for offset, shape, dtype in places:
            size = math.prod(shape) * dtype.itemsize
            if size and (self._map is None or len(self._map) < offset + size):
                self._map = mmap.mmap(self.fd, 0)  # the old one goes with the last array in it
            memory = self._map if size else None
            found.append(np.ndarray(shape, dtype, memory, offset if size else 0))
        return found

    def close(self) -> None:
        """Let go of it; arrays stay."""
        os.close(self.fd)
        self._map = None
