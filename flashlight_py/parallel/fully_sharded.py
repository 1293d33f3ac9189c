"""One model per host: parameters, gradients and optimizers' state that ranks have in common."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, is_cupy, to_device
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.api.running import refusing
from flashlight_py.distributed.reducers.host_memory import hosts_of, meet
from flashlight_py.distributed.start.world import group_or_world
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer
from flashlight_py.optim.cpu import BLOCK, sum_of_squares, sums_of_squares
from flashlight_py.optim.optimizer import Placement, RuleOptimizer, Shards
from flashlight_py.parallel.agreement import check_modules_agree, check_settings_agree
from flashlight_py.parallel.data_parallel import before_forward, distribute_module_grads
from flashlight_py.parallel.gathered_shards import shard_by_gathering
from flashlight_py.parallel.gradient_pass import GradientPass, install, release
from flashlight_py.parallel.shard_memory import (
    FROZEN,
    Buckets,
    HostMemory,
    Hosts,
    UnitPlan,
    bucket_bytes,
    plan,
)
from flashlight_py.parallel.shard_sync import ShardSync, ShardUnit, Stepper, StepSync
from flashlight_py.parallel.synchronize import broadcast_parameters, give_state, require_module

# Of all parameters. Below it ranks take less time to step alone than to wait for each other: at 8
# MiB a sharded step took two ranks 1.15 times as long, at 16 MiB 0.98 times, and four ranks 0.76.
SMALL_BYTES = 12 << 20


def fully_shard(
    module: Module,
    group: ProcessGroup | None = None,
    step_in_backward: bool = False,
    across_hosts: bool = False,
) -> None:
    """Keep one copy of the module, its gradients and its optimizer's state on each host.

    Collective, blocking; in place. The parameters become those of the group's rank 0. Afterwards
    each parameter lies in memory that all ranks of the host map, and so does its gradient, the mean
    over all ranks, when ``backward()`` returns. ``optimizer.step()`` changes on each rank its share
    of the elements; nothing is gathered. ``module(x)``, ``params()``, ``state_dict()`` and
    checkpoints stay as they are: all shapes are those of the whole. Make the optimizer afterwards.
    Calling it again lays the module out anew.

    Making an optimizer, ``step()``, ``clip_grad_norm`` and saving or loading the
    optimizer's state are collective then, as is every synchronised backward pass. Between steps a
    parameter must not be written: all ranks would see it, some of them in the middle of a pass.
    Copies and pickles of the module and its optimizer are ordinary ones, of this process alone.
    With FLASHLIGHT_DEBUG_SHARED=1 in the environment NumPy refuses it.

    A module with less than 12 MiB of parameters stays each rank's own, as by
    :func:`flashlight_py.distribute_module_grads`: waiting for each other would take longer than to
    step alone. Not so with ``step_in_backward`` or ``across_hosts``.

    Ranks that share no memory, as through Gloo alone, count as a host each: then it is
    data-parallel training, and only ``across_hosts`` saves memory.

    Args:
        module: the same on every rank but for its values. Parameters that are CuPy arrays are
            sharded over all ranks, and gathered module by module while they are used (ZeRO-3):
            docs/sharding-gpu.md says what is different then.
        group: the process group, default the world.
        step_in_backward: step while the backward pass goes on, so that no gradient exists as a
            whole: ``grad`` is None afterwards, and ``step()`` does little. Excludes clipping,
            ``no_sync`` and several passes before a step.
        across_hosts: each host keeps state for, and steps, its part of the parameters, and sends
            it to the others, as ZeRO-1 does; ``grad`` is then complete in that part alone.

    Raises:
        TypeError: ``module`` is no Module.
        ValueError: it has no parameter with ``calc_grad``; the array of one is not C-contiguous;
            ``step_in_backward`` is asked for with ranks that do not all share memory; of
            parameters on GPUs: ``across_hosts`` is asked for, or they are sharded already or have
            a gradient hook.
        MemoryError, OSError: there is no memory for it; no rank's module has changed, but on GPUs
            parameters may be sharded in part: make the module anew.
        MismatchError: ranks' modules or arguments differ, or another rank has raised one of the
            above; says which and why.
        TornStateError: it was sharded before, and a rank ended in the middle of a step.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> fl.fully_shard(model)  # one process: everything works as before
        >>> optimizer = fl.optim.AdamOptimizer(model.params(), lr=0.01)
        >>> model(fl.input(np.ones((1, 3), np.float32))).backward(np.ones((1, 2), np.float32))
        >>> optimizer.step()
    """
    require_module(module)
    members = group_or_world(group)
    settings = {"step_in_backward": bool(step_in_backward), "across_hosts": bool(across_hosts)}
    check_settings_agree("fully_shard", settings, members)
    named = module.named_params()
    check_modules_agree(named, members)
    if not any(param.calc_grad for param in named.values()):
        raise ValueError("fully_shard: the module has no parameter with calc_grad")
    if any(is_cupy(param.data) for param in named.values()):
        if across_hosts:
            how = "on GPUs each rank has a part of everything in any case"
            raise ValueError(f"fully_shard: across_hosts is for parameters on the CPU; {how}")
        with refusing(members, "fully_shard"):
            _install(module, shard_by_gathering(module, members, step_in_backward))
        return
    for name, param in named.items():
        if param.placement is not None and param.placement.is_cut:
            raise ValueError(
                f"fully_shard: {name} is cut between ranks by shard_linear already; shard the "
                "module's other parts"
            )
        if param.placement is not None:
            param.placement.shards.check("fully_shard")
    nbytes = sum(param.data.nbytes for param in named.values())
    if nbytes < SMALL_BYTES and not (step_in_backward or across_hosts):
        with refusing(members, "fully_shard"):  # each rank has its own again, of all or none
            sharded = [param for param in named.values() if param.placement is not None]
            own = [np.array(param.data) for param in sharded]
            for param, data in zip(sharded, own, strict=True):
                param.placement, param.data = None, data
        release(module)
        broadcast_parameters(module, group=members)
        distribute_module_grads(module, group=members)
        return
    with refusing(members, "fully_shard"):
        _require_row_major(named)
    shards = HostShards(_in_order(module), members, step_in_backward, across_hosts)
    give_state(module, module.buffers, 0, members)
    release(module)
    shards.take()
    shards.sync.ignored = frozenset(named)
    _install(module, shards.sync)


def _install(module: Module, sync: GradientPass[Any]) -> None:
    install(module, sync)
    module.before_forward = functools.partial(before_forward, sync)


def _require_row_major(named: dict[str, Variable]) -> None:
    """Refuse arrays in another order than that of common memory: BLAS would round otherwise."""
    for name, param in named.items():
        if not param.data.flags.c_contiguous:
            raise ValueError(
                f"fully_shard: {name} has strides {param.data.strides} for shape {param.shape}, "
                "and common memory is in C order, in which products may have other last bits. "
                "Before, do: param.array = np.ascontiguousarray(param.array)"
            )


def _in_order(module: Module) -> list[Variable]:
    """Return the parameters about as a backward pass completes them: the last layer's first.

    Those of one layer stay in order: a weight comes before its bias.
    """
    named = module.named_params()
    layers = itertools.groupby(named, key=lambda name: name.rpartition(".")[0])
    grouped = [[named[name] for name in names] for _, names in layers]
    return [param for layer in reversed(grouped) for param in layer]


class EachOnce:
    """Sums over ranks what each host has as a whole, ``copies`` in all; the same on every rank."""

    def __init__(self, members: ProcessGroup, copies: int) -> None:
        self._members, self._copies = members, copies

    def all_reduce(self, x: Any) -> Any:
        """Sum ``x`` over the ranks, in place; see ``Summing``."""
        return self._members.all_reduce(x, scale=1.0 / self._copies)


class HostPlacement(Placement):
    """The place of one parameter in flat arrays of layout ``name``: at ``position`` of ``unit``."""

    shards: HostShards
    __captured_state__ = ("shards",)

    def __init__(
        self, shards: HostShards, name: str, unit: UnitPlan, position: int, shape: tuple[int, ...]
    ) -> None:
        self.shards, self._name, self._shape = shards, name, shape
        start = unit.starts[position]
        self._place = slice(start, start + unit.sizes[position])
        self._number = unit.numbers[position]
        self._pieces = shards.memory.pieces(name, unit, position)
        self.replays = not shards.steps

    def view(self, flat: Array) -> Array:
        """Return what of a flat array is this parameter's."""
        return flat[self._place].reshape(self._shape)

    def zeros(self, dtype: DTypeLike) -> Array:
        """Return new state for the parameter, zeros; see ``Placement``."""
        flat = self.shards.new_state(self._name, self._number, dtype)
        return self.view(flat)

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        """Return what this process steps; see ``Placement``."""
        memory = self.shards.memory
        data = memory.params[self._name][self._place]
        if self._name.endswith(FROZEN):
            raise ValueError(
                f"a parameter of shape {self._shape} had no calc_grad when fully_shard was called, "
                "so its gradients are not summed; call fully_shard again to train it"
            )
        assert variable.grad is not None
        arrays = [data, *(each.reshape(-1) for each in (variable.grad, *states))]
        return [tuple([array[piece] for array in arrays]) for piece in self._pieces]

    def sum_of_squares(self, variable: Variable) -> float:
        """Return that of the whole gradient; collective across hosts. See ``Placement``."""
        if not self.shards.memory.across:
            return super().sum_of_squares(variable)
        parts = [sum_of_squares(grad) for _, grad in self.pieces(variable, ())]
        return float(self.shards.members.all_reduce(np.array([sum(parts)], np.float64))[0])

    def whole(self, state: Array) -> Array:
        """Return ``state`` in the parameter's shape; collective across hosts."""
        memory = self.shards.memory
        whole = np.array(state) if memory.across else state
        for host, part in self._parts() if memory.across else ():
            self.shards.members.broadcast(
                whole.reshape(-1)[part], root=memory.hosts.first_ranks[host]
            )
        return whole

    def put(self, state: Array, value: Any) -> None:
        """Set what this host keeps of ``state`` to ``value``; see ``Placement``."""
        memory = self.shards.memory
        flat, new = state.reshape(-1), to_device(value, "cpu").reshape(-1)
        for host, own in self._parts() if memory.across else [(memory.hosts.index, slice(None))]:
            if host == memory.hosts.index:
                flat[own] = new[own]

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """Yield which of the parameter's elements which host steps, where each has a part."""
        memory, place = self.shards.memory, self._place
        for host in range(memory.hosts.count):
            own = memory.own(self._name, host)
            low, high = max(own.start, place.start), min(own.stop, place.stop)
            if low < high:
                yield host, slice(low - place.start, high - place.start)


