"""What an optimizer asks a parameter that several processes have in common.

Such a parameter has a ``Placement`` (``Variable.placement``), put there by what shards the module;
others have None, and all of theirs is their process's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.device import Array
from flashlight_py.optim.squares import sum_of_squares

if TYPE_CHECKING:
    from flashlight_py.optim.clip import Summing
    from flashlight_py.optim.optimizer import FirstOrderOptimizer

__all__ = ["Placement", "Shards"]


class Shards(ABC):
    """What the parameters of one sharded module have in common.

    ``group``: the processes that step them together; sums over it are those of the whole module.
    """

    group: Summing
    steps = False  # inside the backward pass, so that there are no gradients afterwards

    @abstractmethod
    def attach(self, optimizer: FirstOrderOptimizer) -> None:
        """Take note of an optimizer that was made for parameters of the module.

        Raises:
            ValueError: the module was sharded in a way that this optimizer cannot step.
        """

    def check(self, what: str) -> None:  # noqa: B027  (optional: where nothing can be torn)
        """Refuse ``what``, in words, where a process has ended in the middle of a change.

        Raises:
            TornStateError: one has.
        """

    def loading(self) -> AbstractContextManager[None]:
        """Return the context in which this process sets all parameters of the module."""
        return nullcontext()

    @abstractmethod
    def changing(self, what: str) -> AbstractContextManager[None]:
        """Return the context in which this process may write its pieces. Collective, blocking.

        Entered and left by all processes of the group: on entering none reads any more what is to
        change, on leaving all have changed it. ``what``, for errors: such as "AdamOptimizer.step".
        """

    def own_gradients(self, variables: Iterable[Variable]) -> list[Array]:
        """Return the gradients of what this process steps of ``variables``, all of them sharded."""
        pieces = [piece for each in variables for piece in each.placement.pieces(each, ())]
        return [grad for _, grad in pieces]

    def sum_of_squares(self, variables: Sequence[Variable]) -> float:
        """Return that of all gradients of ``variables``, the same on all processes. Collective."""
        squares = sum(sum_of_squares(grad) for grad in self.own_gradients(variables))
        return float(self.group.all_reduce(np.array([squares], np.float64))[0])

    def meet(self) -> None:  # noqa: B027  (optional: where no process sees another's pieces)
        """Wait until all processes have written their pieces of gradients. Collective."""


class Placement(ABC):
    """Where one parameter, its gradient and its optimizers' state lie."""

    shards: Shards
    is_cut = False  # a process has its part alone, and steps it like a parameter of its own
    replays = False  # captured steps can do again what is done with the parameter

    @abstractmethod
    def zeros(self, dtype: DTypeLike) -> Array:
        """Return new state for the parameter, zeros. Collective, blocking."""

    @abstractmethod
    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        """Return what this process steps: each piece is (parameter, gradient, *states).

        All arrays of a piece are contiguous, of one dimension and of one length. They are views:
        what is written to them is written to the parameter.
        """

    def sum_of_squares(self, variable: Variable) -> float:
        """Return that of the whole gradient, in float64, the same on all processes.

        For rules that need a norm. This one is for gradients that every process can read.
        """
        assert variable.grad is not None
        return sum_of_squares(variable.grad)

    @abstractmethod
    def whole(self, state: Array) -> Array:
        """Return ``state``, made by ``zeros``, in the parameter's shape; may be collective."""

    @abstractmethod
    def put(self, state: Array, value: Any) -> None:
        """Set ``state`` to ``value``, an array of the parameter's shape that all processes have."""

    def value(self, variable: Variable) -> Array:
        """Return the whole parameter, as state dicts have it; may be collective."""
        return variable.data

    def whole_shape(self, variable: Variable) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return variable.shape

    def part(self, value: Array) -> Array:
        """Return what of a whole parameter is in the variable's array.

        Raises:
            ValueError: ``value`` has another shape than the whole parameter.
        """
        return value

    def words(self) -> str:
        """Return what is this process's own about the parameter, to be compared; else nothing."""
        return ""
