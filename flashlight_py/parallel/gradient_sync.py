"""When a module's gradients travel: in a fixed order, while the backward pass goes on.

Ranks may finish their gradients in different orders, or not have some at all; what is sent must
be the same sequence everywhere. So gradients are cut into units by a plan that all ranks share,
and a unit that is complete waits until those before it were passed to the reducer.

A parameter that no rank used has no gradient afterwards, as on one process: an optimizer must not
move it by momentum or weight decay. Which ones those are is known on every rank when the last
bucket has been summed, since each rank's flags travel at its end; where a hook or a reducer may
send something else than sums, they are a message of their own.
"""

from __future__ import annotations

import abc
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import InPasses, at_end
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed import ProcessGroup, all_reduce, shared_empty
from flashlight_py.distributed.calls.arrays import scale_in_place
from flashlight_py.distributed.groups.world import group_or_world
from flashlight_py.distributed.reducers.reducer import Reducer, plan_buckets
from flashlight_py.errors import DistributedError
from flashlight_py.parallel.failing import end_together, fail, forget_gradients


class Unit:
    """Gradients that travel as one array, which ``collect`` returns once they are complete.

    ``flat``: that array, or None where it is the gradient of the only parameter.
    """

    def __init__(
        self,
        params: Sequence[Variable],
        collect: Callable[[], Array],
        flat: Array | None = None,
    ) -> None:
        self.params, self.collect, self.flat = params, collect, flat
        self.pending = len(params)


def gradient_of(param: Variable) -> Array:
    """Return the gradient; zeros take the place of one that this rank did not compute."""
    if param.grad is None:
        param.grad = array_module(param.data).zeros_like(param.data)
    elif not param.grad.shape or param.grad.dtype != param.dtype:
        # What NumPy has computed of an array without dimensions is a scalar.
        param.grad = array_module(param.grad).asarray(param.grad, param.dtype)
    return param.grad


def used_on_any_rank(used: Iterable[bool], group: ProcessGroup | None) -> list[bool]:
    """Return for each parameter whether a rank used it. Collective, blocking."""
    flags = np.array([*used], np.int32)
    all_reduce(flags, op="max", group=group)
    return [bool(flag) for flag in flags.tolist()]


_turns = itertools.count(1)  # in the order in which all ranks make them


def one_by_one(params: Sequence[Variable]) -> list[Unit]:
    """Let every gradient travel as it is; for reducers that pack by themselves."""
    return [Unit([param], functools.partial(gradient_of, param)) for param in params]


def flat_buckets(
    params: Sequence[Variable], limit: int, group: ProcessGroup | None, extra: int = 0
) -> tuple[list[Unit], Array]:
    """Make all gradients views into flat buckets of at most ``limit`` bytes. Collective, blocking.

    The backward pass accumulates straight into them, so that nothing is packed or unpacked. A
    bucket holds one dtype on one device.

    Returns:
        The buckets, and a view of ``extra`` more elements at the end of the last one.
    """
    planned = [
        [params[index] for index in bucket]
        for bucket in plan_buckets(
            [param.data.nbytes for param in params], limit, [param.dtype for param in params]
        )
    ]
    sizes = [sum(param.size for param in bucket) for bucket in planned]
    flats = [
        _new_flat(size + (extra if bucket is planned[-1] else 0), bucket[0].data, group)
        for size, bucket in zip(sizes, planned, strict=True)
    ]
    units = [_flat_bucket(bucket, flat) for bucket, flat in zip(planned, flats, strict=True)]
    return units, flats[-1][sizes[-1] :]


def _new_flat(size: int, like: Array, group: ProcessGroup | None) -> Array:
    """Return zeros, on the CPU in memory that needs no copy to be reduced. Collective."""
    if is_cupy(like):
        flat: Array = array_module(like).zeros(size, like.dtype)
        return flat
    return shared_zeros(size, like.dtype, group)


def shared_zeros(size: int, dtype: DTypeLike, group: ProcessGroup | None) -> Array:
    """Return zeros in memory that collectives reduce where it is. Collective, blocking."""
    flat = shared_empty(size, dtype, group)
    flat[...] = 0
    return flat


