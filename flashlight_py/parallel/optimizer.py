"""Optimizer that reduces gradients over the ranks before each step."""

from collections.abc import Mapping, Sequence
from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.distributed import ProcessGroup, internal
from flashlight_py.distributed.internal import ReduceOp, group_or_world
from flashlight_py.optim import FirstOrderOptimizer
from flashlight_py.parallel import agreement
from flashlight_py.parallel.gradient_pass import is_synchronised, reduce_used


class DistributedOptimizer:
    """An optimizer that reduces gradients over the ranks, then lets ``optimizer`` step.

    Gradients are sent in buckets of 20 MiB after the backward pass;
    :func:`flashlight_py.distribute_module_grads` sends them during the pass instead. Other
    attributes are read from the inner optimizer. The constructor is not collective.

    Args:
        optimizer: Optimizer of ``fl.optim`` or a subclass of ``fl.optim.FirstOrderOptimizer``, the
            same on every rank, with parameters of any shapes.
        average: Whether gradients are averaged over the ranks instead of summed.
        group: Process group. Default: the world.

    Raises:
        TypeError: If ``optimizer`` has another type, or is already a DistributedOptimizer.
        ValueError: If a parameter is sharded, or ``distribute_module_grads`` reduces its gradient.

    Example:
        >>> weight = fl.param(np.ones(3))
        >>> optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer([weight], lr=0.5))
        >>> (weight * weight).backward(np.ones(3))
        >>> optimizer.step()
        >>> weight.array.tolist()
        [0.0, 0.0, 0.0]
    """

    def __init__(
        self, optimizer: FirstOrderOptimizer, average: bool = True, *,
        group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(optimizer, FirstOrderOptimizer):
            raise TypeError(
                "DistributedOptimizer: expected an optimizer of flashlight_py.optim, got "
                f"{type(optimizer).__name__}"
            )
        agreement.reject_sharded("DistributedOptimizer", optimizer.params)
        self._optimizer = optimizer
        self._average = bool(average)
        self._group = group
        self._agreed = False
        self._check_not_reduced_twice()

    @property
    def optimizer(self) -> FirstOrderOptimizer:
        """The optimizer that was passed, without the reduction."""
        return self._optimizer

    @property
    def params(self) -> list[Variable]:
        """The parameters of the inner optimizer."""
        return self._optimizer.params

    @property
    def lr(self) -> float:
        """The learning rate, a number of at least 0. Other values raise TypeError or ValueError."""
        return self._optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer.lr = value

    def zero_grad(self) -> None:
        """Set the gradient of every parameter to None."""
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer. Its arrays are not copies."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy ``state`` into the inner optimizer, or raise ValueError if it does not match."""
        self._optimizer.load_state_dict(state)

    @internal.in_step()
    def step(self) -> None:
        """Reduce the gradients over the ranks, in place, and update the parameters.

        Collective, blocking. A gradient that is None only on some ranks counts as zeros there. A
        parameter whose gradient is None on every rank is skipped. In the first step, rank 0 warns
        if the ranks have different parameter values.

        Raises:
            ValueError: If ``distribute_module_grads`` already reduces the gradient of a parameter.
            MismatchError: If shapes or dtypes of parameters differ between ranks (first step only).
            DistributedError: As :func:`flashlight_py.all_reduce`.
        """
        self._check_not_reduced_twice()
        members = group_or_world(self._group)
        if not self._agreed:
            arrays = [param.data for param in self.params]
            agreement.check_arrays_agree("DistributedOptimizer: parameters", arrays, members)
            digest = agreement.digest_of_values(self.params) if members.size > 1 else 0
            digests = agreement.gather_json(digest, members)
            self._agreed = True
            agreement.warn_if_parameters_differ("DistributedOptimizer", digests, members)
        reduce_used(self.params, self._scale(), self._group)
        self._optimizer.step()

    @internal.in_step()
    def reduce(self, updates: Sequence[Any]) -> list[Any]:
        """Reduce ``updates`` over the ranks, in place, as ``step`` reduces gradients; return them.

        For optimization rules that apply arrays other than gradients. Collective, blocking.

        Args:
            updates: Floating or complex arrays (integers too, unless ``average``) of any shapes.
                Number, shapes and dtypes must be the same on every rank.

        Raises:
            ValueError: If the same array is passed twice, or as :func:`flashlight_py.all_reduce`.
            TypeError: As :func:`flashlight_py.all_reduce`.
            MismatchError: If the ranks' updates differ. The message has the first difference.
            DistributedError: As :func:`flashlight_py.all_reduce`.
        """
        updates = list(updates)
        verb, op = "DistributedOptimizer.reduce", ReduceOp.AVG if self._average else ReduceOp.SUM
        arrays = [internal.call_arrays.as_array(verb, update) for update in updates]
        for array in arrays:
            internal.call_arrays.check_op_and_scale(verb, array.dtype, op, 1.0)
        if len({id(array) for array in arrays}) < len(arrays):
            raise ValueError(f"{verb}: expected distinct arrays, got the same array twice")
        agreement.check_arrays_agree(f"{verb}: updates", arrays, group_or_world(self._group))
        internal.reduce_all(arrays, self._scale(), self._group)
        return updates

    def _scale(self) -> float:
        return 1.0 / group_or_world(self._group).size if self._average else 1.0

    def _check_not_reduced_twice(self) -> None:
        for number, param in enumerate(self.params):
            if is_synchronised(param):
                raise ValueError(
                    "DistributedOptimizer: expected parameters without gradient reduction, got "
                    f"parameter {number} (shape {param.shape}) of a module under "
                    "distribute_module_grads. Use only one of both"
                )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({type(self._optimizer).__name__}, average={self._average})"
