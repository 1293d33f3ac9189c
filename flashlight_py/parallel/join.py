"""Training with different numbers of batches per rank: a rank without data joins with zeros.

In every synchronised backward pass, the ranks first add up two numbers: their number of samples in
this pass, and 1 if they still train. A rank whose loop has ended sends two zeros. While any rank
trains, a rank without data also adds zeros to the reductions of the pass. So no rank waits for a
rank without data, and each rank knows without further messages when all loops have ended.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, SupportsIndex

import numpy as np

from flashlight_py.distributed import ProcessGroup, all_reduce
from flashlight_py.distributed.internal import check_integer
from flashlight_py.errors import MismatchError
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer
from flashlight_py.parallel.gradient_pass import GradientPass, ranks_of, require_gradient_pass
from flashlight_py.parallel.synchronize import give_state, synchronize
from flashlight_py.structure import changed


class Trained(Protocol):
    """A network that ranks train together but that is not a Module: ``fl.tagi.DDPSequential``."""

    sync: GradientPass[Any]

    def synchronize(self, root: int = 0) -> object:
        """Copy the values of rank ``root`` to all ranks. Collective, blocking."""


class Joined:
    """The object that ``with fl.join(module) as joined`` returns."""

    def __init__(self, sync: GradientPass[Any], group: ProcessGroup) -> None:
        self._sync = sync
        self._group = group
        self._count = 1
        self._counting = False  # whether count() was called since the last synchronised pass
        self._weight = 1.0
        self._had_data_in_every_pass = True

    def count(self, samples: SupportsIndex) -> None:
        """Set the weight of this rank's next synchronised pass: its number of samples.

        If a rank calls this several times before a synchronised pass (see ``no_sync``), the numbers
        are added. Without a call, a pass has the weight of the previous pass (1 for the first
        pass). If the number is 0, this rank's gradients are ignored. Not collective. Raises
        TypeError if ``samples`` is not an integer, and ValueError if it is negative.
        """
        number = check_integer("join: count", "samples", samples)
        self._count = self._count + number if self._counting else number
        self._counting = True

    def _weigh(self, first: bool) -> float:
        """Return the factor for this rank's gradients. If ``first``, compute it collectively."""
        if first:
            total, training = self._add_up(self._count, 1)
            self._weight = self._sync.weight(self._count, total, training, self._group.size)
            self._counting = False
        return self._weight

    def _add_up(self, samples: int, training: int) -> tuple[int, int]:
        """Return the sums of ``samples`` and ``training`` over all ranks. Collective, blocking."""
        message = np.array([[samples, training]], np.int64)
        ((all_samples, trained),) = all_reduce(message, group=self._sync.reducer.group).tolist()
        return all_samples, trained

    def _send_zeros_until_all_have_ended(self) -> None:
        rank, size = self._group.rank, self._group.size
        try:
            while self._add_up(0, 0)[1]:
                self._had_data_in_every_pass = False
                self._sync.send_zeros()
        except MismatchError as error:
            self._sync.fail()
            self._sync.end_failed()
            raise MismatchError(
                f"join: rank {rank} of {size} has no more data and expected backward passes of "
                f"the joined module, got another call ({error}). Use join on every rank, and call "
                "no other collectives in its body"
            ) from error


_open: list[Joined] = []


@contextlib.contextmanager
def join(
    module: Module | Trained, optimizer: FirstOrderOptimizer | None = None
) -> Iterator[Joined]:
    """Within the context, ranks may run different numbers of backward passes, also zero.

    ``with fl.join(module) as joined:`` encloses the loop over a rank's batches. A rank whose loop
    has ended waits at the end of the ``with`` and adds zeros to the reductions of the other ranks
    until all loops have ended. Every gradient is the average weighted by the counts passed to
    :meth:`Joined.count`: the sum of count * gradient over the ranks, divided by the sum of the
    counts. At the end, all parameters and buffers (and the optimizer's state) take the values of
    the lowest rank that trained in every pass, except names that ``distribute_module_grads``
    ignores.

    With a module of :func:`flashlight_py.fully_shard`, all ranks step together. A rank whose loop
    has ended steps the module's optimizers after every pass of the other ranks. So call ``step()``
    exactly once after each pass, with a constant learning rate and no ``clip_grad_norm``.

    If ``distribute_module_grads`` was called with ``scale`` or ``reducer``, gradients are summed
    over the ranks that still have data and multiplied by the scale of the call or the reducer.
    Counts are ignored.

    Every rank must use ``join`` and, in its body, start no collectives except the backward passes
    of the module. Each synchronised pass needs one more blocking ``all_reduce``, of 16 bytes.
    Gradients accumulated in ``no_sync`` when a loop ends are not used. The end of the ``with`` is
    collective and blocks. If the body raises, this rank does not wait for the other ranks. The
    other ranks raise ``PeerLostError`` when this rank exits, or ``CollectiveTimeoutError``.

    Args:
        module: Module of ``distribute_module_grads`` or ``fully_shard``, or a
            ``fl.tagi.DDPSequential``. The sums of a DDPSequential are not weighted, and its
            averages are over the ranks with data.
        optimizer: Optimizer whose state is synchronised at the end.

    Raises:
        TypeError: If ``optimizer`` is not of ``fl.optim``, or ``module`` has another type.
        ValueError: If the module is not distributed, uses ``leaves``, or gathers parameters on
            GPUs, or another join is open on this rank.
        MismatchError: If a rank starts another collective in the body, or does not use ``join``.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    sync, group = getattr(module, "sync", None), ranks_of({"module": module})
    with group.in_step("join"):
        if isinstance(module, Module):
            sync = require_gradient_pass(module, "join")
        if not isinstance(sync, GradientPass):
            name = type(module).__name__
            raise TypeError(f"join: expected a fl.nn.Module or a fl.tagi.DDPSequential, got {name}")
        if sync.not_joined:
            raise ValueError(f"join: {sync.not_joined}")
        if optimizer is not None and not isinstance(optimizer, FirstOrderOptimizer):
            raise TypeError(
                f"join: expected an optimizer of fl.optim, got {type(optimizer).__name__}"
            )
        if _open:
            raise ValueError(
                "join: expected at most one open join per rank, got a second one. Join one module "
                "that contains both modules"
            )
    joined = Joined(sync, group)
    _open.append(joined)
    sync.weigh = joined._weigh
    changed()
    try:
        yield joined
        joined._send_zeros_until_all_have_ended()
    finally:
        sync.weigh = None
        changed()
        _open.remove(joined)
    # The root is the lowest rank that had data in every pass, or rank 0 if no rank had data.
    rank_if_trained = group.rank if joined._had_data_in_every_pass else group.size
    root = int(group.all_reduce(np.array(rank_if_trained), op="min"))
    if isinstance(module, Module):
        entries = {name: x for name, x in module.state_dict().items() if name not in sync.ignored}
        give_state(module, entries, root, group)
    else:
        module.synchronize(root)
    if optimizer is not None and not sync.is_shared:
        synchronize(optimizer, root, group=group)
