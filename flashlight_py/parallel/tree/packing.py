"""A plan's arrays and numbers as bytes, which travel between the ranks, and back into the tree.

Arrays lie in a buffer one after the other, each at a multiple of 16, so every element type can be
used where it lies, on CPUs and GPUs; csrc/tree/pack.c does the same. Ranks know which kinds of
numbers there are; only their values travel.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.nn import Module
from flashlight_py.parallel.tree.walk import Plan, aligned, bytes_for, is_immutable, native


class TreeBuffers:
    """Buffers for the arrays of a plan and ``number_bytes`` of encoded numbers.

    ``used`` are the buffers that have any bytes, uint8, in an order that all ranks share.
    """

    def __init__(self, plan: Plan, number_bytes: int) -> None:
        self._plan = plan
        self._host: Array = np.empty(plan.array_bytes + number_bytes, np.uint8)
        xp = array_module(plan.gpu_arrays[0]) if plan.gpu_arrays else np
        self._gpu: Array = xp.empty(bytes_for(plan.gpu_arrays), xp.uint8)
        self.used = [buffer for buffer in (self._host, self._gpu) if buffer.size]

    def pack(self, numbers: bytes) -> None:
        """Copy the plan's arrays, and ``numbers``, into the buffers."""
        getattr(native(), "pack", pack)(self._plan.arrays, self._host)
        self._host[self._plan.array_bytes :] = np.frombuffer(numbers, np.uint8)
        pack(self._plan.gpu_arrays, self._gpu)

    def unpack(self) -> bytes:
        """Copy the buffers into the plan's arrays; return the encoded numbers."""
        getattr(native(), "unpack", unpack)(self._plan.arrays, self._host)
        unpack(self._plan.gpu_arrays, self._gpu)
        return self._host[self._plan.array_bytes :].tobytes()


def pack(arrays: Sequence[Array], buffer: Array) -> None:
    """Copy ``arrays``, of any layout, into ``buffer`` (uint8), in native byte order."""
    for array, place in _places(arrays, buffer):
        place[...] = array


def unpack(arrays: Sequence[Array], buffer: Array) -> None:
    """Copy ``buffer`` back into ``arrays``."""
    for array, place in _places(arrays, buffer):
        array[...] = place


def _places(arrays: Sequence[Array], buffer: Array) -> Iterator[tuple[Array, Array]]:
    start = 0
    for array in arrays:
        if array.nbytes:
            part = buffer[start : start + array.nbytes]
            yield array, part.view(array.dtype.newbyteorder("=")).reshape(array.shape)
        start += aligned(array.nbytes)


def encode_numbers(numbers: Iterable[Any]) -> bytes:
    """Return Python's numbers, ints of any size, and NumPy's scalars as JSON."""
    encoded = [_encoded(number) for number in numbers]
    return json.dumps(encoded).encode() if encoded else b""


def _encoded(number: Any) -> str:
    if type(number) is int:
        return hex(number)  # in decimals the number of digits is limited
    return np.asarray(number).tobytes().hex()  # as JSON a NaN would lose its bits


def decode_numbers(like: Sequence[Any], data: bytes) -> list[Any]:
    """Return the numbers in ``data``, each of the kind of the one at its place in ``like``."""
    return [_decoded(*each) for each in zip(like, json.loads(data or b"[]"), strict=True)]


def _decoded(like: Any, number: str) -> Any:
    if type(like) is int:
        return int(number, 16)
    value = np.frombuffer(bytes.fromhex(number), np.asarray(like).dtype)[0]
    return value if isinstance(like, np.generic) else value.item()


# Numbers into a tree ------------------------------------------------------------------------------


def put_numbers(plan: Plan, values: Iterable[Any]) -> Any:
    """Replace the numbers of the tree by ``values``, in the order of the plan; return the tree.

    Containers are changed in place, immutable ones with a number in them made anew.
    """
    changes: dict[int, dict[Any, Any]] = {}
    for (node, key, _), value in zip(plan.numbers, values, strict=True):
        changes.setdefault(node, {})[key] = value
    # A container stands after the one it stands in, so the inner ones are made before the outer.
    for node in range(len(plan.nodes) - 1, -1, -1):
        if node not in changes:
            continue
        above, key, container = plan.nodes[node]
        if is_immutable(container):
            changes.setdefault(above, {})[key] = _made_anew(container, changes[node])
        else:
            for key, value in changes[node].items():
                if isinstance(container, Module):
                    put_buffer(container, key, value)
                elif isinstance(container, dict) or isinstance(key, int):
                    container[key] = value
                else:
                    setattr(container, key, value)
    return plan.nodes[0][2][0]


def put_buffer(module: Module, name: str, value: Any) -> None:
    """Set a buffer by its dotted name, as in ``Module.buffers``."""
    place, _, own = name.rpartition(".")
    owners = (each for prefix, each in module._walk() if prefix.rstrip(".") == place)
    setattr(next(owners), own, value)


def _made_anew(container: Any, entries: Mapping[Any, Any]) -> Any:
    if isinstance(container, tuple):
        if hasattr(container, "_replace"):
            return container._replace(**entries)
        values = [entries.get(position, value) for position, value in enumerate(container)]
        return type(container)(values)
    # A frozen dataclass: its class computes whatever depends on fields; fields alone are then set.
    fields = {field.name: field for field in dataclasses.fields(container)}
    given = {name: entry for name, entry in entries.items() if fields[name].init}
    made = dataclasses.replace(container, **given)
    for name, field in fields.items():
        if not field.init and hasattr(container, name):
            object.__setattr__(made, name, entries.get(name, getattr(container, name)))
    return made
