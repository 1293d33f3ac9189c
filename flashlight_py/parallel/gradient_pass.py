"""One pass in which ranks add up gradients: in a fixed order, while the backward pass goes on.

Ranks may finish their gradients in different orders, or not have some at all; the sequence that is
sent must be the same everywhere. So gradients are cut into units by a plan that all ranks share,
and a unit that is complete waits until those before it were given. Gradients that no hook has
completed are given when all is computed; then the pass waits for the sums.

The kinds of passes differ in what a unit is and where its sum goes: reduced in place
(``data_parallel``), into the memory of a host (``sharder``), scattered to the ranks
(``gathered_shards``), into a tree of leaves (``leaf_sync``), or to what a network of distributions
learns (``tagi``).
"""

import abc
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import InPasses, at_end, watching
from flashlight_py.device import Array, array_module
from flashlight_py.distributed import ProcessGroup, Reducer, all_reduce, shared_empty
from flashlight_py.distributed.internal import group_or_world, reduce_all, scale_in_place
from flashlight_py.errors import DistributedError, OutOfMemoryError
from flashlight_py.nn import Module
from flashlight_py.parallel.failing import end_together, fail
from flashlight_py.structure import HoldsState, changed, count

_turns = itertools.count(1)  # in the order in which all ranks make them


class Unit(HoldsState):
    """Gradients that travel together; ``pending`` of them are not complete in this pass."""

    def __init__(self, params: Sequence[Variable], parts: int | None = None) -> None:
        self.params = params
        self.parts = self.pending = len(params) if parts is None else parts


AnyUnit = TypeVar("AnyUnit", bound=Unit)


