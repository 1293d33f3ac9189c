"""One differentiable collective: what all ranks agree on in its forward and its backward pass."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import InPasses
from flashlight_py.autograd.variable import record_in_order
from flashlight_py.device import Array, array_module, effect
from flashlight_py.distributed import ProcessGroup
from flashlight_py.errors import MismatchError
from flashlight_py.parallel.failing import fail

# How many differentiable collectives each group has had: the same number on all of its ranks.
_calls: dict[weakref.ref[ProcessGroup], int] = {}


class Call(InPasses):
    """A differentiable collective of ``group``, numbered as all its ranks number it.

    ``rows`` are numbers that the ranks have exchanged, those of a rank in a row.
    """

    def __init__(self, verb: str, group: ProcessGroup) -> None:
        self.group = group
        self.rows = np.zeros((group.size, 0), np.int64)
        self._verb = verb
        self._number = 0

    def record(
        self,
        v: Variable,
        result: Array,
        vjp: Callable[[Array], Array],
        rows: Sequence[int] = (),
    ) -> Variable:
        """Return ``result`` as a variable whose backward pass calls ``vjp`` on every rank.

        It has a gradient on all ranks if ``v`` has one on any. Collective: to be called when the
        forward pass of the collective has succeeded.

        Raises:
            MismatchError: another rank is at another differentiable collective.
        """
        table = self._pass_forward(int(v.calc_grad), *rows)
        self.rows = np.array([row[1:] for row in table])
        if not any(row[0] for row in table):
            return Variable(result)
        # A rank that needs no gradient takes part in the backward pass for the others' sake.
        source = v if v.calc_grad else Variable(v.data, calc_grad=True)
        return record_in_order(result, (source, functools.partial(self._answer, vjp)))

    def _answer(self, vjp: Callable[[Array], Array], grad: Array) -> Array:
        self._pass_back()
        return vjp(grad)

    def join_failed(self) -> None:
        """Autograd: a pass fails that has yet to come here, where the other ranks wait."""
        fail(self.group, sys.exc_info()[1])

    @effect
    def _pass_forward(self, *facts: int) -> list[list[int]]:
        self._number = _calls.get(weakref.ref(self.group), 0) + 1
        table = self._meet(False, *facts)
        _calls[weakref.ref(self.group, _calls.pop)] = self._number
        return table.tolist()  # type: ignore[no-any-return]

    @effect
    def _pass_back(self) -> None:
        self._meet(True)

    def _meet(self, backward: bool, *facts: int) -> Array:
        """Return every rank's ``facts``, one rank a row, if all are where this rank is."""
        group = self.group
        mine = np.array([self._number, backward, *facts], np.int64)
        table = np.zeros((group.size, mine.size), np.int64)
        table[group.rank] = mine
        group.all_reduce(table)  # only this rank's row is not zero: the sum is a gathering
        if (table[:, :2] != mine[:2]).any():
            raise MismatchError(self._difference(table))
        return table[:, 2:]

    def _difference(self, table: Array) -> str:
        where = [
            f"rank {rank}: the {'backward' if backward else 'forward'} pass of number {number}"
            for rank, (number, backward) in enumerate(table[:, :2].tolist())
        ]
        return (
            f"[functional.{self._verb}] rank {self.group.rank} of {self.group.size}: the ranks are "
            f"at different differentiable collectives of this group: {', '.join(where)}. Let "
            "backward() reach the results of the same calls on every rank, and in the same passes; "
            "a rank that has no use for a result adds 0 times its sum to the loss"
        )


def require_variable(verb: str, v: object) -> None:
    """Refuse what has no gradient.

    Raises:
        TypeError: ``v`` is no Variable.
    """
    if not isinstance(v, Variable):
        raise TypeError(
            f"functional.{verb} takes a flashlight_py.Variable, got {type(v).__name__}; wrap data "
            f"in flashlight_py.input, or use flashlight_py.{verb}, which works on arrays"
        )


def copy_of(array: Array) -> Array:
    """Return a new array of the same values for a verb to work on in place."""
    return array_module(array).array(array, order="C")  # type: ignore[no-any-return]
