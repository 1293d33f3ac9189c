"""The same parameters and buffers on every rank: taken from one rank, or averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.distributed.groups.world import group_or_world
from flashlight_py.distributed.reducers.reducer import reduce_all
from flashlight_py.nn import Module
from flashlight_py.parallel.agreement import (
    check_modules_agree,
    check_settings_agree,
    refuse_sharded,
)
from flashlight_py.parallel.synchronize import synchronize, synchronize_for
from flashlight_py.parallel.tree import put_buffer


def broadcast_parameters(module: Module, root: int = 0, group: ProcessGroup | None = None) -> None:
    """Set every rank's parameters and buffers to those of rank ``root``, in place.

    Collective, blocking; one packed transfer. The start of data-parallel training, as PyTorch's
    DistributedDataParallel makes it: the model is what it was on ``root``, whatever the others have
    drawn. :func:`flashlight_py.all_reduce_parameters` takes the mean instead, as flashlight does;
    the mean of n differently drawn weights is smaller than each by the square root of n. Call it
    after ``distributed_init``: before, there is one rank, and nothing to do.

    Args:
        module: the same on every rank but for its values.
        root: rank in the group.
        group: the process group, default the world.

    Raises:
        TypeError: ``module`` is no Module.
        ValueError: ``root`` is no rank of the group, an array is read-only, or a parameter is
            sharded.
        MismatchError: ranks' modules differ; names the first parameter or buffer that does.
        DistributedError: as :func:`flashlight_py.all_reduce`; nothing was changed.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> fl.broadcast_parameters(model)  # one process: everything stays
        >>> fl.distribute_module_grads(model)
    """
    require_module(module)
    synchronize_for("broadcast_parameters", "module", module, root, group)


def all_reduce_parameters(module: Module, group: ProcessGroup | None = None) -> None:
    """Average every parameter over the ranks, in place, as flashlight does.

    Collective, blocking. Afterwards the parameters are the same on every rank. To start training
    from weights that each rank has drawn by itself use :func:`flashlight_py.broadcast_parameters`:
    independent draws cancel each other out, so the mean over n ranks is smaller than they are, by
    the square root of n, and no longer what the initialisation meant. Where all have the same seed
    both do the same. Buffers stay as they are.

    Args:
        module: the same on every rank but for its values.
        group: the process group, default the world.

    Raises:
        TypeError: ``module`` is no Module.
        ValueError: a parameter is sharded.
        MismatchError: ranks' modules differ; names the first parameter that does.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    require_module(module)
    refuse_sharded("all_reduce_parameters", module.params(), may_be_cut=True)
    members = group_or_world(group)
    params = module.named_params()
    check_modules_agree(params, members)
    reduce_all([param.data for param in params.values()], 1.0 / members.size, group)


class PeriodicAveraging:
    """Lets ranks train by themselves and averages their parameters every ``every`` steps.

    Also known as local SGD: instead of gradients in every step, parameters travel now and then,
    which pays where ranks are joined by a slow network. Use it without
    ``distribute_module_grads``, and call ``step()`` after the optimizer's, on every rank equally
    often. The optimizer's state stays each rank's own. Making it is collective, as is ``step``
    when it averages.

    Args:
        module: the same on every rank; start from the same values
            (:func:`flashlight_py.broadcast_parameters`).
        every: after how many steps, at least 1.
        group: the process group, default the world.

    Raises:
        TypeError: ``module`` is no Module, or ``every`` is no integer.
        ValueError: ``every`` is below 1, or the module is sharded.
        MismatchError: ranks' modules or ``every`` differ; names what does.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> averaging = fl.PeriodicAveraging(model, every=2)
        >>> [averaging.step() for _ in range(5)]
        [False, True, False, True, False]
    """

    def __init__(self, module: Module, every: int, group: ProcessGroup | None = None) -> None:
        require_module(module)
        refuse_sharded("PeriodicAveraging", module.params(), may_be_cut=True)
        self._every = whole_number("PeriodicAveraging", "every", every, least=1)
        self._module = module
        self._group = group
        self._steps = 0
        check_modules_agree(module.named_params(), group_or_world(group))
        check_settings_agree("PeriodicAveraging", {"every": self._every}, group_or_world(group))

    def step(self) -> bool:
        """Count a step; after every ``every``-th one average the parameters, in place.

        Returns:
            Whether they were averaged: then it was collective, and blocked.

        Raises:
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        self._steps += 1
        if self._steps % self._every:
            return False
        arrays = [param.data for param in self._module.params()]
        reduce_all(arrays, 1.0 / group_or_world(self._group).size, self._group)
        return True

    def state_dict(self) -> dict[str, int]:
        """Return how many steps were counted; the same on every rank. Not collective."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting where ``state`` was taken. Not collective.

        Raises:
            KeyError: ``state`` has no entry ``"steps"``.
            TypeError: it is no integer.
            ValueError: it is negative.
        """
        self._steps = whole_number("PeriodicAveraging", "steps", state["steps"])


def give_state(
    module: Module, state: Mapping[str, Any], root: int, group: ProcessGroup | None
) -> None:
    """Make ``state``, entries of ``module.state_dict()``, that of ``root``. Collective, blocking.

    Raises:
        MismatchError, DistributedError: as :func:`flashlight_py.synchronize`.
    """
    for name, value in synchronize(dict(state), root, group).items():
        if value is not state[name]:  # a number, which cannot be changed in place
            put_buffer(module, name, value)


def require_module(module: object) -> None:
    """Refuse what is no module.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(module, Module):
        raise TypeError(f"expected a flashlight_py.nn.Module, got {type(module).__name__}")
