"""The same values on every rank: those of one rank, in one transfer, or the mean over all."""

import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flashlight_py.distributed import ProcessGroup, all_reduce, broadcast
from flashlight_py.distributed.internal import (
    check_integer,
    check_rank,
    group_or_world,
    in_step,
    reduce_all,
    reject_together,
)
from flashlight_py.errors import DistributedError, MismatchError
from flashlight_py.meter import Meter
from flashlight_py.nn import Module
from flashlight_py.parallel import agreement
from flashlight_py.parallel.tree import (
    Plan,
    TreeBuffers,
    kinds_by_path,
    plan_of,
    put_buffer,
    put_numbers,
)
from flashlight_py.structure import Structured, as_one

SomeTree = TypeVar("SomeTree")

_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


@in_step()
def synchronize(tree: SomeTree, root: int = 0, *, group: ProcessGroup | None = None) -> SomeTree:
    """Set every rank's values to those of rank ``root``, of all arrays and numbers in ``tree``.

    Collective, blocking. Arrays (NumPy, CuPy, tensors with DLPack, of any shape, memory layout and
    dtype but ``object``) are changed in place. So are dicts, lists and dataclasses, whose numbers
    (bool, int, float, complex, NumPy scalars; of exactly these types) are replaced; tuples and
    frozen dataclasses with numbers in them are made anew. A module of ``fl.nn`` or PyTorch stands
    for its parameters and buffers, a ``fl.Variable`` for its array, an optimizer or a schedule of
    ``fl.optim`` for its state and settings without parameters. Other objects, such as None, strings
    and functions, stay as they are and need not be alike.

    All arrays travel in one packed transfer for the CPU and one for the GPU, which takes as much
    memory as they do. An array or a container that is met twice is sent once.

    Args:
        tree: the same structure on every rank: types of containers, keys (in any order),
            attributes, lengths, shapes, dtypes, and what is the same object as what.
        root: rank in the group.
        group: the process group, default the world.

    Returns:
        ``tree``, or what has been made anew where it is a number or immutable itself.

    Raises:
        ValueError: ``root`` is no rank of the group; or, raised on every rank, an array in some
            rank's tree is read-only, a Variable was computed from others and needs a gradient, or
            a parameter is sharded.
        TypeError: on every rank: an array in some rank's tree holds Python objects.
        MismatchError: on every rank: the trees differ; names the first path that does, and what
            is there on which rank. Nothing was changed.
        DistributedError: as :func:`flashlight_py.all_reduce`; the tree was not changed.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1, momentum=0.9)
        >>> tree = {"model": model, "optimizer": optimizer, "epoch": 3}
        >>> fl.synchronize(tree)["epoch"]  # one process: everything stays
        3
    """
    return synchronize_for("synchronize", "tree", tree, root, group)


@in_step()
def broadcast_parameters(
    module: Module, root: int = 0, *, group: ProcessGroup | None = None
) -> None:
    """Set every rank's parameters and buffers to those of rank ``root``, in place.

    Collective, blocking; one packed transfer. Call it after ``distributed_init`` and before
    training, since each rank may have drawn other parameters.
    :func:`flashlight_py.all_reduce_parameters` takes the mean instead.

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


@in_step()
def all_reduce_parameters(module: Module, *, group: ProcessGroup | None = None) -> None:
    """Average every parameter over the ranks, in place, as flashlight does.

    Collective, blocking. Buffers stay as they are. If each rank has drawn its own parameters, call
    :func:`flashlight_py.broadcast_parameters` instead: the mean of n draws is too small.

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
    agreement.refuse_sharded("all_reduce_parameters", module.params(), may_be_cut=True)
    members = group_or_world(group)
    params = module.named_params()
    agreement.check_modules_agree(params, members)
    reduce_all([param.data for param in params.values()], 1.0 / members.size, group)


class PeriodicAveraging(Structured):
    """Lets ranks train by themselves and averages their parameters every ``every`` steps.

    Also known as local SGD, for ranks that are joined by a slow network. Use it without
    ``distribute_module_grads``, and call ``step()`` after the optimizer's, on every rank equally
    often. The optimizer's state stays each rank's own. Making it is collective, as is ``step``
    when it averages. A captured step that calls it stays eager: call it after that.

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

    @in_step()
    def __init__(self, module: Module, every: int, *, group: ProcessGroup | None = None) -> None:
        require_module(module)
        agreement.refuse_sharded("PeriodicAveraging", module.params(), may_be_cut=True)
        self._every = check_integer("PeriodicAveraging", "every", every, least=1)
        self._module = module
        self._group = group
        self._steps = 0
        members = group_or_world(group)
        agreement.check_modules_agree(module.named_params(), members)
        agreement.check_settings_agree("PeriodicAveraging", {"every": self._every}, members)

    def step(self) -> bool:
        """Count a step; after every ``every``-th one average the parameters, in place.

        Returns:
            Whether they were averaged: then it was collective, and blocked.

        Raises:
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        vars(self)["_steps"] += 1  # by which captured steps see that they cannot replay this
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
        self._steps = check_integer("PeriodicAveraging", "steps", state["steps"])


# Of modules, which give their buffers before each forward pass. Plans of other trees are not kept:
# to see that none of their arrays has changed would take as long as to walk through them.
_plans: weakref.WeakKeyDictionary[Module, Plan] = weakref.WeakKeyDictionary()
_KEPT_BYTES, _MOST_KEPT = 1 << 20, 8


