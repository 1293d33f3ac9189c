"""Modules made of modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.device import is_cupy
from flashlight_py.nn.layers import Linear, ReLU
from flashlight_py.nn.module import Module


class Container(Module):
    """A module that holds others in a list, named by position; a subclass writes ``forward``.

    Args:
        modules: the first members, in order; a list or tuple of them will do.

    Raises:
        TypeError: a member is not a module.
    """

    def __init__(self, *modules: Module | Sequence[Module]) -> None:
        self._members: list[Module] = []
        for given in modules:
            for module in given if isinstance(given, (list, tuple)) else (given,):
                self.add(module)

    def add(self, module: Module) -> None:
        """Append a module.

        Raises:
            TypeError: ``module`` is not a module.
        """
        if not isinstance(module, Module):
            raise TypeError(
                f"{type(self).__name__} holds modules, got {type(module).__name__}; "
                "was a class given instead of an instance?"
            )
        self._members.append(module)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the members by position, then modules kept in attributes by name."""
        for position, module in enumerate(self._members):
            yield str(position), module
        yield from super().children()

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def __getitem__(self, position: int) -> Module:
        """Return the member at ``position``."""
        return self._members[position]

    def __repr__(self) -> str:
        inside = ", ".join(repr(module) for module in self._members)
        return f"{type(self).__name__}({inside})"


class Sequential(Container):
    """A chain: each module's result is the next one's input. Without members, the identity."""

    def forward(self, x: Any) -> Variable:
        """Return ``x`` passed through all modules in order."""
        if isinstance(x, Variable) and is_cupy(x.data):
            return self._with_fewer_launches(x)
        for module in self._members:
            x = module(x)
        result: Variable = x
        return result

    def _with_fewer_launches(self, x: Variable) -> Variable:
        """Do the same on a GPU, where a linear map and the ReLU after it share a launch."""
        position = 0
        while position < len(self._members):
            module = self._members[position]
            after = self._members[position + 1] if position + 1 < len(self._members) else None
            if type(module) is Linear and module.bias is not None and type(after) is ReLU:
                x = F.linear_relu(x, module.weight, module.bias)
                position += 2
            else:
                x = module(x)
                position += 1
        return x
