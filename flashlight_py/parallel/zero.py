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
from collections.abc import Iterator
from contextlib import contextmanager

from flashlight_py.autograd import Variable, on_backward_end
from flashlight_py.autograd.engine import in_backward
from flashlight_py.device import Array, device_of
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.world import group_or_world
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer
from flashlight_py.optim.placement import Shards
from flashlight_py.optim.rule import RuleOptimizer
from flashlight_py.parallel.agreement import check_modules_agree
from flashlight_py.parallel.gradient_sync import used_on_any_rank
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

    Collective, blocking. Every rank begins with the parameters of the group's rank 0, and keeps a
    part of each module's that is a multiple of 16 elements. Afterwards ``backward()`` leaves the
    mean of the ranks' gradients; ``Variable.grad`` is this rank's part of it, of one dimension.
    Several passes without ``zero_grad`` add up, each reduced by itself.

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
        ValueError: a parameter is sharded, or has a gradient hook: ``distribute_module_grads`` was
            called for it.
        MismatchError: ranks' modules differ; names the first parameter that does.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    members = group_or_world(group)
    params = module.named_params()
    _refuse_used(params)
    check_modules_agree(params, members)
    shards = GatheredShards(members, step_in_backward)
    rows: set[int] = set()
    for together in _grouped(module):
        row = _row(sum(param.size for param in together), members.size, rows)
        shards.take(Flat(together, members, row))
    return shards


def _refuse_used(params: dict[str, Variable]) -> None:
    for name, param in params.items():
        if param.placement is not None:
            raise ValueError(f"fully_shard: {name!r} is sharded already; call it once")
        if param.hook is not None or param.buffer is not None:
            raise ValueError(
                f"fully_shard: {name!r} has a gradient hook or buffer, as distribute_module_grads "
                "sets them; fully_shard reduces gradients itself, call it alone"
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


class GatheredShards(Shards):
    """When flats are gathered and let go of, and when their gradients are reduced.

    At most two flats are gathered at a time: the one that was read last, and the one that was read
    after it the last time. Forward and backward passes are remembered apart.
    """

    group: ProcessGroup

    def __init__(self, group: ProcessGroup, step_in_backward: bool) -> None:
        self.group = group
        self._steps = step_in_backward
        self._flats: list[Flat] = []
        self._optimizers: dict[Variable, tuple[RuleOptimizer, int]] = {}
        self._read: Flat | None = None  # last
        self._was_backward = False
        self._next: dict[tuple[bool, Flat], Flat] = {}
        self._in_pass = False
        self._reductions: list[Reduction] = []  # of this pass
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
        self._release(None, None)
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
        flat.start()
        if expected is not None and expected not in self._stepped:
            expected.start()

    def _release(self, *but: Flat | None) -> None:
        for flat in self._flats:
            if flat not in but:
                flat.release()

    def homes_of(self, flat: Flat) -> list[Array] | None:
        """Return where this pass's gradients of ``flat`` belong; None: there is no pass."""
        if not in_backward():
            return None
        if flat.homes is None:
            self._join_pass()
            flat.open()
        return flat.homes

    def _join_pass(self) -> None:
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
        before = self._reductions[-1:]
        self._reductions.append(flat.close())
        for reduction in before:
            self._settle(reduction)

    def _settle(self, reduction: Reduction) -> None:
        """Wait for it; where steps are part of the pass, take that of its parameters.

        The operation that has completed its gradients has ended since, so none of this pass reads
        the parameters any more.
        """
        reduction.wait()
        if not self._steps:
            return
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
                for reduction in self._reductions[-1:]:
                    self._settle(reduction)
                if not self._steps:
                    self._add_up()
        finally:
            for flat in self._flats:
                if flat.homes is not None:
                    flat.forget_gradients()
                flat.release(wait=completed)
            self._reductions = []
            self._stepped = set()
            self._read = None
            self._in_pass = False

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
