"""Trees of arrays as safetensors files: a length, a JSON header, then the bytes of the arrays.

This module does not use the library "safetensors". So it needs no other package, reads bfloat16,
and can write, digest and flush a file in one pass, without a second copy of the arrays. Format:
https://huggingface.co/docs/safetensors

The structure of a tree is stored as JSON in the metadata. A value that JSON does not support is
stored as an object with one key: ``{"$array": name}`` for an array, ``$scalar`` for a NumPy scalar,
``$tuple`` for a tuple, ``$complex`` for a complex number, and ``$dict`` for a dict with keys that
JSON does not allow. Pickle is not used.
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


def flatten_tree(tree: object) -> tuple[Any, Arrays]:
    """Return the structure of ``tree`` for JSON, and its arrays by name, without copies.

    Raises TypeError, with the path of the value, if a value is no container, array or number.
    """
    arrays: Arrays = {}
    return _flatten(tree, "", arrays), arrays


def rebuild(structure: Any, arrays: Mapping[str, Array]) -> Any:
    """Return the tree with this structure and these arrays. Reverse of ``flatten_tree``."""
    if isinstance(structure, list):
        return [rebuild(value, arrays) for value in structure]
    if not isinstance(structure, dict):
        return structure
    kind = next(iter(structure), "")
    if not kind.startswith("$"):
        return {key: rebuild(value, arrays) for key, value in structure.items()}
    return _REBUILD[kind](structure[kind], arrays)


_REBUILD: dict[str, Callable[[Any, Mapping[str, Array]], Any]] = {
    "$array": lambda name, arrays: arrays[name],
    "$scalar": lambda name, arrays: arrays[name][()],
    "$complex": lambda parts, _: complex(*parts),
    "$tuple": lambda items, arrays: tuple(rebuild(items, arrays)),
    "$dict": lambda items, arrays: {rebuild(k, arrays): rebuild(v, arrays) for k, v in items},
}


def _flatten(tree: object, path: str, arrays: Arrays) -> Any:
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, complex) and not isinstance(tree, np.generic):
        return {"$complex": [tree.real, tree.imag]}
    if isinstance(tree, np.generic):
        return {"$scalar": _add_array(np.asarray(tree), path, arrays)}
    if isinstance(tree, np.ndarray) or is_cupy(tree):
        return {"$array": _add_array(tree, path, arrays)}
    if isinstance(tree, list | tuple):
        entries = [_flatten(value, _join_path(path, n), arrays) for n, value in enumerate(tree)]
        return {"$tuple": entries} if isinstance(tree, tuple) else entries
    if isinstance(tree, Mapping):
        items = {key: _flatten(value, _join_path(path, key), arrays) for key, value in tree.items()}
        if not all(isinstance(key, str) and not key.startswith("$") for key in items):
            items = {"$dict": [[_flatten(k, path, arrays), value] for k, value in items.items()]}
        return items
    raise TypeError(
        f"checkpoint: {path or 'the value'} must consist of dicts, lists, tuples, arrays, "
        f"numbers, strings and None, got a {type(tree).__name__}"
    )


def _add_array(array: Any, path: str, arrays: Arrays) -> str:
    """Add ``array`` to ``arrays`` under ``path``, plus a number if that exists. Return the name."""
    name, number = path or "array", 1
    while name in arrays:
        number += 1
        name = f"{path}#{number}"
    arrays[name] = array
    return name


def _join_path(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


_NAMES = {
    **{"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "complex64": "C64",
}
_DTYPES = {short: name for name, short in _NAMES.items()}
# The format has no complex128. Such an array is stored as float64 pairs and named in the metadata.
_PAIRS = {"complex128": "float64"}

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


def pieces(tree: object) -> Iterator[Array]:
    """Yield the bytes of a file that contains ``tree``, as uint8 arrays of one dimension.

    Arrays that are contiguous on the host are not copied. Other arrays are copied one at a time.
    Raises TypeError before the first piece if a value cannot be stored.
    """
    structure, arrays = flatten_tree(tree)
    # Wide elements first, after a header of 8 * n bytes, so that all arrays are aligned.
    names = sorted(arrays, key=lambda name: -_element(name, arrays[name]).itemsize)
    yield np.frombuffer(_header(structure, arrays, names), np.uint8)
    for name in names:
        host = np.asarray(to_device(arrays[name], "cpu"))
        ordered = host.astype(host.dtype.newbyteorder("<"), copy=False)
        yield np.ascontiguousarray(ordered).reshape(-1).view(np.uint8)


def from_bytes(file: Array) -> Any:
    """Return the tree in ``file`` (uint8, one dimension). Its arrays are views of ``file``.

    Raises ValueError for other content, BackendUnavailableError for bfloat16 without ml_dtypes.
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
        raise ValueError(f"expected a safetensors file, got invalid content: {error!r}") from error
    if "structure" not in metadata:
        return arrays  # a file of another program: a dict of arrays
    return rebuild(json.loads(metadata["structure"]), arrays)


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
    """Return the dtype in which ``array`` is stored. Raise TypeError if the format lacks it."""
    stored = np.dtype(_PAIRS.get(array.dtype.name, array.dtype))
    if stored.name not in _NAMES:
        raise TypeError(
            f"checkpoint: the dtype of {name} must be one of {', '.join([*_NAMES, *_PAIRS])}, "
            f"got {array.dtype}"
        )
    return stored


def _view(data: Array, dtype: str, shape: list[int], data_offsets: list[int]) -> Array:
    begin, end = data_offsets
    name = _DTYPES[dtype]
    kind = bfloat16() if name == "bfloat16" else np.dtype(name).newbyteorder("<")
    if not 0 <= begin <= end <= data.size or end - begin != math.prod(shape) * kind.itemsize:
        raise ValueError(f"expected shape {shape} of dtype {kind}, got bytes {begin} to {end}")
    return data[begin:end].view(kind).reshape(shape)
