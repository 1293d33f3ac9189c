"""Trees of arrays as files of safetensors: a length, a JSON header, then the bytes of the arrays.

Written here and not by the library of that name, so that one pass writes, digests and flushes
without a second copy of the arrays, bfloat16 can be read, and nothing need be installed.
https://huggingface.co/docs/safetensors

A tree is JSON with the arrays beside it. A value that JSON lacks is an object with one key that
begins with ``$``: ``{"$array": name}`` stands for an array, ``$scalar`` for a NumPy scalar,
``$tuple`` for a tuple, ``$complex`` for a complex number, and ``$dict`` for a dict that JSON cannot
hold as it is. Nothing is ever pickled.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from flashlight_py.device import Array, bfloat16, is_cupy, to_device

Arrays = dict[str, Array]

_PLAIN = (type(None), bool, int, float, str)


def pack(tree: object) -> tuple[Any, Arrays]:
    """Return the structure of ``tree``, for JSON, and its arrays by name, which are not copied.

    A TypeError says where something in it is neither a container, an array nor a number.
    """
    arrays: Arrays = {}
    return _packed(tree, "", arrays), arrays


def unpack(structure: Any, arrays: Mapping[str, Array]) -> Any:
    """Return the tree that ``pack`` was given; the arrays in it are those of ``arrays``."""
    if isinstance(structure, list):
        return [unpack(each, arrays) for each in structure]
    if not isinstance(structure, dict):
        return structure
    kind = next(iter(structure), "")
    if not kind.startswith("$"):
        return {key: unpack(value, arrays) for key, value in structure.items()}
    return _UNPACKED[kind](structure[kind], arrays)


_UNPACKED: dict[str, Callable[[Any, Mapping[str, Array]], Any]] = {
    "$array": lambda name, arrays: arrays[name],
    "$scalar": lambda name, arrays: arrays[name][()],
    "$complex": lambda parts, _: complex(*parts),
    "$tuple": lambda found, arrays: tuple(unpack(found, arrays)),
    "$dict": lambda items, arrays: {unpack(k, arrays): unpack(v, arrays) for k, v in items},
}


def _packed(tree: object, path: str, arrays: Arrays) -> Any:
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, complex) and not isinstance(tree, np.generic):
        return {"$complex": [tree.real, tree.imag]}
    if isinstance(tree, np.generic):
        return {"$scalar": _named(np.asarray(tree), path, arrays)}
    if isinstance(tree, np.ndarray) or is_cupy(tree):
        return {"$array": _named(tree, path, arrays)}
    if isinstance(tree, list | tuple):
        found = [_packed(each, _below(path, n), arrays) for n, each in enumerate(tree)]
        return {"$tuple": found} if isinstance(tree, tuple) else found
    if isinstance(tree, Mapping):
        named = {key: _packed(value, _below(path, key), arrays) for key, value in tree.items()}
        if not all(isinstance(key, str) and not key.startswith("$") for key in named):
            named = {"$dict": [[_packed(k, path, arrays), value] for k, value in named.items()]}
        return named
    raise TypeError(
        f"a checkpoint cannot hold {path or 'this'}, a {type(tree).__name__}: expected dicts, "
        "lists, tuples, arrays, numbers, strings and None"
    )


def _named(array: Any, path: str, arrays: Arrays) -> str:
    """Keep ``array`` under its path; a second one of that name gets a number."""
    name, number = path or "array", 1
    while name in arrays:
        number += 1
        name = f"{path}#{number}"
    arrays[name] = array
    return name


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


_NAMES = {
    **{"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "complex64": "C64",
}
_DTYPES = {short: name for name, short in _NAMES.items()}
# Of complex128 the format knows nothing: it is stored as pairs, and marked in the metadata.
_PAIRS = {"complex128": "float64"}

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


def pieces(tree: object) -> Iterator[Array]:
    """Yield the file that holds ``tree``: pieces of bytes (uint8, one dimension), any lengths.

    Arrays that are contiguous on the host are not copied; others are, each when it is asked for. A
    TypeError, before the first piece, says what cannot be stored.
    """
    structure, arrays = pack(tree)
    # Wide elements first, so that all are aligned: the header's length is a multiple of 8.
    names = sorted(arrays, key=lambda name: -_element(name, arrays[name]).itemsize)
    yield np.frombuffer(_header(structure, arrays, names), np.uint8)
    for name in names:
        host = np.asarray(to_device(arrays[name], "cpu"))
        ordered = host.astype(host.dtype.newbyteorder("<"), copy=False)
        yield np.ascontiguousarray(ordered).reshape(-1).view(np.uint8)


def from_bytes(file: Array) -> Any:
    """Return the tree that ``file`` (uint8, one dimension) holds; its arrays are views of it.

    Raises ValueError if it is no such file, BackendUnavailableError if bfloat16 needs ml_dtypes.
    """
    try:
        (length,) = _LENGTH.unpack(file[: _LENGTH.size].tobytes())
        begin = _LENGTH.size + length
        header = json.loads(file[_LENGTH.size : begin].tobytes())
        metadata = header.pop("__metadata__", {})
        arrays = {name: _view(file[begin:], **entry) for name, entry in header.items()}
        arrays |= {
            name: arrays[name].view(dtype).reshape(arrays[name].shape[:-1])
            for name, dtype in json.loads(metadata.get("pairs", "{}")).items()
        }
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a safetensors file: {error!r}") from error
    if "structure" not in metadata:
        return arrays  # written by somebody else
    return unpack(json.loads(metadata["structure"]), arrays)


def _header(structure: Any, arrays: Arrays, names: list[str]) -> bytes:
    pairs = {name: array.dtype.name for name, array in arrays.items() if array.dtype.name in _PAIRS}
    metadata = {"structure": json.dumps(structure), "pairs": json.dumps(pairs)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        array = arrays[name]
        begin, end = end, end + array.nbytes
        shape = [*array.shape, 2] if name in pairs else list(array.shape)
        dtype = _NAMES[_element(name, array).name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _element(name: str, array: Array) -> np.dtype[Any]:
    """Return the dtype that ``array`` is stored as; a TypeError: the format has none for it."""
    stored = np.dtype(_PAIRS.get(array.dtype.name, array.dtype))
    if stored.name not in _NAMES:
        raise TypeError(
            f"a checkpoint cannot hold {name} of dtype {array.dtype}; expected one of "
            f"{', '.join([*_NAMES, *_PAIRS])}"
        )
    return stored


def _view(data: Array, dtype: str, shape: list[int], data_offsets: list[int]) -> Array:
    begin, end = data_offsets
    name = _DTYPES[dtype]
    kind = bfloat16() if name == "bfloat16" else np.dtype(name).newbyteorder("<")
    if not 0 <= begin <= end <= data.size or end - begin != math.prod(shape) * kind.itemsize:
        raise ValueError(f"bytes {begin} to {end} cannot be {shape} of {kind}")
    return data[begin:end].view(kind).reshape(shape)