class HostShards(Shards):
    """The common part of the parameters of a module that is sharded in the memory of hosts.

    Args:
        params: in the order in which their gradients are sent.
        members: the ranks that train it together.
        step_in_backward, across_hosts: see :func:`fully_shard`.
    """

    __captured_state__ = ("memory", "sync")

    def __init__(
        self,
        params: Sequence[Variable],
        members: ProcessGroup,
        step_in_backward: bool,
        across_hosts: bool,
    ) -> None:
        self.members, self.steps = members, step_in_backward
        if step_in_backward and len(hosts_of(members)) > 1:
            raise ValueError(
                "fully_shard: step_in_backward needs ranks that all share memory: parameters would "
                "change before other hosts' gradients are there. These ranks are on "
                f"{len(hosts_of(members))} hosts (see fl.distributed.describe())"
            )
        hosts = Hosts(members)
        self.group = EachOnce(members, 1 if across_hosts else hosts.count)
        limit, size = bucket_bytes(max(hosts.sizes)), hosts.local.size
        by_name: dict[str, list[Variable]] = {}
        for param in params:
            kind = param.dtype.name if param.dtype.kind == "V" else param.dtype.str  # bfloat16
            by_name.setdefault(kind if param.calc_grad else kind + FROZEN, []).append(param)
        layouts = {
            name: plan([p.shape for p in those], those[0].dtype.itemsize, size, limit, hosts.sizes)
            for name, those in by_name.items()
        }
        self._steppers: dict[Variable, Stepper] = {}
        self._states: dict[tuple[str, str, int], Array] = {}
        self._taken: Counter[tuple[int, str]] = Counter()
        with hosts.together("fully_shard"):
            self.memory = HostMemory(hosts, layouts, across_hosts)
            self._units = []
            for name, layout in layouts.items():
                for each in layout.units:
                    unit = ShardUnit(name, each, [by_name[name][number] for number in each.numbers])
                    grads = self.memory.grads[name]
                    unit.wholes = [place.view(grads) for _, place in self._places(unit)]
                    self._units.append(unit)
            largest = max(
                (chunk.stop - chunk.start) * unit.params[0].dtype.itemsize
                for unit in self._units
                for chunk in unit.plan.chunks
            )
            scale = 1.0 / members.size if hosts.count == 1 else 1.0
            buckets = Buckets(hosts.local, largest, scale, keeps=not self.steps)
            sent = [unit for unit in self._units if not unit.name.endswith(FROZEN)]
            self.sync = (
                StepSync(members, self.memory, buckets, sent, self._steppers.get)
                if step_in_backward
                else ShardSync(members, self.memory, buckets, sent)
            )
        self.params = [param for unit in self._units for param in unit.params]

    def _places(self, unit: ShardUnit) -> Iterator[tuple[Variable, HostPlacement]]:
        """Yield the parameters of ``unit``, and where they are to lie."""
        for position, param in enumerate(unit.params):
            yield param, HostPlacement(self, unit.name, unit.plan, position, param.shape)

    def take(self) -> None:
        """Move the parameters here, a unit at a time: those of rank 0. Collective, blocking.

        Until all are here each rank's module is as it was, but for where its arrays lie, and but
        for values of rank 0 on the first ranks of other hosts.
        """
        local = self.memory.hosts.local
        with self.memory.loading():
            if local.rank == 0:
                for unit in self._units:
                    self._fill(unit)
            local.barrier()
            for unit in self._units:
                for param, place in self._places(unit):
                    param.data, param.placement = place.view(self.memory.params[unit.name]), place
                    param.data.flags.writeable = not self.memory.is_debugged
        self.sync.install()

    def _fill(self, unit: ShardUnit) -> None:
        """Set a unit's parameters on this host; what they were before is free, if nobody has it."""
        hosts, flat = self.memory.hosts, self.memory.params[unit.name]
        places = [(param, place.view(flat)) for param, place in self._places(unit)]
        for param, data in places if hosts.index == 0 else ():
            data[...] = param.data
        every = flat[unit.plan.starts[0] : unit.plan.starts[-1] + unit.plan.sizes[-1]]
        if hosts.between is not None and every.size:
            hosts.between.broadcast(every, root=0)
        for param, data in places:
            if param.placement is None:
                param.data = data

    def attach(self, optimizer: FirstOrderOptimizer) -> None:
        """Begin new state for an optimizer, and remember it; see ``Shards``."""
        if self.steps and (
            not isinstance(optimizer, RuleOptimizer) or optimizer.needs_whole_gradient
        ):
            raise ValueError(
                f"fully_shard(step_in_backward=True): {type(optimizer).__name__} cannot step a "
                "part of a parameter by itself; shard the module without step_in_backward"
            )
        if self.steps and isinstance(optimizer, RuleOptimizer):
            self._steppers.update((p, (optimizer, i)) for i, p in enumerate(optimizer.params))
        self.sync.optimizers = [ref for ref in self.sync.optimizers if ref() is not None]
        self.sync.optimizers.append(weakref.ref(optimizer))
        self._states, self._taken = {}, Counter()

    def sum_of_squares(self, variables: Sequence[Variable]) -> float:
        """Return that of all gradients, the same for any number of ranks; see ``Shards``."""
        if self.memory.across:
            return super().sum_of_squares(variables)
        local, parts = self.memory.hosts.local, [np.zeros(0)]
        for variable in variables:
            assert variable.grad is not None
            sums = np.zeros(-(-variable.size // BLOCK))
            mine = slice(local.rank, None, local.size)
            sums[mine] = sums_of_squares(variable.grad, mine)
            parts.append(sums)
        return float(sum(local.all_reduce(np.concatenate(parts)).tolist()))

    def meet(self) -> None:
        """Wait until all ranks of this host have clipped their pieces; see ``Shards``."""
        meet(self.memory.hosts.local, "clip_grad_norm of a sharded module")

    def changing(self, what: str) -> AbstractContextManager[None]:
        """Return the context in which this process may write its pieces; see ``Shards``."""
        if isinstance(self.sync, StepSync):
            self.sync.is_done = False
        return self.memory.changing(what)

    def check(self, what: str) -> None:
        """Refuse ``what`` where a rank has ended in the middle of a step; see ``Shards``."""
        self.sync.check(what)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return the context in which all parameters are set; see ``Shards``."""
        with self.memory.loading():
            for param in self.params:
                param.data.flags.writeable = True
            yield
            for param in self.params:
                param.data.flags.writeable = not self.memory.is_debugged

    def new_state(self, name: str, number: int, dtype: DTypeLike) -> Array:
        """Return a flat array of layout ``name`` for parameter ``number``. May be collective."""
        kind = np.dtype(dtype).str
        place = name, kind, self._taken[number, kind]
        self._taken[number, kind] += 1
        if place not in self._states:
            self._states[place] = self.memory.new_flat(name, kind)
        return self._states[place]
