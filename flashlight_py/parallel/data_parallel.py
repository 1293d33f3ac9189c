"""Data-parallel training: where a module's gradients meet communication.

Each rank computes gradients on its own share of the data; they are handed to a reducer while the
backward pass still goes on, so after ``loss.backward()`` they are the reduced ones.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed import DistributedConstants, ProcessGroup, Reducer
from flashlight_py.distributed.internal import (
    CommunicationHook,
    EagerReducer,
    check_hook,
    check_integer,
    group_or_world,
    in_step,
    plan_buckets,
)
from flashlight_py.nn import Module
from flashlight_py.parallel import agreement
from flashlight_py.parallel.gradient_pass import (
    GradientPass,
    Unit,
    gradient_of,
    gradient_sync_of,
    install,
    reduce_used,
    release,
    shared_zeros,
    used_on_any_rank,
    weigh_in_place,
)
from flashlight_py.parallel.leaf_sync import LeafSync
from flashlight_py.parallel.synchronize import give_state, require_module
from flashlight_py.structure import as_one, changed


@in_step(lambda args: group_or_world(getattr(args.get("reducer"), "group", args.get("group"))))
def distribute_module_grads(
    module: Module,
    scale: float | None = None,
    reducer: Reducer | None = None,
    *,
    hook: CommunicationHook | None = None,
    leaves: int | None = None,
    group: ProcessGroup | None = None,
    bucket_bytes: int | None = None,
    ignore: Iterable[str | Variable] = (),
    broadcast_buffers: bool = True,
    check_finite: bool = False,
) -> None:
    """Reduce the module's gradients over the ranks in every backward pass from now on.

    Collective. Afterwards, when ``backward()`` returns, every parameter's gradient is ``scale``
    times the sum over ranks, in place. A parameter that a rank does not use counts as zeros there;
    one that no rank uses has the gradient None, so that no optimizer moves it. Each rank must use
    at least one. Gradients become views into flat buckets, which travel while the pass goes on.
    A second call replaces the first one. Gradient hooks and ``Module.before_forward`` are used.

    Gradients are reduced, parameters are not: call :func:`flashlight_py.broadcast_parameters`
    before. The group's rank 0 warns if ranks start from different parameters.

    Several synchronised passes without ``zero_grad`` between them reduce the sum so far again:
    right with the default scale, else use :func:`no_sync` for all passes but the last.

    Args:
        module: the same on every rank.
        scale: factor of the sums, default 1 / size of the group: the mean.
        reducer: receives each gradient instead of the buckets; its scale and group are used.
        hook: reduces the buckets instead of all_reduce, such as ``fl.Float16Compression()``; every
            rank must create an equal hook, for this module only.
        leaves: number of parts of every global batch, whose gradients are added one by one, so that
            the bits do not depend on the number of ranks; at most as many ranks have work. Backward
            passes run in a loop over :func:`flashlight_py.leaves`, with NumPy arrays. BLAS uses one
            thread from this call on, and rank 0's random state and buffers are copied to all ranks.
        group: the process group, default the world.
        bucket_bytes: maximum size of a bucket in bytes, default
            ``DistributedConstants.COALESCE_CACHE_SIZE`` (20 MiB). A larger gradient has a bucket
            of its own.
        ignore: parameters and buffers that differ between ranks, by name (as in ``state_dict()``)
            or as Variables. They are neither compared nor sent, and keep their gradient hooks.
        broadcast_buffers: whether ``module(x)`` in training sends every rank the buffers (see
            ``Module.add_buffer``) of the group's rank 0, collective and blocking; not within
            ``no_sync``, nor within ``join``, whose end does it. With ``leaves`` buffers change by
            the mean of the leaves' changes.
        check_finite: look for NaN and infinity in every pass, before gradients are sent and in
            their sums; with ``hook`` or ``reducer`` it takes a message more. Such steps are not
            captured. ``amp.DynamicScaler`` finds and skips them itself.

    Raises:
        FloatingPointError: by ``backward()`` with ``check_finite``, on every rank: gradients are
            not finite; names the ranks and the parameters. All gradients are None then.
        TypeError: ``module`` is no Module, ``leaves`` is no integer, ``hook`` is not callable
            or compresses other dtypes, ``ignore`` holds something else.
        ValueError: ``reducer`` is passed beside ``scale``, ``hook``, ``group`` or
            ``bucket_bytes``; ``leaves`` beside these or ``reducer``, below 1, for CuPy arrays or
            where BLAS cannot be set to one thread; ``bucket_bytes`` is not positive; ``ignore``
            names what the module has not; there is nothing to train; without ``leaves``, a
            parameter is sharded.
        MismatchError: ranks' modules differ; names the first parameter that does. With ``leaves``:
            ranks compute with another NumPy, BLAS, core type or CPU features; names the hosts.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    require_module(module)
    if leaves is None:
        agreement.refuse_sharded("distribute_module_grads", module.params(), may_be_cut=True)
    given = {"scale": scale, "hook": hook, "group": group, "bucket_bytes": bucket_bytes}
    beside = [name for name, value in (*given.items(), ("reducer", reducer)) if value is not None]
    if leaves is not None:
        leaves = check_integer("distribute_module_grads", "leaves", leaves, least=1)
        for name in (*beside, *(["check_finite"] if check_finite else ())):
            if name != "group":
                raise ValueError(
                    "distribute_module_grads: leaves adds up gradients in an order of its own, to "
                    f"the mean over the global batch, and takes no {name}"
                )
    if reducer is not None and len(beside) > 1:
        raise ValueError(
            "distribute_module_grads: a reducer has its own scale, hook, group and sizes of "
            f"buckets; pass {beside[0]} to the reducer, not beside it"
        )
    limit = DistributedConstants.COALESCE_CACHE_SIZE if bucket_bytes is None else bucket_bytes
    if limit <= 0:
        raise ValueError(f"distribute_module_grads: bucket_bytes must be positive, got {limit}")
    ignored = _names(module, ignore)
    named = {name: param for name, param in module.named_params().items() if name not in ignored}
    in_order = [param for param in named.values() if param.calc_grad][::-1]  # as a pass ends them
    if not in_order:
        raise ValueError("distribute_module_grads: the module has no parameter with calc_grad")
    _check_arrays(named if leaves is not None else {}, hook, in_order)
    group = group if reducer is None else reducer.group
    members = group_or_world(group)
    checked = ["gradients must be finite (check_finite)"] if check_finite else []
    digests = agreement.check_modules_agree(named, members, with_values=True, also=checked)
    release(module)
    buffers = [name for name in module.buffers if broadcast_buffers and name not in ignored]
    sync: GradientPass[Any]
    if leaves is not None:
        agreement.check_arithmetic("distribute_module_grads", leaves, members)
        random.generator()  # so that there is one, whose state is part of what follows
        random.load_state_dict(members.broadcast_object(random.state_dict()))
        sync = LeafSync(module, in_order, buffers, leaves, group)
    elif reducer is not None:
        sync = GradientSync(
            [GradientUnit([param], _buffer_of(param)) for param in in_order], reducer
        )
    else:
        sync = _bucketed(in_order, scale, hook, group, limit)
    sync.ignored = ignored
    if check_finite and isinstance(sync, GradientSync):
        sync.checked = {param: name for name, param in named.items()}
    install(module, sync, before_forward if buffers and leaves is None else None)
    agreement.warn_of_differing("distribute_module_grads", digests, members)