class GradientPass(HoldsState, InPasses, abc.ABC, Generic[AnyUnit]):
    """A sum over the ranks in every backward pass, in which ranks without data can join.

    ``weigh(first)``, where it is set, says before each unit is given what to multiply it by;
    ``first``: it begins a pass. A weight of 0: nothing of this rank was used. ``enabled``: not
    within ``no_sync``. ``ignored``: names of the module's parameters and buffers that are each
    rank's own.
    """

    averages = True  # over the ranks
    ends_with_message = True  # which ranks wait for after that of the last unit
    is_shared = False  # the optimizer's state, between ranks
    not_joined = ""  # why there is no ``join``
    leaves = 0  # of a global batch, whose gradients are added up one by one; 0: it is not cut

    def __init__(self, reducer: Reducer, units: Iterable[AnyUnit]) -> None:
        self.reducer = reducer
        self.weigh: Callable[[bool], float] | None = None
        self.ignored: frozenset[str] = frozenset()
        self.enabled = True
        self._turn = next(_turns)  # among what a pass has, on all ranks
        self._units = list(units)
        self._params = [param for unit in self._units for param in unit.params]
        self._unused: set[Variable] = set()  # of those that were given in this pass
        self._given = 0  # units, in this pass
        self._running = False
        self._has_failed = False  # the pass, on this rank
        self._ends_together = False  # as all ranks do
        self._module: Callable[[], Module | None] = lambda: None
        self._known: set[Variable] = set()
        self._strangers: dict[str, Variable] = {}  # parameters whose gradients nobody would reduce
        self._structure = self._pending = 0  # when these were found; gradients that did not come

    def install(self) -> None:
        """Have the parameters report their gradients here."""
        for unit in self._units:
            for param in unit.params:
                param.register_grad_hook(functools.partial(self._on_ready, unit))

    def detach(self) -> None:
        """Let go of the parameters, but of those that have another hook since."""
        for param in (*self._params, *self._strangers.values()):
            if _owner_of(param) is self:
                param.clear_grad_hook()
                param.grad_buffer = None
        self._module, self._strangers = (lambda: None), {}

    def watch(self, module: Module) -> None:
        """Raise in a pass that uses parameters that ``module`` does not have now."""
        named = module.named_params().items()
        self._known = {param for name, param in named if param.calc_grad or name in self.ignored}
        self._module, self._structure = weakref.ref(module), int(count[0])
        here: weakref.ref[InPasses] = weakref.ref(self, watching.remove)
        watching.append(here)

    def on_begin(self) -> None:
        """Autograd: a pass begins, perhaps of other modules."""
        if count[0] != self._structure:
            self._find_strangers()

    def _find_strangers(self) -> None:
        module, self._structure = self._module(), int(count[0])
        named = {} if module is None else module.named_params()
        new = {n: p for n, p in named.items() if p.calc_grad and p not in self._known}
        self._strangers = {n: p for n, p in new.items() if _owner_of(p) in (None, self)}
        for param in self._strangers.values():
            if param.hook is None:
                param.register_grad_hook(functools.partial(self._on_stranger))

    def _on_stranger(self, _: object) -> None:
        """Autograd: the gradient of such a parameter is complete."""
        if self.enabled and not self._running:
            self._begin()  # all ranks are to know

    def _check_params(self) -> None:
        pending = sum(unit.pending for unit in self._units)
        if pending != self._pending:  # a parameter in a list may have been replaced
            self._find_strangers()
        if self._strangers:
            raise ValueError(
                f"backward: parameter {next(iter(self._strangers))!r} was assigned, added or "
                "unfrozen after the module was distributed, and its gradient would not be reduced "
                "over the ranks; distribute the module again (distribute_module_grads or "
                "fully_shard), and make a new optimizer"
            )
        self._pending = pending

    def _on_ready(self, unit: AnyUnit, _: object = None) -> None:
        """Autograd: the gradient of one of the unit's parameters is complete."""
        if not self.enabled:
            return
        if not self._running:
            self._begin()
        unit.pending -= 1
        if unit.pending:
            return
        units = self._units
        while self._given < len(units) and not units[self._given].pending:
            self._give_next()

    def _begin(self) -> None:
        self._enter()
        self._join()

    def _join(self) -> None:
        self._running = True
        at_end(self._on_walked, 0)
        at_end(self._on_end, self._turn)

    def join_failed(self) -> None:
        if self.enabled and not self._running:
            self._begin()

    def _on_walked(self, completed: bool) -> None:
        """Autograd: all is computed. Give what is left, before anything waits for its sums."""
        try:
            if completed:
                self._check_params()
                self._give_rest()
        except BaseException:
            completed = False
            raise
        finally:
            # Else all was sent before, and is right.
            if not completed and (self.ends_with_message or self._given < len(self._units)):
                self.fail()

    def _on_end(self, completed: bool) -> None:
        """Autograd: the pass is over. Wait for everything."""
        is_right = False
        try:
            if not self._has_failed:
                self._finish()
                is_right = True
        except Exception as error:
            if self.ends_with_message or isinstance(error, DistributedError):
                self.fail()
            raise
        finally:
            if not is_right:  # ranks would have different parts of the gradients
                self._forget()
            try:
                if self._has_failed:
                    self.end_failed()
            finally:
                self._reset()

    def _give_rest(self) -> None:
        while self._given < len(self._units):
            self._give_next()

    def _give_next(self) -> None:
        self._give(self._units[self._given], self._next_weight())
        self._given += 1

    def _next_weight(self) -> float:
        return 1.0 if self.weigh is None else self.weigh(self._given == 0)

    def _used_here(self) -> list[bool]:
        """Return which parameters this rank has used in this pass."""
        return [param not in self._unused for param in self._params]

    def _reset(self) -> None:
        """Be as before the pass."""
        for unit in self._units:
            unit.pending = unit.parts
        self._given, self._running = 0, False
        self._unused.clear()

    def _forget(self) -> None:
        for param in self._params:
            param.grad = None

    def fail(self) -> None:
        """Let the pass that an exception ends here fail on all ranks."""
        self._has_failed = True
        self._ends_together = fail(self._all, sys.exc_info()[1], self._sent_next())

    def end_failed(self) -> None:
        """End a pass that has failed; blocks until all ranks have got there."""
        together, self._has_failed, self._ends_together = self._ends_together, False, False
        self.reducer.abandon()
        if together:
            end_together(self._all)

    @property
    def _all(self) -> ProcessGroup:
        """The ranks."""
        return group_or_world(self.reducer.group)

    def check(self, what: str) -> None:
        """Refuse ``what`` where a rank has ended in the middle of a step."""

    def weight(self, samples: int, all_samples: int, training: int, ranks: int) -> float:
        """Return what this rank's own pass counts, where ``training`` of ``ranks`` have data.

        That is its share of the samples, relative to the mean.
        """
        if not self.averages:
            return 1.0
        return samples * ranks / all_samples if all_samples else 0.0

    def give_zeros(self) -> None:
        """Take part in a pass of the other ranks: the sums become what they get. Blocks."""
        try:
            self._enter()
            for unit in self._units:
                self._give(unit, 0.0)
            self._finish()
        finally:
            self._reset()

    def _enter(self) -> None:
        """Do what comes before the first unit of a pass."""

    @abc.abstractmethod
    def _give(self, unit: AnyUnit, weight: float) -> None:
        """Send ``unit``, times ``weight``."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Wait for the sums; parameters that no rank used have no gradient then."""

    def _sent_next(self) -> Iterable[Array]:
        """Return arrays such as those that the others wait for, if the pass fails here."""
        return ()