def _flat_bucket(params: list[Variable], flat: Array) -> Unit:
    start = 0
    for param in params:
        param.grad_buffer = flat[start : start + param.size].reshape(param.shape)
        start += param.size

    def collect() -> Array:
        for param in params:
            _bring_home(param)
        return flat

    return Unit(params, collect, flat)


def buffers_of(params: Sequence[Variable]) -> list[Array]:
    """Return where the gradients of these parameters lie in their bucket."""
    return [param.grad_buffer for param in params if param.grad_buffer is not None]


def _bring_home(param: Variable) -> None:
    """Make the gradient its part of the bucket, also if the pass left it out or a user set it."""
    grad, home = param.grad, param.grad_buffer
    if grad is home or home is None:
        return
    home[...] = 0 if grad is None else grad
    param.grad = home


def is_synchronised(param: Variable) -> bool:
    """Return whether the gradient of ``param`` is reduced over the ranks by itself."""
    return isinstance(_owner_of(param), (PassSync, Hooked))


def _owner_of(param: Variable) -> object:
    """Return the object whose method is the hook of ``param``, if it is one."""
    owner = param.hook.func if isinstance(param.hook, functools.partial) else None
    return getattr(owner, "__self__", None)


class PassSync(InPasses, abc.ABC):
    """A sum over the ranks in every backward pass, in which ranks without data can join.

    ``weigh(first)``, where it is set, says before each array is passed to ``reducer`` what to
    multiply it by; ``first``: it begins a pass. A weight of 0: nothing of this rank was used.
    ``enabled``: not within ``no_sync``. ``ignored``: names of the module's parameters and buffers
    that are each rank's own. ``is_shared``: ranks have the optimizer's state in common.
    """

    steps = False  # inside the pass, so that there are no gradients to keep

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.weigh: Callable[[bool], float] | None = None
        self.ignored: frozenset[str] = frozenset()
        self.enabled = True
        self.is_shared = False
        self._turn = next(_turns)  # among what a pass has, on all ranks
        self._has_failed = False  # the pass, on this rank
        self._ends_together = False  # as all ranks do

    def fail(self, *given: Array) -> None:
        """Let the pass that an exception ends here fail on all ranks, which reduce ``given``."""
        self._has_failed = True
        self._ends_together = fail(self._all, sys.exc_info()[1], given)

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

    def detach(self) -> None:
        """Let go of the parameters, but of those that have another hook since."""

    @abc.abstractmethod
    def weight(self, samples: int, all_samples: int, training: int, ranks: int) -> float:
        """Return what this rank's own pass counts, where ``training`` of ``ranks`` have data."""

    @abc.abstractmethod
    def give_zeros(self) -> None:
        """Take part in a pass of the other ranks: the sums become what they get. Blocks.

        Raises:
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """


class Hooked:
    """A sync whose methods are the gradient hooks of ``_params``."""

    _params: Sequence[Variable]

    def detach(self) -> None:
        """Let go of the parameters, but of those that have another hook since."""
        for param in self._params:
            if _owner_of(param) is self:
                param.clear_grad_hook()
                param.grad_buffer = None