def _buffer_of(param: Variable) -> Array:
    """Return the memory of a gradient: the user's, where that lies in one piece, or new."""
    own = param.grad_buffer
    if own is not None and own.flags.c_contiguous:
        return own
    return array_module(param.data).zeros(param.shape, param.dtype)  # type: ignore[no-any-return]


class GradientUnit(Unit):
    """Gradients that travel as one array: ``flat``, of which each is a part."""

    def __init__(self, params: Sequence[Variable], flat: Array) -> None:
        super().__init__(params)
        self.flat, start = flat, 0
        for param in params:
            param.grad_buffer = flat.reshape(-1)[start : start + param.size].reshape(param.shape)
            start += param.size


class GradientSync(GradientPass[GradientUnit]):
    """Passes units to ``reducer``, which sums them in place, as hooks complete them.

    ``flags``: space for a number of each parameter in the array of the last unit; None: whether it
    was used travels in a message of its own. ``averages``: the reducer leaves the mean over the
    ranks. ``checked``, where it is set, names parameters whose gradients must be finite.
    """

    checked: Mapping[Variable, str] | None = None

    def __init__(
        self,
        units: list[GradientUnit],
        reducer: Reducer,
        flags: Array | None = None,
        averages: bool = False,
    ) -> None:
        super().__init__(reducer, units)
        self.averages, self.ends_with_message = averages, flags is None
        self._flags = flags
        self._not_finite: list[str] = []  # on this rank, in this pass
        self.install()

    def _give(self, unit: GradientUnit, weight: float) -> None:
        self._unused.update([p for p in unit.params if not weight or p.grad is None])
        for param in unit.params:
            grad, home = param.grad, param.grad_buffer
            # Also if the pass left it out or a user set it.
            if grad is not home and home is not None:
                home[...] = 0 if grad is None else grad
                param.grad = home
        if self.checked is not None and not _is_finite(unit.flat):
            wrong = [each for each in unit.params if not _is_finite(gradient_of(each))]
            self._not_finite += [self.checked[param] for param in wrong]
        if weight != 1.0:
            weigh_in_place(unit.flat, weight)
        flags = self._flags
        if flags is not None and unit is self._units[-1]:
            flags.fill(1)
            if self._unused:
                flags[...] = array_module(flags).asarray(self._used_here(), flags.dtype)
        self.reducer.add(unit.flat)

    def _sent_next(self) -> Iterable[Array]:
        return [self._units[min(self._given, len(self._units) - 1)].flat]

    def _finish(self) -> None:
        self.reducer.finalize()
        if self.checked is not None:
            self._require_finite()
        flags: Any = self._flags
        if flags is None:
            flags = used_on_any_rank(self._used_here(), self.reducer.group)
        elif not self._unused:  # a GPU need not be waited for
            return
        kept = _kept(flags, list(map(gradient_of, self._params)))
        for param, is_kept in zip(self._params, kept, strict=True):
            if not is_kept:
                param.grad = None

    def _require_finite(self) -> None:
        """Raise on all ranks where a gradient is not finite, or a sum: they all see the same one.

        A hook may hide what a rank had, so then they ask each other.
        """
        mine, self._not_finite = self._not_finite, []
        wrong = bool(mine) or not all(_is_finite(unit.flat) for unit in self._units)
        group = group_or_world(self.reducer.group)
        if self._flags is None:
            (wrong,) = used_on_any_rank([wrong], group)
        if not wrong:
            return
        first = ", ".join(mine[:3]) + f" and {len(mine) - 3} more" * (len(mine) > 3)
        ranks = enumerate(group.all_gather_object(first))
        found = "; ".join(f"rank {rank}: {names}" for rank, names in ranks if names)
        raise FloatingPointError(
            f"[backward] rank {group.rank} of {group.size}: gradients are not finite ("
            f"{found or 'no rank has such ones, but their sums are too large'}). They are None on "
            "every rank now; look at the batch and the loss there"
        )


