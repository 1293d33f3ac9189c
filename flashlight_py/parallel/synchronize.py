"""Equal values on every rank: a copy of one rank's values, or the mean over all ranks."""

import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flashlight_py.distributed import ProcessGroup, all_reduce, broadcast, internal
from flashlight_py.errors import DistributedError, MismatchError
from flashlight_py.meter import Meter
from flashlight_py.nn import Module
from flashlight_py.parallel import agreement
from flashlight_py.parallel import tree as trees
from flashlight_py.parallel.tree import Plan, TreeBuffers, plan_of
from flashlight_py.structure import Structured, as_one

SomeTree = TypeVar("SomeTree")

_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


@internal.in_step()
def synchronize(tree: SomeTree, root: int = 0, *, group: ProcessGroup | None = None) -> SomeTree:
    """Set all arrays and numbers in ``tree`` to the values of rank ``root``.

    Collective, blocking. These objects are changed in place: arrays (NumPy, CuPy, tensors with
    DLPack) of any shape, layout and dtype except ``object``; dicts, lists and dataclasses; modules
    of ``fl.nn`` or PyTorch (parameters and buffers); a ``fl.Variable`` (its array); optimizers and
    schedules of ``fl.optim`` (state and settings, not parameters). Numbers of exactly the types
    bool, int, float, complex and NumPy scalars are replaced. Tuples and frozen dataclasses with
    numbers are created again. Other objects, such as None, strings and functions, are not changed
    and may differ.

    All arrays are sent in one packed transfer for the CPU and one for the GPU, through buffers as
    large as the arrays. An array or container that occurs several times is sent once.

    Args:
        tree: Tree with the same structure on every rank: container types, keys (in any order),
            attributes, lengths, shapes, dtypes and shared objects.
        root: Rank in the group.
        group: Process group. Default: the world.

    Returns:
        ``tree``, or a new object if ``tree`` is a number or immutable.

    Raises:
        ValueError: If ``root`` is not a rank of the group, or the tree of any rank has a read-only
            array, a Variable with history that needs a gradient, or a sharded parameter.
        TypeError: If an array of any rank contains Python objects. Every rank raises.
        MismatchError: If the trees differ. Every rank raises, and nothing is changed. The message
            has the first different path and its values.
        DistributedError: As :func:`flashlight_py.all_reduce`. The tree is not changed.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1, momentum=0.9)
        >>> tree = {"model": model, "optimizer": optimizer, "epoch": 3}
        >>> fl.synchronize(tree)["epoch"]  # one process: everything stays
        3
    """
    return synchronize_for("synchronize", "tree", tree, root, group)


@internal.in_step()
def broadcast_parameters(
    module: Module, root: int = 0, *, group: ProcessGroup | None = None
) -> None:
    """Set every rank's parameters and buffers to the values of rank ``root``, in place.

    Collective, blocking; one packed transfer. Call it after ``distributed_init`` and before
    training, because ranks may have drawn different initial parameters.
    :func:`flashlight_py.all_reduce_parameters` computes the mean instead.

    Args:
        module: Module with the same structure on every rank.
        root: Rank in the group.
        group: Process group. Default: the world.

    Raises:
        TypeError: If ``module`` is not a Module.
        ValueError: If ``root`` is not a rank, an array is read-only, or a parameter is sharded.
        MismatchError: If the modules differ. The message has the first difference.
        DistributedError: As :func:`flashlight_py.all_reduce`. Nothing is changed.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> fl.broadcast_parameters(model)  # one process: everything stays
        >>> fl.distribute_module_grads(model)
    """
    require_module(module)
    synchronize_for("broadcast_parameters", "module", module, root, group)


