"""The description of a tree: bytes that are equal where the structure is, and can be read back.

Values in the order of the walk. A text is a tag, its length (32 bits) and UTF-8; a count is a tag
and 32 bits; numbers are in the machine's byte order.

    x                        what is left alone: None, strings, functions, ...
    b i f c                  a Python number: bool, int, float, complex
    n text                   a NumPy scalar of that dtype
    a text, g text           an array (of a GPU) of that dtype; then the number of its dimensions
                             (8 bits) and each (64 bits)
    r number                 the array or container that was that number to be met
    D count, L count         a dict (each value after its key), a list
    T count                  a tuple
    O text . count           an object of the class of that name, each value after its attribute
    N text . count           the same, immutable
    s text, k text, p text   before a value: a string as key, another key as Python writes it, an
                             attribute

Those of the tags in ``REMEMBERED`` are numbered in the order in which they are met. Equal tuples
may be one object on one rank and two on another, so those are described wherever they are met.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array

REMEMBERED = b"agDLO"

_COUNT = struct.Struct("=I")
_FIXED = {
    **{b"x": "no array or number", b"b": "bool", b"i": "int", b"f": "float", b"c": "complex"},
    **{b"D": "dict", b"L": "list", b"T": "tuple"},
}


def count(tag: bytes, number: int) -> bytes:
    """Return a tag with a count after it."""
    return tag + _COUNT.pack(number)


def text(tag: bytes, value: str) -> bytes:
    """Return a tag with a text after it."""
    encoded = value.encode(errors="surrogatepass")
    return count(tag, len(encoded)) + encoded


@functools.lru_cache(maxsize=256)
def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, the same for all byte orders: what travels is native.

    Raises:
        TypeError: arrays of this dtype hold Python objects, which are not sent.
    """
    if dtype.hasobject:
        raise TypeError(
            f"an array of dtype {dtype} holds Python objects, which are not sent; take it out of "
            "the tree, or convert it to numbers"
        )
    return str(dtype.newbyteorder("="))


def array_text(tag: bytes, array: Array) -> bytes:
    """Return the description of an array."""
    shape = struct.pack(f"=B{array.ndim}q", array.ndim, *array.shape)
    return text(tag, dtype_text(array.dtype)) + shape


def key(value: object) -> bytes:
    """Return the description of a key of a dict."""
    return text(b"s", value) if type(value) is str else text(b"k", key_text(value))


def key_text(value: object) -> str:
    """Return how Python writes a key that is no plain string, without addresses in memory."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__:
        return f"a {type(value).__qualname__}"
    return repr(value)


def entries(description: bytes) -> Iterator[tuple[str, str]]:
    """Yield path and kind of every value, such as ``tree["w"][3]`` and ``float32 (2, 3)``."""
    reader = _Reader(description)
    met: list[str] = []
    # Containers with values to come: their paths, whether these are named, the next one's number.
    pending = [("", False, iter(range(1)))]
    while pending:
        path, is_named, positions = pending[-1]
        position = next(positions, None)
        if position is None:
            pending.pop()
            continue
        here = path + (reader.step() if is_named else f"[{position}]") if path else "tree"
        tag = reader.take(1)
        if tag in REMEMBERED:
            met.append(here)
        yield here, reader.kind(tag, met)
        if tag in b"DLTON":
            if tag in b"ON":
                reader.take(1)
            pending.append((here, tag in b"DON", iter(range(reader.count()))))


def first_difference(
    descriptions: Sequence[bytes], in_order: Sequence[bytes] | None = None
) -> tuple[str, list[str]] | None:
    """Return the first path at which not all are alike, and what each rank has there.

    ``in_order`` are descriptions of the same trees with other orders of keys: that of rank 0 says
    what is first, and what rank 0 lacks comes last. None where nothing differs.
    """
    trees = [dict(entries(description)) for description in descriptions]
    ordered = [dict(entries(description)) for description in in_order or descriptions]
    for path in dict.fromkeys(path for tree in ordered for path in tree):
        kinds = [tree.get(path, "nothing") for tree in trees]
        if len(set(kinds)) > 1:
            return path, kinds
    return None


class _Reader:
    """Takes a description apart from its beginning."""

    def __init__(self, description: bytes) -> None:
        self._rest = memoryview(description)

    def take(self, size: int) -> bytes:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken.tobytes()

    def count(self) -> int:
        number: int = _COUNT.unpack(self.take(_COUNT.size))[0]
        return number

    def text(self) -> str:
        return self.take(self.count()).decode(errors="backslashreplace")

    def step(self) -> str:
        """Return what a key adds to the path."""
        tag, name = self.take(1), self.text()
        if tag == b"p":
            return f".{name}"
        return f"[{json.dumps(name, ensure_ascii=False) if tag == b's' else name}]"

    def kind(self, tag: bytes, met: list[str]) -> str:
        """Return in words what a tag and what belongs to it say."""
        if tag in _FIXED:
            return _FIXED[tag]
        if tag == b"r":
            return f"the same object as {met[self.count()]}"
        if tag in b"ag":
            return f"{'GPU ' if tag == b'g' else ''}{self.text()} {self._shape()}"
        return f"NumPy {self.text()}" if tag == b"n" else self.text()

    def _shape(self) -> tuple[int, ...]:
        dims = self.take(1)[0]
        return struct.unpack(f"={dims}q", self.take(8 * dims))