@as_one
def _kept(flags: Any, grads: list[Array]) -> list[bool]:
    """Return which gradients stay: a rank has used the parameter, or a hook has added to it."""
    flags = flags if isinstance(flags, list) else flags.tolist()
    return [bool(flag) or bool(grad.any()) for flag, grad in zip(flags, grads, strict=True)]


def _is_finite(array: Array) -> bool:
    """Return whether there is neither NaN nor infinity; one sum, as a rule, says so."""
    xp = array_module(array)
    with np.errstate(all="ignore"):
        return bool(xp.isfinite(array.sum())) or bool(xp.isfinite(array).all())


# The backward pass accumulates into shared memory, so nothing is packed, copied in or copied out.
# A flag of each parameter is summed at the end of the last bucket: one that no rank used is to
# have no gradient, and a message of its own would cost a small step a round trip.
def _bucketed(
    params: Sequence[Variable],
    scale: float | None,
    hook: CommunicationHook | None,
    group: ProcessGroup | None,
    limit: int,
) -> GradientSync:
    """Make all gradients views into flat buckets of at most ``limit`` bytes. Collective, blocking.

    A bucket holds one dtype on one device. A hook may do something else than sum: then no flags.
    """
    nbytes, dtypes = [param.data.nbytes for param in params], [param.dtype for param in params]
    planned = [[params[i] for i in bucket] for bucket in plan_buckets(nbytes, limit, dtypes)]
    units = []
    for bucket in planned:
        size, like = sum(param.size for param in bucket), bucket[0].data
        room = size + (len(params) if hook is None and bucket is planned[-1] else 0)
        if is_cupy(like):
            flat = array_module(like).zeros(room, like.dtype)
        else:  # in memory that needs no copy to be reduced
            flat = shared_zeros(room, like.dtype, group)
        units.append(GradientUnit(bucket, flat))
    factor = 1.0 / group_or_world(group).size if scale is None else scale
    parts = [[p.grad_buffer for p in unit.params if p.grad_buffer is not None] for unit in units]
    reducer = EagerReducer(factor, group=group, hook=hook, parts=parts)
    return GradientSync(units, reducer, flat[size:] if hook is None else None, scale is None)


