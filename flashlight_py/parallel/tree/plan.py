"""What a walk through a tree finds: the plan of what is sent, packed and changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashlight_py.device import Array
from flashlight_py.parallel.native import native
from flashlight_py.parallel.tree.description import dtype_text, key_text
from flashlight_py.parallel.tree.values import look
from flashlight_py.parallel.tree.walk import Walker

__all__ = ["Plan", "plan_of"]


@dataclass(frozen=True)
class Plan:
    """What a tree consists of, in the order of the walk.

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