def weigh_in_place(array: Array, weight: float) -> None:
    """Multiply by ``weight``; 0 makes zeros of anything."""
    if not weight:
        array[...] = 0  # a batch of no samples may have nan for its mean
    elif weight != 1.0:
        scale_in_place(array, weight)


def gradient_of(param: Variable) -> Array:
    """Return the gradient; zeros take the place of one that this rank did not compute."""
    if param.grad is None:
        param.grad = array_module(param.data).zeros_like(param.data)
    elif not param.grad.shape or param.grad.dtype != param.dtype:
        # NumPy's result of an array without dimensions is a scalar.
        param.grad = array_module(param.grad).asarray(param.grad, param.dtype)
    return param.grad


def used_on_any_rank(used: Iterable[bool], group: ProcessGroup | None) -> list[bool]:
    """Return for each parameter whether a rank used it. Collective, blocking."""
    flags = np.array([*used], np.int32)
    all_reduce(flags, op="max", group=group)
    return [bool(flag) for flag in flags.tolist()]


def reduce_used(params: Sequence[Variable], scale: float, group: ProcessGroup | None) -> None:
    """Sum the gradients that any rank has, times ``scale``, in place. Collective, blocking."""
    used = used_on_any_rank((param.grad is not None for param in params), group)
    there = itertools.compress(params, used)
    reduce_all([gradient_of(param) for param in there], scale, group)


def shared_zeros(size: int, dtype: DTypeLike, group: ProcessGroup | None) -> Array:
    """Return zeros in memory that collectives reduce where it is. Collective, blocking."""
    try:
        flat = shared_empty(size, dtype, group=group)
    except MemoryError as error:
        raise OutOfMemoryError(f"buckets of gradients cannot be made: {error}") from error
    flat[...] = 0
    return flat


_passes: weakref.WeakKeyDictionary[Module, GradientPass[Any]] = weakref.WeakKeyDictionary()


def install(
    module: Module,
    sync: GradientPass[Any],
    before_forward: Callable[[GradientPass[Any], Module], None] | None = None,
) -> None:
    """Let ``sync`` be found for ``module`` from now on, and ``before_forward`` be called."""
    _passes[module] = sync
    changed()
    sync.watch(module)
    if before_forward is not None:
        module.before_forward = functools.partial(before_forward, sync)


def release(module: Module) -> None:
    """Undo what was installed for ``module``, if anything was."""
    sync = _passes.pop(module, None)
    if sync is not None:
        sync.detach()
        if getattr(module.before_forward, "args", None) == (sync,):
            module.before_forward = None


def pass_of(module: Module) -> GradientPass[Any] | None:
    """Return the pass that was installed for ``module``."""
    return _passes.get(module)


def ranks_of(arguments: Mapping[str, Any]) -> ProcessGroup:
    """Return the ranks that train the argument ``module``; the world if nothing was installed."""
    module = arguments.get("module")
    sync = pass_of(module) if isinstance(module, Module) else getattr(module, "sync", None)
    return group_or_world(sync.reducer.group if isinstance(sync, GradientPass) else None)


def gradient_sync_of(module: Module, caller: str) -> GradientPass[Any]:
    """Return what was installed; a ValueError for ``caller`` if nothing, or leaf by leaf."""
    sync = pass_of(module)
    if sync is None:
        raise ValueError(
            f"{caller}: call distribute_module_grads or fully_shard on this module first"
        )
    if sync.leaves:
        raise ValueError(
            f"{caller}: the module was distributed with leaves={sync.leaves}, and one loop over "
            "fl.leaves computes its gradients. Do not accumulate gradients: pass the same larger "
            "global batch on every rank"
        )
    return sync


def is_synchronised(param: Variable) -> bool:
    """Return whether the gradient of ``param`` is reduced over the ranks by itself."""
    return isinstance(_owner_of(param), GradientPass)


def _owner_of(param: Variable) -> object:
    """Return the object whose method is the hook of ``param``, if it is one."""
    owner = param.hook.func if isinstance(param.hook, functools.partial) else None
    return getattr(owner, "__self__", None)