def _check_arrays(
    of_leaves: Mapping[str, Variable], hook: CommunicationHook | None, params: Sequence[Variable]
) -> None:
    if hook is not None:
        check_hook(hook, [[param.data] for param in params])
    for name, param in of_leaves.items():
        if is_cupy(param.data):
            raise ValueError(
                f"distribute_module_grads: leaves is for NumPy arrays, and {name!r} is a CuPy "
                "array: the bits that a GPU computes depend on its model and its libraries"
            )


def _names(module: Module, ignore: Iterable[str | Variable]) -> frozenset[str]:
    """Return the names of the parameters and buffers of ``module`` that are to be left alone."""
    if isinstance(ignore, (str, Variable)):
        ignore = (ignore,)
    names = {param: name for name, param in module.named_params().items()}
    known = {*names.values(), *module.buffers}
    found: set[str] = set()
    for each in ignore:
        if not isinstance(each, (str, Variable)):
            raise TypeError(
                "distribute_module_grads: ignore takes names and Variables, got "
                f"{type(each).__name__}"
            )
        name = names.get(each) if isinstance(each, Variable) else each
        if name not in known:
            raise ValueError(
                f"distribute_module_grads: ignore has {each!r}, which is no parameter or buffer of "
                f"this module; it has {', '.join(sorted(known))}"
            )
        found.add(name)
    return frozenset(found)


def before_forward(sync: GradientPass[Any], module: Module) -> None:
    """Make the buffers the same, where all ranks begin the same synchronised pass."""
    sync.check("forward")
    if module.training and sync.enabled and sync.weigh is None:
        state = {name: each for name, each in module.buffers.items() if name not in sync.ignored}
        if state:
            give_state(module, state, 0, sync.reducer.group)


@contextlib.contextmanager
def no_sync(module: Module) -> Iterator[None]:
    """Within the context, backward passes only accumulate this rank's own gradients.

    The next backward pass outside reduces everything that has accumulated. Not collective by
    itself, but every rank must leave out the same passes.

    Raises:
        ValueError: neither ``distribute_module_grads`` nor ``fully_shard`` was called for this
            module, or the former with ``leaves``.
    """
    sync = gradient_sync_of(module, "no_sync")
    before, sync.enabled = sync.enabled, False
    changed()
    try:
        yield
    finally:
        sync.enabled = before
        changed()


@in_step()
def all_reduce_gradients(
    module: Module, scale: float = 1.0, *, group: ProcessGroup | None = None
) -> None:
    """Sum every gradient over the ranks and multiply by ``scale``, in place, after ``backward()``.

    The same by hand as :func:`distribute_module_grads` does in every pass. Collective, blocking.
    A gradient that is None on this rank and not on another counts as zeros, and is an array
    afterwards; one that is None on every rank stays so.

    Args:
        module: the same on every rank.
        scale: factor of the sums.
        group: the process group, default the world.

    Raises:
        TypeError: ``module`` is no Module.
        ValueError: a parameter is sharded.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    require_module(module)
    agreement.refuse_sharded("all_reduce_gradients", module.params())
    reduce_used([param for param in module.params() if param.calc_grad], scale, group)
