"""Sharding by gathering (ZeRO-3): each rank keeps a part of everything, and gathers what it uses.

For ranks that cannot read each other's memory, such as GPUs. When a module reads its parameters
they are gathered, and in the meantime those that were read next in the last pass; what was read
before is let go of. A backward pass reads them again. The gradients of a module are reduced as soon
as they are complete, and each rank keeps its part of them.

Nothing is wrapped: reading a parameter is what gathers it, so any module will do. What is saved by
it depends on operations that read their operands again in the backward pass instead of keeping
them: ``linear``, ``linear_relu`` and ``matmul`` do. After others, such as a product with a vector,
the module's parameters stay until the backward pass has used them; the numbers are the same.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from flashlight_py.autograd import Variable, on_backward_end
from flashlight_py.autograd.engine import InPasses, after_node, in_backward
from flashlight_py.device import Array, device_of
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.groups.world import group_or_world
from flashlight_py.distributed.reducers.reducer import InlineReducer
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer
from flashlight_py.optim.optimizer import RuleOptimizer, Shards
from flashlight_py.parallel.agreement import check_modules_agree
from flashlight_py.parallel.data_parallel import release
from flashlight_py.parallel.failing import end_together, fail
from flashlight_py.parallel.gradient_sync import PassSync, used_on_any_rank
from flashlight_py.parallel.synchronize import give_state
from flashlight_py.parallel.zero_flat import (
    GRAIN,
    Flat,
    PartedVariable,
    PartPlacement,
    Reduction,
)


def shard_by_gathering(
    module: Module, group: ProcessGroup | None = None, step_in_backward: bool = False
) -> GatheredShards:
    """Shard the module's parameters, gradients and optimizers' state over the ranks, in place.

    Collective, blocking. Every rank begins with the parameters and buffers of the group's rank 0,
    and keeps a part of each module's that is a multiple of 16 elements. Afterwards ``backward()``
    leaves the mean of the ranks' gradients; ``Variable.grad`` is this rank's part of it, of one
    dimension. Several passes without ``zero_grad`` add up, each reduced by itself, within
    ``no_sync`` as well: a rank has no place for gradients of its own.

    All ranks must run the same modules in the same order, forward and backward. To read
    ``Variable.array``, and ``state_dict()``, gather and are collective; ``load_state_dict`` is not.

    Args:
        module: the same on every rank but for its values; floating parameters are sharded.
        group: the ranks that share the model, default the world.
        step_in_backward: step the parameters of a module when their gradients are reduced, by the
            optimizers that are made for them afterwards; gradients are None after the pass then.

    Returns:
        What the parameters have in common.

    Raises:
        ValueError: a parameter is sharded, or has a gradient hook or buffer.
        MismatchError: ranks' modules differ; names the first parameter that does.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    members = group_or_world(group)
    params = module.named_params()
    _refuse_sharded(params)
    check_modules_agree(params, members)
    release(module)
    _refuse_used(params)
    shards = GatheredShards(members, step_in_backward)
    rows: set[int] = set()
    for together in _grouped(module):
        row = _row(sum(param.size for param in together), members.size, rows)
        shards.take(Flat(together, members, row))
    if module.buffers:
        give_state(module, module.buffers, 0, members)
    return shards


def _refuse_sharded(params: dict[str, Variable]) -> None:
    for name, param in params.items():
        if param.placement is not None:
            raise ValueError(f"fully_shard: {name!r} is sharded already; call it once")


def _refuse_used(params: dict[str, Variable]) -> None:
    for name, param in params.items():
        if param.hook is not None or param.buffer is not None:
            raise ValueError(
                f"fully_shard: {name!r} has a gradient hook or buffer, and sharding needs its own; "
                "clear it before"
            )


def _grouped(module: Module) -> Iterator[list[Variable]]:
    """Yield the floating parameters that a module has itself, by dtype and device; each once."""
    met: set[Variable] = set()
    for _, each in module._walk():
        kinds: dict[tuple[str, str], list[Variable]] = {}
        for _, param in each._own_params():
            if param not in met and param.dtype.kind == "f":
                met.add(param)
                kinds.setdefault((param.dtype.name, device_of(param.data)), []).append(param)
        yield from kinds.values()


