"""The walk through a tree, and what it finds: the plan of what is sent, packed and changed.

The walk in Python and csrc/tree/walk.c find the same; that is faster, and not as deep.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flashlight_py.device import Array
from flashlight_py.parallel.agreement import native
from flashlight_py.parallel.tree.description import (
    ARRAY,
    NUMBER,
    PARTS,
    REMEMBERED,
    array_text,
    count,
    dtype_text,
    is_immutable,
    key,
    key_text,
    look,
    text,
)

_ALIGNMENT = 16
_NUMBERS = {bool: b"b", int: b"i", float: b"f", complex: b"c"}

# A value before its turn: the description of its key, the container it stands in, key, value.
_Entry: TypeAlias = "tuple[bytes, int, Any, Any]"


@dataclass(frozen=True)
class Plan:
    """The arrays and numbers of a tree, in the order of the walk.

    ``array_bytes`` is the size of a buffer for all ``arrays``. ``numbers`` are ``(node, key,
    number)``: entry ``key`` of the container with the number ``node``. ``nodes`` are the
    containers, ``(node that it stands in, key, container)``; the first is a list around the tree.
    """

    description: bytes
    arrays: list[Array]
    array_bytes: int
    gpu_arrays: list[Array]
    numbers: list[tuple[int, Any, Any]]
    nodes: list[tuple[int, Any, Any]]


def plan_of(tree: object, sort_keys: bool = False) -> Plan:
    """Walk through ``tree``; with ``sort_keys`` the order of dicts' keys makes no difference.

    Raises:
        TypeError: an array holds Python objects, or a class cannot be built again; names the path.
        ValueError: an array is read-only; names the path.
    """
    module = native()
    if module is not None and not sort_keys:
        try:
            return Plan(*module.walk([tree], look, key_text, dtype_text))
        except (TypeError, ValueError, RecursionError):
            pass  # the walk in Python says where it happened, and has no limit of depth
    return Plan(*Walker(sort_keys).walk([tree]))


def bytes_for(arrays: Sequence[Array]) -> int:
    """Return the size of a buffer for all of ``arrays``."""
    return sum(aligned(array.nbytes) for array in arrays)


def aligned(size: int) -> int:
    """Return how many bytes of a buffer an array of ``size`` bytes takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Walker:
    """Walks through one tree and collects what a ``Plan`` consists of."""

    def __init__(self, sort_keys: bool) -> None:
        self._sort_keys = sort_keys
        self._text: list[bytes] = []
        self._arrays: list[Array] = []
        self._gpu_arrays: list[Array] = []
        self._numbers: list[tuple[int, Any, Any]] = []
        self._nodes: list[tuple[int, Any, Any]] = []
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []  # objects are identified by address, so none may be freed

    def walk(self, box: list[Any]) -> tuple[Any, ...]:
        """Walk through the tree that is the only entry of ``box``, which is node 0.

        Raises:
            TypeError, ValueError: as ``look``, with the path.
        """
        self._nodes.append((-1, 0, box))
        waiting: list[_Entry] = [(b"", 0, 0, box[0])]
        while waiting:
            described_key, node, at, value = waiting.pop()
            self._text.append(described_key)
            try:
                parts = self._visit(node, at, value)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{self._path(node, at)}: {error}") from error
            waiting.extend(reversed(parts))
        size = bytes_for(self._arrays)
        description = b"".join(self._text)
        return description, self._arrays, size, self._gpu_arrays, self._numbers, self._nodes

    def _visit(self, node: int, at: Any, value: Any) -> list[_Entry]:
        """Write down one value; return its parts."""
        number = _NUMBERS.get(type(value))
        answer = look(value) if number is None else (NUMBER, number)
        self._kept += (value, answer)
        if answer is None:
            self._text.append(b"x")
        elif answer[0] == PARTS:
            return self._parts(node, at, value, *answer[1:])
        elif answer[0] == NUMBER:
            self._text.append(answer[1])
            self._numbers.append((node, at, value))
        elif answer[0] == ARRAY:
            self._array(b"a", answer[1], answer[2], self._arrays)
        else:
            self._array(b"g", answer[2], answer[2], self._gpu_arrays)
        return []

    def _array(self, tag: bytes, array: Array, identity: Any, into: list[Array]) -> None:
        if not self._met_before(identity):
            self._text.append(array_text(tag, array))
            into.append(array)

    def _met_before(self, value: Any) -> bool:
        number = self._met.get(id(value))
        if number is None:
            self._met[id(value)] = len(self._met)
            return False
        self._text.append(count(b"r", number))
        return True

    def _parts(
        self, node: int, at: Any, value: Any, tag: str, kind: str, names: Any, parts: Any
    ) -> list[_Entry]:
        code = tag.encode()
        if code in REMEMBERED and self._met_before(value):
            return []
        if tag == "N":
            self._refuse_cycle(node, value)
        here = len(self._nodes)
        self._nodes.append((node, at, value))
        self._text.append(text(code, kind) + b"." if kind else code)
        self._text.append(count(b"", len(parts)))
        if names is None:
            return [(b"", here, position, part) for position, part in enumerate(parts)]
        describe = key if tag == "D" else functools.partial(text, b"p")
        entries = [
            (describe(name), here, name, part) for name, part in zip(names, parts, strict=True)
        ]
        return sorted(entries, key=lambda entry: entry[0]) if self._sort_keys else entries

    def _refuse_cycle(self, node: int, value: Any) -> None:
        """Refuse an object that must be made anew and consists of itself."""
        while node > 0:
            node, _, container = self._nodes[node]
            if container is value:
                raise TypeError(
                    f"this {type(value).__qualname__} is immutable and contains itself, so it "
                    "cannot be made anew; take it out of the tree"
                )
            if not is_immutable(container):
                return

    def _path(self, node: int, at: Any) -> str:
        steps = []
        while node > 0:
            above, above_at, container = self._nodes[node]
            if isinstance(container, dict):
                name = json.dumps(at, ensure_ascii=False) if type(at) is str else repr(at)
                steps.append(f"[{name}]")
            else:
                steps.append(f"[{at}]" if isinstance(at, int) else f".{at}")
            node, at = above, above_at
        return "tree" + "".join(reversed(steps))
