"""A module's buffers in a step of leaves: all begin with the same, and changes are averaged.

Floating buffers (running statistics) change by the mean of what the leaves have changed, weighed by
their rows as gradients are; one that no leaf changes keeps its bits. All others (counters) become
what the first leaf has made of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.nn import Module
from flashlight_py.parallel.synchronize import give_state
from flashlight_py.parallel.tree.packing import put_buffer


class Buffers:
    """The buffers ``names`` of ``module``. Making it is collective where there are any, and blocks.

    They become those of rank 0 of ``group``.
    """

    __captured_state__ = ("_module", "_names", "_group", "_averaged", "_others")

    def __init__(self, module: Module, names: Sequence[str], group: ProcessGroup | None) -> None:
        # Not kept alive: what is known of distributed modules goes with them.
        self._module, self._names, self._group = weakref.ref(module), list(names), group
        self._before: dict[str, Any] = {}
        self._first: dict[str, Any] = {}
        if names:
            give_state(module, self._now(names), 0, group)
        self._averaged = [name for name, value in self._now(names).items() if _is_floating(value)]
        self._others = [name for name in names if name not in self._averaged]

    def floating(self) -> dict[str, Array]:
        """Return the buffers that are averaged, by name."""
        return self._now(self._averaged)

    def begin(self) -> None:
        """Keep what the step begins with."""
        self._before = {name: np.array(value) for name, value in self._now(self._names).items()}
        self._first = {}

    def restore(self) -> None:
        """Make the buffers what the step has begun with."""
        self._set(self._before)

    def changes(self, is_first: bool) -> dict[str, Array]:
        """Return by how much the leaf has changed those that are averaged, exactly 0 where not."""
        now = self._now(self._names)
        if is_first:
            self._first = {name: np.array(now[name]) for name in self._others}
        with np.errstate(all="ignore"):  # a leaf's statistics may be infinite
            return {
                name: np.where(now[name] == self._before[name], 0, now[name] - self._before[name])
                for name in self._averaged
            }

    def end(self, means: Mapping[str, Array]) -> None:
        """Add the mean changes, and share what the first leaf made; that is collective."""
        with np.errstate(all="ignore"):
            self._set({name: self._before[name] + mean for name, mean in means.items()})
        if self._others:
            self._set(self._first or {name: self._before[name] for name in self._others})
            give_state(self._owner(), self._now(self._others), 0, self._group)

    def _now(self, names: Sequence[str]) -> dict[str, Any]:
        if not names:
            return {}
        found = self._owner().buffers
        return {name: found[name] for name in names}

    def _set(self, values: Mapping[str, Array]) -> None:
        now = self._now(list(values))
        for name, value in values.items():
            if isinstance(now[name], np.ndarray):
                now[name][...] = value
            else:
                put_buffer(self._owner(), name, value.item())

    def _owner(self) -> Module:
        module = self._module()
        assert module is not None, "whoever runs a step has it"
        return module


def _is_floating(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fc"
