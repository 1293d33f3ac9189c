"""An optimizer that reduces gradients over the ranks before it steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import (
    ReduceOp,
    as_array,
    check_op_and_scale,
    group_or_world,
    in_step,
    reduce_all,
)
from flashlight_py.optim import FirstOrderOptimizer
from flashlight_py.parallel import agreement
from flashlight_py.parallel.gradient_pass import is_synchronised, reduce_used


class DistributedOptimizer:
    """Reduces the gradients of its parameters over the ranks, then lets ``optimizer`` step.

    Gradients travel in buckets of 20 MiB, after the backward pass;
    :func:`flashlight_py.distribute_module_grads` overlaps the two. Everything else is the inner
    optimizer's. Not collective to make.

    Args:
        optimizer: any of ``fl.optim``, or a subclass of ``fl.optim.FirstOrderOptimizer`` with
            parameters of any shapes; the same on every rank.
        average: whether the mean or the sum over the ranks is taken.
        group: the process group, default the world.

    Raises:
        TypeError: ``optimizer`` is none, or distributed already.
        ValueError: a parameter's gradient is reduced by ``distribute_module_grads`` already, or a
            parameter is sharded.

    Example:
        >>> weight = fl.param(np.ones(3))
        >>> optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer([weight], lr=0.5))
        >>> (weight * weight).backward(np.ones(3))
        >>> optimizer.step()
        >>> weight.array.tolist()
        [0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        optimizer: FirstOrderOptimizer,
        average: bool = True,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(optimizer, FirstOrderOptimizer):
            raise TypeError(
                "DistributedOptimizer takes an optimizer of flashlight_py.optim, got "
                f"{type(optimizer).__name__}"
            )
        agreement.refuse_sharded("DistributedOptimizer", optimizer.params)
        self._optimizer = optimizer
        self._average = bool(average)
        self._group = group
        self._agreed = False
        self._refuse_reduced_twice()

    @property
    def optimizer(self) -> FirstOrderOptimizer:
        """The inner optimizer."""
        return self._optimizer

    @property
    def params(self) -> list[Variable]:
        """The inner optimizer's parameters."""
        return self._optimizer.params

    @property
    def lr(self) -> float:
        """The inner optimizer's learning rate; assignable at any time, at least 0.

        Raises:
            TypeError: not a number.
            ValueError: negative.
        """
        return self._optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer.lr = value

    def zero_grad(self) -> None:
        """Drop the gradient of every parameter."""
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; its arrays are the optimizer's own, not copies."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy ``state`` into the inner optimizer, in place.

        Raises:
            ValueError: it does not fit; nothing was changed.
        """
        self._optimizer.load_state_dict(state)

    @in_step()
    def step(self) -> None:
        """Reduce the gradients over the ranks, in place, and change the parameters by them.

        Collective, blocking. A gradient that is None on this rank and not on another counts as
        zeros; one that is None on every rank stays so, and its parameter is skipped. The first step
        warns, on rank 0, where ranks have started from different parameters.

        Raises:
            ValueError: a parameter's gradient is reduced by ``distribute_module_grads`` already.
            MismatchError: the ranks' parameters differ (compared in the first step).
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        self._refuse_reduced_twice()
        members = group_or_world(self._group)
        if not self._agreed:
            arrays = [param.data for param in self.params]
            agreement.check_arrays_agree("DistributedOptimizer: parameters", arrays, members)
            digest = agreement.digest_of_values(self.params) if members.size > 1 else 0
            digests = agreement.of_all_ranks(digest, members)
            self._agreed = True
            agreement.warn_of_differing("DistributedOptimizer", digests, members)
        reduce_used(self.params, self._scale(), self._group)
        self._optimizer.step()

    @in_step()
    def reduce(self, updates: Sequence[Any]) -> list[Any]:
        """Reduce ``updates`` over the ranks, in place, as ``step`` reduces gradients; return them.

        For rules that change parameters by other arrays than gradients. Collective, blocking.

        Args:
            updates: arrays of any shapes and floating or complex dtypes (integers too, unless
                ``average``); as many on every rank, of the same shapes and dtypes.

        Raises:
            ValueError: the same array is given twice, or as :func:`flashlight_py.all_reduce`.
            TypeError: as :func:`flashlight_py.all_reduce`.
            MismatchError: the ranks' updates differ; names the first one that does.
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        updates = list(updates)
        what, op = "DistributedOptimizer.reduce", ReduceOp.AVG if self._average else ReduceOp.SUM
        arrays = [as_array(what, update) for update in updates]
        for array in arrays:
            check_op_and_scale(what, array.dtype, op, 1.0)
        if len({id(array) for array in arrays}) < len(arrays):
            raise ValueError(f"{what}: the same array was given twice")
        agreement.check_arrays_agree(f"{what}: updates", arrays, group_or_world(self._group))
        reduce_all(arrays, self._scale(), self._group)
        return updates

    def _scale(self) -> float:
        return 1.0 / group_or_world(self._group).size if self._average else 1.0

    def _refuse_reduced_twice(self) -> None:
        for number, param in enumerate(self.params):
            if is_synchronised(param):
                raise ValueError(
                    f"DistributedOptimizer: parameter {number} (shape {param.shape}) is of a "
                    "module under distribute_module_grads, so its gradient is reduced already "
                    "when backward() returns; use one of both"
                )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({type(self._optimizer).__name__}, average={self._average})"
