"""Optimizers that are a rule: how each element changes by its gradient, its state and numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from flashlight_py.autograd import Variable
from flashlight_py.autograd.graph import note_changes
from flashlight_py.device import Array, array_module, captured_gpu, effect
from flashlight_py.optim import cuda, reference
from flashlight_py.optim.cuda import Rule
from flashlight_py.optim.native import native
from flashlight_py.optim.optimizer import FirstOrderOptimizer, is_in_common
from flashlight_py.optim.placement import Shards
from flashlight_py.optim.squares import sum_of_squares


class RuleOptimizer(FirstOrderOptimizer):
    """What the optimizers of this package share; each only says its rule and its state's names.

    It steps parameters of sharded modules too, beside others: their state is made by their
    placement, and each process steps its own pieces. Then making it, ``step``, ``state_dict`` and
    ``load_state_dict`` are collective.
    """

    # Whether the rule needs all elements of a parameter's gradient at once.
    needs_whole_gradient: ClassVar[bool] = False

    def __init__(self, params: Iterable[Variable], lr: float, states: Sequence[str]) -> None:
        super().__init__(params, lr)
        self._steps = [0] * len(self.params)
        self._names = tuple(states)
        self._made_for = list(map(_shards_of, self.params))
        self._states = tuple([_zeros(variable) for variable in self.params] for _ in states)

    def step(self, grad_scale: float = 1.0) -> None:
        """Change every parameter that has a gradient, in place; gradients stay as they are.

        Args:
            grad_scale: a factor by which gradients count, such as one that limits their norm.

        Raises:
            RuntimeError: a parameter was sharded, or sharded anew, after the optimizer was made;
                nothing was changed.
            ValueError: a parameter had no ``calc_grad`` when its module was sharded; likewise.
        """
        changed = [variable for variable in self.params if variable.grad is not None]
        if not self._shards:
            queued = self._step_own(grad_scale)
            note_changes(changed)
            if queued:
                cuda.change(queued, grad_scale, self)
            return
        self._check_placements()
        placed = [  # before the first change: a placement may refuse a parameter
            (position, variable.grad, self._pieces_of(position, variable))
            for position, variable in enumerate(self.params)
            if variable.grad is not None
        ]
        note_changes(changed)
        self._step_placed(placed, grad_scale)

    def _pieces_of(self, position: int, variable: Variable) -> Sequence[tuple[Array, ...]]:
        states, grad = self.states_of(position), variable.grad
        assert grad is not None  # else nothing is stepped
        if variable.placement is None:
            return [(variable.data, grad, *states)]
        return variable.placement.pieces(variable, states)  # type: ignore[no-any-return]

    @effect
    def _step_placed(
        self, placed: list[tuple[int, Array, Sequence[tuple[Array, ...]]]], grad_scale: float
    ) -> None:
        """Step parameters of sharded modules, and those beside them: position, gradient, pieces."""
        queued: list[cuda.Step] = []
        with ExitStack() as stack:
            for shards in self._shards:
                stack.enter_context(shards.changing(f"{type(self).__name__}.step"))
            for position, grad, pieces in placed:
                variable = self.params[position]
                held, variable.grad = variable.grad, grad  # for a rule that needs a norm
                queued += self._step_pieces(position, pieces, grad_scale)
                variable.grad = held
            cuda.change(queued, grad_scale)

    def step_pieces(
        self,
        position: int,
        pieces: Iterable[Sequence[Any]],
        grad_scale: float = 1.0,
        zero: bool = False,
    ) -> None:
        """Take one step of a parameter, of which this process has ``pieces``, in place.

        For what shards a module; the caller sees to it that no process reads what changes.

        Args:
            position: of the parameter in ``params``.
            pieces: each is (parameter, gradient, *states), arrays of one shape, writable; the
                gradient may be a list of arrays, which count as their sum, added in its order.
            grad_scale: a factor by which gradients count.
            zero: whether the gradients are 0 afterwards; else they stay as they are.
        """
        note_changes((self.params[position],))
        queued = self._step_pieces(position, pieces, grad_scale, zero)
        cuda.change(queued, grad_scale)
        for _, piece in queued if zero else ():
            piece[1][...] = 0

    def states_of(self, position: int) -> tuple[Array, ...]:
        """Return the state of parameter ``position`` in the order of a piece; not copies."""
        return tuple(entries[position] for entries in self._states)

    @abstractmethod
    def _rule(self, position: int, grad_scale: float) -> Rule:
        """Return what a parameter's step number ``self._steps[position]`` is done with."""

    def next_rules(self, positions: Iterable[int], grad_scale: float) -> list[Rule]:
        """Count a step of each of these parameters, and return the rules by which it is done."""
        rules = []
        for position in positions:
            self._steps[position] += 1
            rules.append(self._rule(position, grad_scale))
        return rules

    def step_more_pieces(
        self, position: int, pieces: Iterable[Sequence[Any]], grad_scale: float = 1.0
    ) -> None:
        """Go on with the step of a parameter that ``step_pieces`` has begun, as it does."""
        self._steps[position] -= 1
        self.step_pieces(position, pieces, grad_scale)

    def _step_own(self, grad_scale: float) -> list[cuda.Step]:
        """Step the parameters that have no placement; return what is to be queued on GPUs."""
        module = native()
        left: Iterable[int] | None = range(len(self.params))
        if module is not None:
            left = module.step(
                self.params,
                self._states,
                self._steps,
                self._rule,
                grad_scale,
                self.needs_whole_gradient,
            )
            if left is None:
                return []
        self._check_placements()
        queued: list[cuda.Step] = []
        for position in left or ():
            variable = self.params[position]
            if variable.grad is not None:
                pieces = self._pieces_of(position, variable)
                queued += self._step_pieces(position, pieces, grad_scale)
        return queued

    def _step_pieces(
        self,
        position: int,
        pieces: Iterable[Sequence[Any]],
        grad_scale: float,
        zero: bool = False,
    ) -> list[cuda.Step]:
        """Step pieces of host memory, and count the step; return those that GPUs have."""
        (rule,) = self.next_rules([position], grad_scale)
        queued: list[cuda.Step] = []
        for param, grad, *states in pieces:
            grads = list(grad) if isinstance(grad, (list, tuple)) else [grad]
            on_device = (param, grads[0], *states)
            if len(grads) == 1 and cuda.fits(on_device):
                queued.append((rule, on_device))
            else:
                owner = captured_gpu()
                if owner is not None:
                    owner.leave(
                        f"{type(self).__name__} has no kernel of its own for parameter {position}, "
                        "or its gradient, which is not contiguous or of another dtype or device"
                    )
                self._change(rule, (param, grads, *states), grad_scale, zero)
        return queued

    @staticmethod
    def _change(rule: Rule, piece: tuple[Any, ...], grad_scale: float, zero: bool) -> None:
        module = native()
        if module is not None and module.change(rule, piece, grad_scale, zero):
            return
        reference.change(*rule, piece, grad_scale)
        for grad in piece[1] if zero else ():
            grad[...] = 0

    def _sum_of_squares(self, position: int) -> float:
        """Return the sum of the squares of a parameter's gradient."""
        variable = self.params[position]
        if variable.placement is not None:
            return float(variable.placement.sum_of_squares(variable))
        assert variable.grad is not None
        return sum_of_squares(variable.grad)

    def _check_placements(self) -> None:
        for position, variable in enumerate(self.params):
            if _shards_of(variable) is not self._made_for[position]:
                raise RuntimeError(
                    f"{type(self).__name__}.step: parameter {position} (shape {variable.shape}) "
                    "was sharded after the optimizer was made, or sharded anew, and its state is "
                    "of how it lay before; make the optimizer afterwards"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold. Collective where ``state_dict`` is."""
        in_common = list(map(is_in_common, self.params))
        made_for = zip(self._made_for, in_common, strict=True)
        own = tuple(
            [
                self._whole(position, entry) if in_common[position] else entry
                for position, entry in enumerate(entries)
            ]
            for entries in self._states
        )
        made = [None if common else shards for shards, common in made_for]
        return {**super().__getstate__(), "_states": own, "_made_for": made}

    def _state(self) -> dict[str, list[Any]]:
        return dict(zip(self._names, self._states, strict=True))


def _shards_of(variable: Variable) -> Shards | None:
    return None if variable.placement is None else variable.placement.shards


def _zeros(variable: Variable) -> Array:
    """Return state for a parameter: zeros, of float32 where it is narrower."""
    dtype = "float32" if variable.dtype.char == "e" else variable.dtype
    if variable.placement is not None:
        return variable.placement.zeros(dtype)  # type: ignore[no-any-return]
    data = variable.data
    return array_module(data).zeros(data.shape, dtype)  # type: ignore[no-any-return]
