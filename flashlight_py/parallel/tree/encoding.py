"""Numbers as bytes. Ranks know which kinds of numbers there are; only the values travel."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["decode_numbers", "encode_numbers"]

_FIXED = {bool: struct.Struct("=?"), float: struct.Struct("=d"), complex: struct.Struct("=dd")}
_LENGTH = struct.Struct("=Q")


def encode_numbers(numbers: Iterable[Any]) -> bytes:
    """Return Python's numbers, ints of any size, and NumPy's scalars as bytes."""
    return b"".join([_encode(number) for number in numbers])


def decode_numbers(like: Sequence[Any], data: bytes) -> list[Any]:
    """Return the numbers in ``data``, each of the kind of the one at its place in ``like``."""
    numbers, start = [], 0
    for model in like:
        number, start = _decode(model, data, start)
        numbers.append(number)
    return numbers


def _encode(number: Any) -> bytes:
    if isinstance(number, np.generic):
        return number.tobytes()
    if type(number) is int:
        size = number.bit_length() // 8 + 1  # with the sign
        return _LENGTH.pack(size) + number.to_bytes(size, "little", signed=True)
    if type(number) is complex:
        return _FIXED[complex].pack(number.real, number.imag)
    return _FIXED[type(number)].pack(number)


def _decode(model: Any, data: bytes, start: int) -> tuple[Any, int]:
    """Return the number that begins at ``start``, and where the next one begins."""
    if isinstance(model, np.generic):
        end = start + model.dtype.itemsize
        return np.frombuffer(data[start:end], model.dtype)[0], end
    if type(model) is int:
        begin = start + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, start)[0]
        return int.from_bytes(data[begin:end], "little", signed=True), end
    form = _FIXED[type(model)]
    return type(model)(*form.unpack_from(data, start)), start + form.size