@internal.in_step()
def all_reduce_parameters(module: Module, *, group: ProcessGroup | None = None) -> None:
    """Average every parameter over the ranks, in place, like ``allReduceParameters`` of flashlight.

    Collective, blocking. Buffers are not changed. If ranks have drawn different initial parameters,
    call :func:`flashlight_py.broadcast_parameters` instead: the mean of n draws is too small.

    Args:
        module: Module with the same structure on every rank.
        group: Process group. Default: the world.

    Raises:
        TypeError: If ``module`` is not a Module.
        ValueError: If a parameter is sharded.
        MismatchError: If the modules differ. The message has the first different parameter.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    require_module(module)
    agreement.reject_sharded("all_reduce_parameters", module.params(), may_be_cut=True)
    members = internal.group_or_world(group)
    params = module.named_params()
    agreement.check_modules_agree(params, members)
    internal.reduce_all([param.data for param in params.values()], 1.0 / members.size, group)


class PeriodicAveraging(Structured):
    """Average of all ranks' parameters after every ``every`` steps. Ranks train alone in between.

    The algorithm is known as local SGD and is meant for ranks on a slow network. Use it without
    ``distribute_module_grads``. On every rank, call ``step()`` after each step of the optimizer. Do
    not capture it. Each rank keeps its own optimizer state. The constructor is collective.

    Args:
        module: Module with the same structure on every rank. Start from equal values
            (:func:`flashlight_py.broadcast_parameters`).
        every: Number of steps between averages, at least 1.
        group: Process group. Default: the world.

    Raises:
        TypeError: If ``module`` is not a Module, or ``every`` is not an integer.
        ValueError: If ``every`` is below 1, or the module is sharded.
        MismatchError: If modules or ``every`` differ between ranks.
        DistributedError: As :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> averaging = fl.PeriodicAveraging(model, every=2)
        >>> [averaging.step() for _ in range(5)]
        [False, True, False, True, False]
    """

    @internal.in_step()
    def __init__(self, module: Module, every: int, *, group: ProcessGroup | None = None) -> None:
        require_module(module)
        agreement.reject_sharded("PeriodicAveraging", module.params(), may_be_cut=True)
        self._every = internal.check_integer("PeriodicAveraging", "every", every, least=1)
        self._module = module
        self._group = group
        self._steps = 0
        members = internal.group_or_world(group)
        agreement.check_modules_agree(module.named_params(), members)
        agreement.check_settings_agree("PeriodicAveraging", {"every": self._every}, members)

    def step(self) -> bool:
        """Count a step; after every ``every`` steps average the parameters, in place.

        Return True if the parameters were averaged. Such a call is collective and blocking, and
        raises the errors of :func:`flashlight_py.all_reduce`.
        """
        vars(self)["_steps"] += 1  # capture() detects this and does not replay the step
        if self._steps % self._every:
            return False
        arrays = [param.data for param in self._module.params()]
        internal.reduce_all(arrays, 1.0 / internal.group_or_world(self._group).size, self._group)
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the number of counted steps, the same on every rank. Not collective."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the number of counted steps from ``state``. Not collective.

        Raises:
            KeyError: If ``state`` has no entry ``"steps"``.
            TypeError: If the entry is not an integer.
            ValueError: If the entry is negative.
        """
        self._steps = internal.check_integer("PeriodicAveraging", "steps", state["steps"])


# Plans of the buffers of modules, which are broadcast before each forward pass. Plans of other
# trees are not kept: checking that no array has changed would take as long as a new walk.
_plans: weakref.WeakKeyDictionary[Module, Plan] = weakref.WeakKeyDictionary()
_KEPT_BYTES, _MOST_KEPT = 1 << 20, 8


@as_one
def give_state(
    module: Module, state: Mapping[str, Any], root: int, group: ProcessGroup | None
) -> None:
    """Set the entries ``state`` of ``module`` to the values of ``root``. Collective, blocking."""

    def plan_of_state(tree: object, sort_keys: bool) -> Plan:
        plan = _plans.get(module)
        if sort_keys or plan is None or not plan.is_of(state):
            plan = plan_of(tree, sort_keys)
            if plan.is_of(state) and sum(array.nbytes for array in plan.arrays) <= _KEPT_BYTES:
                _plans[module] = plan
        return plan

    with internal.reject_together(internal.group_or_world(group), "synchronize", first=True):
        values = synchronize_for("synchronize", "tree", dict(state), root, group, plan_of_state)
    for name, value in values.items():
        if value is not state[name]:  # a number: synchronize returned a new one
            trees.put_buffer(module, name, value)


def require_module(module: object) -> None:
    if not isinstance(module, Module):
        raise TypeError(f"expected a flashlight_py.nn.Module, got {type(module).__name__}")