@as_one
def give_state(
    module: Module, state: Mapping[str, Any], root: int, group: ProcessGroup | None
) -> None:
    """Synchronize ``state``, entries of ``module.state_dict()``. Collective, blocking."""

    def plan_of_state(tree: object, sort_keys: bool) -> Plan:
        plan = _plans.get(module)
        if sort_keys or plan is None or not plan.is_of(state):
            plan = plan_of(tree, sort_keys)
            if plan.is_of(state) and sum(array.nbytes for array in plan.arrays) <= _KEPT_BYTES:
                _plans[module] = plan
        return plan

    with reject_together(group_or_world(group), "synchronize", first=True):
        given = synchronize_for("synchronize", "tree", dict(state), root, group, plan_of_state)
    for name, value in given.items():
        if value is not state[name]:  # a number, which cannot be changed in place
            put_buffer(module, name, value)


def require_module(module: object) -> None:
    """Raise a TypeError for what is no module."""
    if not isinstance(module, Module):
        raise TypeError(f"expected a flashlight_py.nn.Module, got {type(module).__name__}")


@in_step()
def sync_meter(meter: Meter, *, group: ProcessGroup | None = None) -> Any:
    """Return the value that ``meter`` would have if it had seen what all ranks' meters saw.

    Collective, blocking. Every rank of ``group`` (default the world) calls it with a meter made
    alike, and gets the same value. The meters stay as they are, so it can be repeated at any time.

    Raises:
        TypeError: ``meter`` is no Meter.
        ValueError: this process is not in the group.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    if not isinstance(meter, Meter):
        raise TypeError(f"sync_meter takes a flashlight_py.meter.Meter, got {type(meter).__name__}")
    return meter.value_of(all_reduce(meter.state(), group=group))


def synchronize_for(
    verb: str,
    noun: str,
    tree: SomeTree,
    root: int,
    group: ProcessGroup | None,
    walk: Callable[[object, bool], Plan] = plan_of,
) -> SomeTree:
    """Do what ``synchronize`` does for ``verb``, whose errors call the tree a ``noun``."""
    members = group_or_world(group)
    root = check_rank(members.size, verb, "root", root)
    where = f"[{verb}] rank {members.rank} of {members.size}"
    # Dicts may have their keys in another order on other ranks. Few have, so keys are sorted
    # only where the first walks do not agree.
    for sort_keys in (False, True):
        mine, encoded, packed, error = b"", b"", None, None
        try:
            plan = walk(tree, sort_keys)
            mine = plan.description + root.to_bytes(8, "little")
            # The root packs before it receives anything from the others, who may still be
            # unpacking what arrived last.
            if members.rank == root:
                numbers = [number for _, _, number in plan.numbers]
                encoded = pickle.dumps(numbers) if numbers else b""
                packed = _buffers_for(plan, len(encoded))
                packed.pack(plan, encoded)
        except Exception as found:  # noqa: BLE001 - whatever it is, all ranks raise it
            error = found
        facts = error is not None, len(encoded)
        agreed, (failed, number_bytes) = agreement.all_have(mine, members, *facts)
        if failed:  # on every rank, by what the first rank that failed reports
            report = [type(error).__name__, f"{where}: {error}"] if error else None
            name, text = next(filter(None, agreement.of_all_ranks(report, members)))
            try:
                raise _KINDS.get(name, DistributedError)(text) from error
            finally:
                del error  # whose traceback has this frame, and the frame the tree
        if agreed:
            break
    else:
        raise MismatchError(f"{where}: {_what_differs(noun, tree, root, members)}")
    with reject_together(members, verb, outcome="failed"):
        buffers = packed or _buffers_for(plan, number_bytes)
    for buffer in buffers.used:
        broadcast(buffer, root, group=members)
    if members.rank != root:
        encoded = buffers.unpack(plan)
        tree = put_numbers(plan, pickle.loads(encoded) if encoded else [])
    if not plan.gpu_arrays and sum(buffer.nbytes for buffer in buffers.used) <= _KEPT_BYTES:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[plan.description, number_bytes] = buffers
    return tree


# To make buffers for many small arrays takes as long as to walk through the tree. They depend on
# its description alone, so nothing keeps its arrays, and they serve also after these have changed.
_kept: dict[tuple[bytes, int], TreeBuffers] = {}


def _buffers_for(plan: Plan, number_bytes: int) -> TreeBuffers:
    """Return buffers for ``plan``, which no other thread gets until they are kept again."""
    return _kept.pop((plan.description, number_bytes), None) or TreeBuffers(plan, number_bytes)


def _what_differs(noun: str, tree: object, root: int, members: ProcessGroup) -> str:
    alike = kinds_by_path(plan_of(tree, sort_keys=True).facts)
    in_order = {**kinds_by_path(plan_of(tree).facts), **alike}  # as users know it
    mine = [root, {path: alike[path] for path in in_order if path in alike}]
    roots, trees = zip(*agreement.of_all_ranks(mine, members), strict=True)
    if len(set(roots)) > 1:
        return (
            f"the ranks pass different roots ({agreement.by_rank(roots)}). Nothing was changed; "
            "pass the same root on every rank"
        )
    first = [*agreement.differences(trees), "tree (changing meanwhile)"][0]
    return (
        f"the {noun}s differ at {noun}{first.removeprefix('tree')}. Nothing was changed; pass a "
        f"{noun} of the same structure on every rank"
    )
