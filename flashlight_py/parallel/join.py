"""Training on unequal numbers of batches: a rank that has run out takes part with zeros.

In every synchronised backward pass the ranks first add up two numbers: how many samples they have
in this pass, and how many of them still train. A rank whose loop has ended answers with two zeros;
as long as somebody trains, it contributes zeros to the reductions of that pass too. So nobody
waits for a rank without data, and it knows, without any further message, when all have ended.
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
from flashlight_py.parallel.gradient_pass import GradientPass, gradient_sync_of, ranks_of
from flashlight_py.parallel.synchronize import give_state, synchronize
from flashlight_py.structure import changed


class Trained(Protocol):
    """A network, not of modules, that ranks train together: a ``fl.tagi.DDPSequential``."""

    sync: GradientPass[Any]

    def synchronize(self, root: int = 0) -> object:
        """Give all ranks what ``root`` has. Collective, blocking."""


# Owners of a ``GradientPass`` can join: modules by their gradients, TAGI networks by their sums.
class Joined:
    """The object that :func:`flashlight_py.join` yields to the body of its ``with``."""

    def __init__(self, sync: GradientPass[Any], group: ProcessGroup) -> None:
        self._sync = sync
        self._group = group
        self._count = 1
        self._counting = False  # whether count() was called since the last synchronised pass
        self._weight = 1.0
        self._lasts = True  # whether every pass was this rank's own as well

    def count(self, samples: SupportsIndex) -> None:
        """Set how many samples the gradients of the next backward pass are of.

        They weigh so much in the average. It holds until the next call; without any, every pass
        counts 1. Between two synchronised passes (in ``no_sync``) the numbers add up. Sends
        nothing.

        Args:
            samples: a whole number, at least 0; with 0 this rank's gradients are left out.

        Raises:
            TypeError: ``samples`` is no whole number.
            ValueError: it is negative.
        """
        number = check_integer("join: count", "samples", samples)
        self._count = self._count + number if self._counting else number
        self._counting = True

    def _weigh(self, first: bool) -> float:
        """Return what gradients of this rank's own pass count before they are added up."""
        if first:
            total, training = self._add_up(self._count, 1)
            self._weight = self._sync.weight(self._count, total, training, self._group.size)
            self._counting = False
        return self._weight

    def _add_up(self, samples: int, training: int) -> tuple[int, int]:
        """Return the sums over all ranks; of a kind and shape that no gradient has."""
        message = np.array([[samples, training]], np.int64)
        ((all_samples, trained),) = all_reduce(message, group=self._sync.reducer.group).tolist()
        return all_samples, trained

    def _take_part_until_all_have_ended(self) -> None:
        rank, size = self._group.rank, self._group.size
        try:
            while self._add_up(0, 0)[1]:
                self._lasts = False
                self._sync.give_zeros()
        except MismatchError as error:
            self._sync.fail()
            self._sync.end_failed()
            raise MismatchError(
                f"join: rank {rank} of {size} has run out of data and takes part in the backward "
                "passes of one module alone; another rank called something else. Keep other "
                f"collectives out of the body of join, and use join on every rank ({error})"
            ) from error


_open: list[Joined] = []


@contextlib.contextmanager
def join(
    module: Module | Trained, optimizer: FirstOrderOptimizer | None = None
) -> Iterator[Joined]:
    """Within the context, ranks may run different numbers of backward passes, also none at all.

    ``with fl.join(module) as joined:`` encloses the loop over a rank's batches. A rank whose loop
    has ended waits at the end of the ``with`` and adds zeros to the reductions of the other ranks
    until all loops have ended. Every gradient is the average weighted by the counts passed to
    :meth:`Joined.count`: the sum of count * gradient over the ranks, divided by the sum of the
    counts. At the end all parameters and buffers (and the optimizer's state) become those of the
    lowest rank that trained to the last, but for what ``distribute_module_grads`` ignores.

    Of a module under :func:`flashlight_py.fully_shard` all ranks step together: a rank whose loop
    has ended steps the module's optimizers after every pass of the others. So there is one step
    after each pass, with a learning rate that stays, and no ``clip_grad_norm``.

    If ``distribute_module_grads`` was given a scale or a reducer, gradients are summed over the
    ranks that still have data and scaled by it, and counts play no part.

    Every rank must use it, and in its body start no collectives but those of the module's own
    backward passes. Each synchronised pass takes one more blocking ``all_reduce``, of 16 bytes.
    Gradients that were accumulated in ``no_sync`` when a loop ends are not used. The end of the
    ``with`` is collective and blocks. If the body raises, this rank leaves at once, and the others
    raise ``PeerLostError`` when it exits, or ``CollectiveTimeoutError``.

    Args:
        module: passed to ``distribute_module_grads`` before; or a ``fl.tagi.DDPSequential``, whose
            sums count as they are, and whose averages are over the ranks that still have data.
        optimizer: one whose state shall be the same on every rank afterwards.

    Raises:
        TypeError: ``optimizer`` is none of ``fl.optim``, or ``module`` is neither.
        ValueError: neither ``distribute_module_grads`` nor ``fully_shard`` was called for it, or
            it was called with ``leaves``, or another join is open on this rank.
        MismatchError: a rank called other collectives in the body, or did not use ``join``.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    sync, group = getattr(module, "sync", None), ranks_of({"module": module})
    with group.in_step("join"):
        if isinstance(module, Module):
            sync = gradient_sync_of(module, "join")
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
                "join: another join is open on this rank, and one without data could not know "
                "whose backward pass comes next. Join one module that has these modules as parts"
            )
    joined = Joined(sync, group)
    _open.append(joined)
    sync.weigh = joined._weigh
    changed()
    try:
        yield joined
        joined._take_part_until_all_have_ended()
    finally:
        sync.weigh = None
        changed()
        _open.remove(joined)
    # The lowest rank that trained to the last; 0 where nobody had any batch.
    own = group.rank if joined._lasts else group.size
    root = int(group.all_reduce(np.array(own), op="min"))
    if isinstance(module, Module):
        entries = {name: x for name, x in module.state_dict().items() if name not in sync.ignored}
        give_state(module, entries, root, group)
    else:
        module.synchronize(root)
    if optimizer is not None and not sync.is_shared:
        synchronize(optimizer, root, group=group)