def _row(elements: int, ranks: int, taken: set[int]) -> int:
    """Return how many elements each rank keeps: enough, and no number that is ``taken``."""
    least = max(1, -(-elements // (ranks * GRAIN))) * GRAIN
    row = next(row for row in itertools.count(least, GRAIN) if row not in taken)
    taken.add(row)
    return row


class GatherSync(PassSync):
    """The sync for ``no_sync``, which changes nothing, and for ``join``, which is refused."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(InlineReducer(1.0, group=group))

    def __setattr__(self, name: str, value: object) -> None:
        if name == "weigh" and value is not None:
            _refuse_join()
        super().__setattr__(name, value)

    def weight(self, samples: int, all_samples: int, training: int, ranks: int) -> float:
        """Refuse."""
        _refuse_join()

    def give_zeros(self) -> None:
        """Refuse."""
        _refuse_join()


def _refuse_join() -> NoReturn:
    raise ValueError(
        "join: the module's parameters are gathered from all ranks in every pass, in which a rank "
        "without data has no part; give every rank the same number of batches"
    )


class GatheredShards(Shards, InPasses):
    """When flats are gathered and let go of, and when their gradients are reduced.

    At most two flats are gathered at a time: the one that was read last, and the one that was read
    after it the last time. Forward and backward passes are remembered apart.
    """

    group: ProcessGroup

    def __init__(self, group: ProcessGroup, step_in_backward: bool) -> None:
        self.group = self.members = group
        self.sync = GatherSync(group)
        self._steps = step_in_backward
        self._flats: list[Flat] = []
        self._optimizers: dict[Variable, tuple[RuleOptimizer, int]] = {}
        self._here: set[Flat] = set()  # gathered, or on their way
        self._read: Flat | None = None  # last
        self._was_backward = False
        self._next: dict[tuple[bool, Flat], Flat] = {}
        self._in_pass = False
        self._reductions: list[Reduction] = []  # of this pass
        self._unsettled: list[Reduction] = []  # of those
        self._stepped: set[Flat] = set()  # in this pass

    def take(self, flat: Flat) -> None:
        """Have the parameters of ``flat`` sharded from now on."""
        self._flats.append(flat)
        for position, param in enumerate(flat.params):
            param.data = flat.part[:0]  # nothing is to keep the memory of the whole
            param.grad = None
            param.placement = PartPlacement(self, flat, position)
            param.__class__ = PartedVariable
            param.register_grad_hook(functools.partial(self._on_ready, flat))

    def attach(self, optimizer: FirstOrderOptimizer) -> None:
        """Let ``optimizer`` step its parameters inside the backward pass, if that is asked for.

        Raises:
            ValueError: it is asked for, and the optimizer cannot step one parameter by itself.
        """
        if not self._steps:
            return
        if not isinstance(optimizer, RuleOptimizer):
            raise ValueError(
                f"fully_shard(step_in_backward=True): {type(optimizer).__name__} cannot step one "
                "parameter by itself; use an optimizer of fl.optim, or step after the pass"
            )
        for position, param in enumerate(optimizer.params):
            self._optimizers[param] = optimizer, position

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Let go of what is gathered, as it will be old; the parts are this process's own."""
        self._release()
        self._read = None
        yield

    def arrays_of(self, flat: Flat) -> list[Array]:
        """Return the whole parameters of ``flat``. Collective, unless it was read last."""
        backward = in_backward()
        if flat is not self._read or backward is not self._was_backward or flat.arrays is None:
            self._turn_to(flat, backward)
        return flat.finish()

    def _turn_to(self, flat: Flat, backward: bool) -> None:
        if flat in self._stepped:
            raise RuntimeError(
                "fully_shard(step_in_backward=True): parameters are read again after they were "
                "stepped in this backward pass; step after the pass instead"
            )
        if backward:
            self._join_pass()
        if self._read is not None and backward is not self._was_backward:
            self._next.pop((self._was_backward, self._read), None)
        elif self._read is not None and self._read is not flat:
            self._next[backward, self._read] = flat
        self._read, self._was_backward = flat, backward
        expected = self._next.get((backward, flat))
        self._release(flat, expected)
        for each in (flat, expected):
            if each is not None and each not in self._stepped:
                self._here.add(each)
                each.start()

    def _release(self, *but: Flat | None, wait: bool = True) -> None:
        for flat in self._here.difference(but):
            self._here.discard(flat)
            flat.release(wait)

    def homes_of(self, flat: Flat) -> list[Array] | None:
        """Return where this pass's gradients of ``flat`` belong; None: there is no pass."""
        if not in_backward():
            return None
        if flat.homes is None:
            self._join_pass()
            flat.open()
        return flat.homes

    def _join_pass(self) -> None:
        if self._steps and not self.sync.enabled:
            raise RuntimeError(
                "fully_shard(step_in_backward=True): a pass within no_sync would be stepped by "
                "itself; step after the pass to add several up"
            )
        self.join_failed()

    def join_failed(self) -> None:
        """Have the end of the pass be seen; see ``InPasses``."""
        if not self._in_pass:
            on_backward_end(self._on_end)
            self._in_pass = True

    def _on_ready(self, flat: Flat, _: Variable) -> None:
        """Autograd: the gradient of one of the flat's parameters is complete."""
        flat.pending -= 1
        if not flat.pending:
            self._close(flat)

    def _close(self, flat: Flat) -> None:
        """Begin to reduce; by now the one before has had the time to end, and its memory goes."""
        reduction = flat.close()
        self._reductions.append(reduction)
        self._unsettled.append(reduction)
        # What reads the parameters for the last time may be in the middle of it.
        after_node(functools.partial(self._settle, but=1))

    def _settle(self, but: int = 0) -> None:
        """Wait for all reductions but the last ones; take the steps that are part of the pass."""
        while len(self._unsettled) > but:
            reduction = self._unsettled.pop(0)
            reduction.wait()
            if self._steps:
                self._step(reduction)

    def _step(self, reduction: Reduction) -> None:
        """Step the parameters whose gradients have arrived; nothing reads them in this pass."""
        flat = reduction.flat
        flat.release()
        reduction.add(reduction.used)
        self._stepped.add(flat)
        for param in flat.params:
            optimizer, position = self._optimizers.get(param, (None, 0))
            if param.grad is not None and optimizer is not None:
                pieces = param.placement.pieces(param, optimizer.states_of(position))
                optimizer.step_pieces(position, pieces)
                param.grad = None

    def _on_end(self, completed: bool) -> None:
        """Autograd: the pass is over. Reduce what is left, and wait; nothing stays gathered."""
        try:
            if completed:
                for flat in self._flats:
                    if flat.homes is not None:
                        self._close(flat)
                self._settle()
                if not self._steps:
                    self._add_up()
            elif not self._steps or len(self._reductions) < len(self._flats):  # more is to be sent
                given = [flat.part for flat in self._flats]
                if fail(self.members, sys.exc_info()[1], given):
                    end_together(self.members)
        finally:
            for flat in self._flats:
                if flat.homes is not None:
                    flat.forget_gradients()
            self._reductions, self._unsettled = [], []
            self._stepped = set()
            self._read = None
            self._in_pass = False
            self._release(wait=completed)

    def _add_up(self) -> None:
        """Keep the gradients of parameters that any rank has used. Collective, blocking."""
        of_flat = {flat: [False] * len(flat.params) for flat in self._flats}
        for reduction in self._reductions:
            known = of_flat[reduction.flat]
            of_flat[reduction.flat] = [a or b for a, b in zip(known, reduction.used, strict=True)]
        used = iter(used_on_any_rank(itertools.chain(*of_flat.values()), self.group))
        anywhere = {flat: list(itertools.islice(used, len(flat.params))) for flat in self._flats}
        for reduction in self._reductions:
            reduction.add(anywhere[reduction.flat])