class GradientSync(Hooked, PassSync):
    """Passes units to ``reducer`` in order, as hooks complete them, and finishes with the pass.

    ``flags``: space for a number of each parameter in the array of the last unit; None: whether it
    was used travels in a message of its own. ``averages``: the reducer leaves the mean over the
    ranks.
    """

    __captured_state__ = (
        *("reducer", "weigh", "ignored", "enabled", "is_shared", "averages"),
        *("_units", "_params", "_flags", "_touched", "_given", "_has_failed"),
    )

    def __init__(
        self,
        units: list[Unit],
        reducer: Reducer,
        flags: Array | None = None,
        averages: bool = False,
    ) -> None:
        super().__init__(reducer)
        self.averages = averages
        self._units = units
        self._params = [param for unit in units for param in unit.params]
        self._flags = flags
        self._unused: list[Variable] = []  # of those that this pass has passed on; mostly none
        self._given = 0  # units that this pass has passed to the reducer
        self._touched: list[Unit] | None = None  # with gradients in this pass; None between passes
        for unit in units:
            for param in unit.params:
                param.register_grad_hook(functools.partial(self._on_ready, unit))

    def _on_ready(self, unit: Unit, _: Variable) -> None:
        """Autograd: the gradient of one of the unit's parameters is complete."""
        if not self.enabled:
            return
        touched = self._begin()
        touched.append(unit)
        unit.pending -= 1
        if unit.pending:
            return
        units = self._units
        while self._given < len(units) and not units[self._given].pending:
            self._give_next()

    def _begin(self) -> list[Unit]:
        if self._touched is None:
            self._touched = []
            at_end(self._on_walked, 0)
            at_end(self._on_end, self._turn)
        return self._touched

    def join_failed(self) -> None:
        """Autograd: the pass fails; see ``InPasses``."""
        if self.enabled:
            self._begin()

    def _on_walked(self, completed: bool) -> None:
        """Autograd: all is computed. Pass on what is left, before anything waits for its sums."""
        try:
            while completed and self._given < len(self._units):
                self._give_next()
        except Exception:
            completed = False
            raise
        finally:
            # Else all was sent before, and is right.
            if not completed and (self._given < len(self._units) or self._flags is None):
                self._fail()

    def _on_end(self, completed: bool) -> None:
        """Autograd: the pass is over. Wait for everything."""
        try:
            if not self._has_failed:
                self._finish()
        except Exception as error:
            if isinstance(error, DistributedError) or self._flags is None:
                self._fail()
            raise
        finally:
            for unit in self._touched or ():
                unit.pending = len(unit.params)
            self._touched = None
            self._given = 0
            self._unused = []
            if self._has_failed:
                forget_gradients(self._params)
                self.end_failed()

    def _fail(self) -> None:
        """Let the pass fail on all ranks."""
        unit = self._units[min(self._given, len(self._units) - 1)]
        self.fail(unit.params[0].data if unit.flat is None else unit.flat)

    def _give_next(self) -> None:
        unit = self._units[self._given]
        unused: Sequence[Variable] = [param for param in unit.params if param.grad is None]
        array = unit.collect()
        if self.weigh is not None:
            weight = self.weigh(self._given == 0)
            if weight:
                scale_in_place(array, weight)
            else:
                array[...] = 0  # a batch of no samples may have nan for its mean
                unused = unit.params
        if unused:
            self._unused += unused
        if self._flags is not None and unit is self._units[-1]:
            self._flags.fill(1)
            if self._unused:
                self._flags[...] = _like(self._flags, self._used_here())
        self.reducer.add(array)
        self._given += 1

    def weight(self, samples: int, all_samples: int, training: int, ranks: int) -> float:
        """Return this rank's share of the samples, relative to the mean: the reducer averages."""
        if not self.averages:
            return 1.0
        return samples * ranks / all_samples if all_samples else 0.0

    def give_zeros(self) -> None:
        """Take part in a pass of the other ranks with zeros for gradients."""
        for unit in self._units:
            array = unit.collect()
            array[...] = 0
            self.reducer.add(array)
        self._unused = list(self._params)
        try:
            self._finish()
        finally:
            self._unused = []

    def _finish(self) -> None:
        """Wait for everything; parameters that no rank used have no gradient then."""
        self.reducer.finalize()
        if self._flags is None:
            used = used_on_any_rank(self._used_here(), self.reducer.group)
        elif self._unused:
            used = [bool(flag) for flag in self._flags.tolist()]
        else:  # nothing to learn from the others, and a GPU need not be waited for
            return
        for param, anywhere in zip(self._params, used, strict=True):
            # A hook may bring what it had left over of gradients of earlier passes.
            if not (anywhere or gradient_of(param).any()):
                param.grad = None

    def _used_here(self) -> list[bool]:
        unused = set(self._unused)
        return [param not in unused for param in self._params]


def _like(flags: Array, used: Sequence[bool]) -> Array:
    found: Array = array_module(flags).asarray(used, flags.dtype)
    return found
