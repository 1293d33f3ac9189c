"""Trees of arrays and plain values, as JSON with the arrays beside it, and back.

What JSON lacks is an object with one key that begins with ``$``: ``{"$array": name}`` stands for
an array, ``$scalar`` for a NumPy scalar, ``$tuple`` for a tuple, ``$complex`` for a complex
number, and ``$dict`` for a dict that JSON cannot hold as it is. Nothing is ever pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashlight_py.device import Array, is_cupy

Arrays = dict[str, Array]

_PLAIN = (type(None), bool, int, float, str)


def pack(tree: object) -> tuple[Any, Arrays]:
    """Return the structure of ``tree``, for JSON, and its arrays by name, which are not copied.

    Raises:
        TypeError: something in it is neither a container, an array nor a number; says where.
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
        return _packed_mapping(tree, path, arrays)
    raise TypeError(
        f"a checkpoint cannot hold {path or 'this'}, a {type(tree).__name__}: expected dicts, "
        "lists, tuples, arrays, numbers, strings and None"
    )


def _packed_mapping(tree: Mapping[Any, Any], path: str, arrays: Arrays) -> Any:
    found = {key: _packed(value, _below(path, key), arrays) for key, value in tree.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in found):
        return found
    return {"$dict": [[_packed(key, path, arrays), value] for key, value in found.items()]}


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
