"""Numbers into a tree: containers are changed in place, immutable ones made anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from flashlight_py.nn import Module
from flashlight_py.parallel.tree.values import is_immutable
from flashlight_py.parallel.tree.walk import Plan


def put_numbers(plan: Plan, values: Iterable[Any]) -> Any:
    """Replace the numbers of the tree by ``values``, in the order of the plan.

    Returns:
        The tree: the same object, unless it is a number, or immutable with a number in it.
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
            _put(container, changes[node])
    return plan.nodes[0][2][0]


def _put(container: Any, entries: Mapping[Any, Any]) -> None:
    for key, value in entries.items():
        if isinstance(container, Module):
            put_buffer(container, key, value)
        elif isinstance(container, dict) or isinstance(key, int):
            container[key] = value
        else:
            setattr(container, key, value)


def put_buffer(module: Module, name: str, value: Any) -> None:
    """Set a buffer by its dotted name, as in ``Module.buffers``."""
    *parents, own = name.split(".")
    for parent in parents:
        module = dict(module.children())[parent]
    setattr(module, own, value)


def _made_anew(container: Any, entries: Mapping[Any, Any]) -> Any:
    if isinstance(container, tuple):
        if hasattr(container, "_replace"):
            return container._replace(**entries)
        values = [entries.get(position, value) for position, value in enumerate(container)]
        return type(container)(values)
    return _frozen_dataclass(container, entries)


def _frozen_dataclass(value: Any, entries: Mapping[str, Any]) -> Any:
    """Call its class, which computes whatever depends on fields; fields alone are then set."""
    fields = {field.name: field for field in dataclasses.fields(value)}
    given = {name: entry for name, entry in entries.items() if fields[name].init}
    made = dataclasses.replace(value, **given)
    for name, field in fields.items():
        if not field.init and hasattr(value, name):
            object.__setattr__(made, name, entries.get(name, getattr(value, name)))
    return made
