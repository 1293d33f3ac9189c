"""The kind of a value in a tree, and the description of a tree by the kinds of its values.

``look`` says the kind of a value. Dicts, lists, tuples, arrays and numbers of exactly Python's or
NumPy's type are plain: the native walk knows them by itself.

A description is bytes that are equal where the structure is, and can be read back: values in the
order of the walk. A text is a tag, its length (32 bits) and UTF-8; a count is a tag and 32 bits;
numbers are in the machine's byte order.

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

import array as stdlib_array
import dataclasses
import functools
import json
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.calls.arrays import as_array, is_of
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer, LearningRateSchedule
from flashlight_py.parallel.agreement import refuse_sharded
from flashlight_py.parallel.optimizer import DistributedOptimizer

# Answers of ``look`` begin with one of these; csrc/tree/walk.c reads them as well.
NUMBER, ARRAY, GPU_ARRAY, PARTS = range(4)

Answer: TypeAlias = "tuple[Any, ...] | None"

REMEMBERED = b"agDLO"

_COUNT = struct.Struct("=I")
_FIXED = {
    **{b"x": "no array or number", b"b": "bool", b"i": "int", b"f": "float", b"c": "complex"},
    **{b"D": "dict", b"L": "list", b"T": "tuple"},
}


def look(value: Any) -> Answer:
    """Say what a value is that is no number of Python's.

    Returns:
        None for what is left alone; ``(NUMBER, description)``; ``(ARRAY, array, identity)`` where
        ``array`` is a plain array of the memory of ``identity``, an object that may have been met
        before; ``(GPU_ARRAY, description, array)``; or ``(PARTS, tag, class name, names, parts)``,
        with a tag of the description and None as names of parts known by their positions.

    Raises:
        TypeError: an array holds Python objects, or a class cannot be built again.
        ValueError: an array is read-only, or a Variable was computed and needs a gradient.
    """
    if isinstance(value, Variable):
        refuse_sharded("synchronize", [value])
        if value.has_history:
            raise ValueError(
                f"this Variable (shape {value.shape}) was computed from others and needs a "
                "gradient, which would be silently wrong; put its array into the tree: x.array"
            )
        value = value.data
    if is_cupy(value):
        return GPU_ARRAY, array_text(b"g", value), value
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        if isinstance(value, np.flexible):
            return None
        return NUMBER, text(b"n", dtype_text(value.dtype))
    return _parts(value) or _foreign(value)


def is_immutable(value: object) -> bool:
    """Return whether ``value``, which has parts, must be made anew where one of them changes."""
    if isinstance(value, tuple):
        return True
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and params.frozen


def _array(value: Array) -> Answer:
    dtype_text(value.dtype)  # refuses what cannot be sent
    if not value.flags.writeable:
        raise ValueError(
            f"the array is read-only (shape {value.shape}, dtype {value.dtype}) and would be "
            "changed in place; put a copy into the tree: x.copy()"
        )
    if isinstance(value, np.ma.MaskedArray):
        mask = None if value.mask is np.ma.nomask else value.mask
        return _object(value, {"data": value.data, "mask": mask})
    return ARRAY, np.asarray(value), value


def _parts(value: Any) -> Answer:
    """Return the parts of a container or of an object whose values we know how to reach."""
    if isinstance(value, tuple):
        if hasattr(value, "_fields") and hasattr(value, "_replace"):
            return _object(value, dict(zip(value._fields, value, strict=True)))
        _try_making_anew(value, type(value))
        return PARTS, "T", "", None, list(value)
    if isinstance(value, dict):
        return PARTS, "D", "", list(value), list(value.values())
    if isinstance(value, (list, deque)):
        return PARTS, "L", "", None, list(value)
    state = _state(value)
    return None if state is None else _object(value, state)


def _state(value: Any) -> dict[str, Any] | None:
    """Return what an object consists of, by name; None for one that we know nothing of.

    Raises:
        ValueError: a parameter is sharded.
    """
    if isinstance(value, Module):
        refuse_sharded("synchronize", value.params())
        return dict(value.state_dict())
    if is_of(value, "torch.nn", "Module"):
        state = value.state_dict().items()  # with what is no tensor
        return {name: entry for name, entry in state if is_of(entry, "torch", "Tensor")}
    if isinstance(value, DistributedOptimizer):
        return {"optimizer": value.optimizer}
    if isinstance(value, FirstOrderOptimizer):
        refuse_sharded("synchronize", value.params)
    if isinstance(value, FirstOrderOptimizer | LearningRateSchedule):
        return {name: part for name, part in vars(value).items() if name != "params"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if is_immutable(value):
            _try_making_anew(value, dataclasses.replace)
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _object(value: Any, parts: dict[str, Any]) -> Answer:
    tag = "N" if is_immutable(value) else "O"
    return PARTS, tag, type(value).__qualname__, list(parts), list(parts.values())


def _try_making_anew(value: Any, make: Callable[[Any], Any]) -> None:
    """Refuse early what would fail when the root's numbers have arrived."""
    try:
        make(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(value).__qualname__} is immutable and cannot be made anew from its values "
            f"({error}); put a tuple or a dict of them into the tree"
        ) from error


def _foreign(value: Any) -> Answer:
    """Return the memory of an array of another library, such as a torch tensor."""
    if not (hasattr(type(value), "__dlpack__") or isinstance(value, stdlib_array.array)):
        return None
    found = as_array("synchronize", value)
    return look(found) if is_cupy(found) else (ARRAY, found, value)


# Descriptions -------------------------------------------------------------------------------------


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