@internal.in_step()
def sync_meter(meter: Meter[Any], *, group: ProcessGroup | None = None) -> Any:
    """Return the value of ``meter`` over the data of all ranks.

    Collective, blocking. Every rank of ``group`` (default: the world) passes a meter with equal
    settings and gets the same value. The meters are not changed, so the call can be repeated.

    Raises:
        TypeError: If ``meter`` is not a Meter.
        ValueError: If this process is not in the group.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    if not isinstance(meter, Meter):
        raise TypeError(f"sync_meter: expected a fl.meter.Meter, got {type(meter).__name__}")
    return meter.value_of(all_reduce(meter.state(), group=group))


def synchronize_for(
    verb: str, noun: str, tree: SomeTree, root: int, group: ProcessGroup | None,
    walk: Callable[[object, bool], Plan] = plan_of,
) -> SomeTree:  # fmt: skip
    """Synchronize ``tree``. Errors contain ``verb`` (the function) and ``noun`` (the tree)."""
    members = internal.group_or_world(group)
    root = internal.check_rank(members.size, verb, "root", root)
    where = f"[{verb}] rank {members.rank} of {members.size}"
    # The key order of dicts rarely differs between ranks, so only a second walk sorts the keys.
    for sort_keys in (False, True):
        description, encoded, packed, error = b"", b"", None, None
        try:
            plan = walk(tree, sort_keys)
            description = plan.description + root.to_bytes(8, "little")
            # The root packs before it waits for the other ranks, which may still unpack buffers.
            if members.rank == root:
                numbers = [number for _, _, number in plan.numbers]
                encoded = pickle.dumps(numbers) if numbers else b""
                packed = _buffers_for(plan, len(encoded))
                packed.pack(plan, encoded)
        except Exception as exception:  # noqa: BLE001 - all ranks raise any error
            error = exception
        facts = error is not None, len(encoded)
        agreed, (failed, number_bytes) = agreement.equal_on_all_ranks(description, members, *facts)
        if failed:  # every rank raises the error of the first failed rank
            report = [type(error).__name__, f"{where}: {error}"] if error else None
            name, text = next(filter(None, agreement.gather_json(report, members)))
            try:
                raise _KINDS.get(name, DistributedError)(text) from error
            finally:
                del error  # its traceback refers to this frame and so to the tree
        if agreed:
            break
    else:
        raise MismatchError(f"{where}: {_difference(noun, tree, root, members)}")
    with internal.reject_together(members, verb, outcome="failed"):
        buffers = packed or _buffers_for(plan, number_bytes)
    for buffer in buffers.used:
        broadcast(buffer, root, group=members)
    if members.rank != root:
        encoded = buffers.unpack(plan)
        tree = trees.put_numbers(plan, pickle.loads(encoded) if encoded else [])
    if not plan.gpu_arrays and sum(buffer.nbytes for buffer in buffers.used) <= _KEPT_BYTES:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[plan.description, number_bytes] = buffers
    return tree


# Creating buffers for many small arrays takes as long as walking the tree, so buffers are kept.
# They depend only on the description of the tree, and keep no arrays alive.
_kept: dict[tuple[bytes, int], TreeBuffers] = {}


def _buffers_for(plan: Plan, number_bytes: int) -> TreeBuffers:
    """Take buffers out of ``_kept``, so that no other thread uses them, or create buffers."""
    return _kept.pop((plan.description, number_bytes), None) or TreeBuffers(plan, number_bytes)


def _difference(noun: str, tree: object, root: int, members: ProcessGroup) -> str:
    sorted_kinds = trees.kinds_by_path(plan_of(tree, sort_keys=True).facts)
    in_order = {**trees.kinds_by_path(plan_of(tree).facts), **sorted_kinds}  # in the user's order
    root_and_tree = [root, {path: sorted_kinds[path] for path in in_order if path in sorted_kinds}]
    roots, kinds = zip(*agreement.gather_json(root_and_tree, members), strict=True)
    if len(set(roots)) > 1:
        return (
            f"expected the same root on every rank, got {agreement.by_rank(roots)}. Nothing was "
            "changed. Pass the same root on every rank"
        )
    first = [*agreement.differences(kinds), "tree (changing meanwhile)"][0]
    return (
        f"expected the same structure on every rank, got a difference at {noun}"
        f"{first.removeprefix('tree')}. Nothing was changed. Pass {noun}s of equal structure"
    )
