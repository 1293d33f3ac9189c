"""Data-parallel training: gradients of a module are reduced over the ranks.

Each rank computes gradients on its own share of the data. The gradients are passed to a reducer
while the backward pass still runs, so they are reduced when ``loss.backward()`` returns.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed import DistributedConstants, ProcessGroup, Reducer, internal
from flashlight_py.distributed.internal import CommunicationHook, group_or_world, in_step
from flashlight_py.errors import MismatchError
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer
from flashlight_py.parallel import agreement, gradient_pass
from flashlight_py.parallel.leaf_sync import LeafSync
from flashlight_py.parallel.synchronize import give_state, require_module, synchronize
from flashlight_py.structure import as_one, changed


@in_step(lambda args: group_or_world(getattr(args.get("reducer"), "group", args.get("group"))))
def distribute_module_grads(
    module: Module, scale: float | None = None, reducer: Reducer | None = None, *,
    hook: CommunicationHook | None = None, leaves: int | None = None,
    group: ProcessGroup | None = None, bucket_bytes: int | None = None,
    ignore: Iterable[str | Variable] = (), broadcast_buffers: bool = True,
    check_finite: bool = False,
) -> None:  # fmt: skip
    """Reduce the module's gradients over the ranks in every backward pass from now on.

    Collective. When ``backward()`` returns, every parameter's gradient is ``scale`` times the sum
    over ranks, in place. If a rank does not use a parameter, its gradient on this rank counts as
    zeros. If no rank uses a parameter, its gradient is None and optimizers do not change it. Each
    rank must use at least one parameter. Gradients become views of larger arrays, the buckets. A
    bucket is sent during the pass as soon as its gradients are complete. A second call for the same
    module undoes the first call. The call replaces the parameters' gradient hooks and, if there are
    buffers to broadcast, ``Module.before_forward``.

    Only gradients are reduced. Call :func:`flashlight_py.broadcast_parameters` first to start all
    ranks from the same parameters. Rank 0 of the group warns if the parameters differ.

    If several synchronised passes run without ``zero_grad``, each pass reduces the accumulated sum
    again. With the default scale, the result is still the mean of the accumulated gradients. With
    another scale, run all passes except the last one within :func:`no_sync`.

    Args:
        module: Module with the same structure on every rank.
        scale: Factor of the sums. Default: 1 / size of the group, which gives the mean.
        reducer: Reducer of each gradient instead of the buckets, with its own scale and group.
        hook: Function that reduces the buckets instead of all_reduce, for example
            ``fl.Float16Compression()``. Every rank must create an equal hook, for this module only.
        leaves: Number of parts of every global batch. Their gradients are added in a fixed order,
            so the bits do not depend on the number of ranks. At most ``leaves`` ranks have work.
            Backward passes run in a loop over :func:`flashlight_py.leaves`, with NumPy arrays. BLAS
            uses one thread from this call on. All ranks get the random state and buffers of rank 0.
        group: Process group. Default: the world.
        bucket_bytes: Maximum size of a bucket in bytes. Default:
            ``DistributedConstants.COALESCE_CACHE_SIZE`` (20 MiB). A larger gradient is sent alone.
        ignore: Parameters and buffers that differ between ranks, by name (as in ``state_dict()``)
            or as Variables. They are not compared or sent, and keep their gradient hooks.
        broadcast_buffers: Whether ``module(x)`` in training first copies the buffers (see
            ``Module.add_buffer``) of the group's rank 0 to every rank, collective and blocking.
            ``no_sync`` skips the copy; ``join`` copies only at its end. With ``leaves``, buffers
            change by the mean of the changes of the leaves.
        check_finite: Whether every pass checks gradients and their sums for NaN and infinity. With
            ``hook`` or ``reducer`` the check costs one more message. Such steps are not captured.
            ``amp.DynamicScaler`` itself detects non-finite gradients and skips the step.

    Raises:
        FloatingPointError: If ``check_finite`` is set and gradients are not finite. ``backward()``
            raises it on every rank, with ranks and parameters, and sets all gradients to None.
        TypeError: If ``module`` is not a Module, ``leaves`` is not an integer, ``hook`` is not
            callable or lacks a dtype, or ``ignore`` contains an object of another type.
        ValueError: If ``leaves`` is below 1, ``bucket_bytes`` is not positive, ``ignore`` has an
            unknown name, no parameter can be trained, or (without ``leaves``) one is sharded.
            ``reducer`` excludes ``scale``, ``hook``, ``group`` and ``bucket_bytes``. ``leaves``
            excludes ``scale``, ``reducer``, ``hook``, ``bucket_bytes``, ``check_finite``, CuPy
            arrays, and a BLAS with several threads unless it is OpenBLAS.
        MismatchError: If the modules differ. The message has the first different parameter. With
            ``leaves``, also if NumPy, BLAS, core type or CPU features differ, with the hosts.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    require_module(module)
    if leaves is None:
        agreement.reject_sharded("distribute_module_grads", module.params(), may_be_cut=True)
    values = {"scale": scale, "hook": hook, "group": group, "bucket_bytes": bucket_bytes}
    options = [name for name, value in (*values.items(), ("reducer", reducer)) if value is not None]
    if leaves is not None:
        leaves = internal.check_integer("distribute_module_grads", "leaves", leaves, least=1)
        for name in (*options, *(["check_finite"] if check_finite else ())):
            if name != "group":
                raise ValueError(
                    f"distribute_module_grads: expected leaves without {name}, got both. Remove "
                    f"{name}: leaves always computes the mean over the global batch"
                )
    if reducer is not None and len(options) > 1:
        raise ValueError(
            f"distribute_module_grads: expected a reducer without {options[0]}, got both. Pass "
            f"{options[0]} to the constructor of the reducer"
        )
    limit = DistributedConstants.COALESCE_CACHE_SIZE if bucket_bytes is None else bucket_bytes
    if limit <= 0:
        raise ValueError(f"distribute_module_grads: bucket_bytes must be positive, got {limit}")
    ignored = _names(module, ignore)
    named = {name: param for name, param in module.named_params().items() if name not in ignored}
    in_order = [param for param in named.values() if param.calc_grad][::-1]  # order of backward()
    if not in_order:
        raise ValueError(
            "distribute_module_grads: expected at least one parameter with calc_grad, got 0"
        )
    _check_arrays(named if leaves is not None else {}, hook, in_order)
    group = group if reducer is None else reducer.group
    members = group_or_world(group)
    checked = ["gradients must be finite (check_finite)"] if check_finite else []
    digests = agreement.check_modules_agree(named, members, with_values=True, also=checked)
    gradient_pass.drop_pass(module)
    buffers = [name for name in module.buffers if broadcast_buffers and name not in ignored]
    sync: gradient_pass.GradientPass[Any]
    if leaves is not None:
        agreement.check_arithmetic("distribute_module_grads", leaves, members)
        random.generator()  # state_dict() contains only generators that were used
        random.load_state_dict(members.broadcast_object(random.state_dict()))
        sync = LeafSync(module, in_order, buffers, leaves, group)
    elif reducer is not None:
        sync = GradientSync(
            [GradientBucket([param], _buffer_of(param)) for param in in_order], reducer
        )
    else:
        sync = _bucketed(in_order, scale, hook, group, limit)
    sync.ignored = ignored
    if check_finite and isinstance(sync, GradientSync):
        sync.checked = {param: name for name, param in named.items()}
    gradient_pass.install_pass(module, sync, before_forward if buffers and leaves is None else None)
    agreement.warn_if_parameters_differ("distribute_module_grads", digests, members)


def _buffer_of(param: Variable) -> Array:
    """Return the memory of a gradient: the user's buffer if it is contiguous, or a new array."""
    buffer = param.grad_buffer
    if buffer is not None and buffer.flags.c_contiguous:
        return buffer
    return array_module(param.data).zeros(param.shape, param.dtype)  # type: ignore[no-any-return]


class GradientBucket(gradient_pass.PassBucket):
    """Gradients that are sent as one array, ``flat``. Each gradient is a view into ``flat``."""

    def __init__(self, params: Sequence[Variable], flat: Array) -> None:
        super().__init__(params)
        self.flat, start = flat, 0
        for param in params:
            param.grad_buffer = flat.reshape(-1)[start : start + param.size].reshape(param.shape)
            start += param.size


class GradientSync(gradient_pass.GradientPass[GradientBucket]):
    """A pass that gives complete buckets to ``reducer``, which sums them in place.

    ``flags`` are the last elements of the last bucket, one for each parameter: 1 if this rank used
    the parameter, else 0. The reducer sums them, too. If ``flags`` is None, a separate message
    exchanges the numbers. ``averages`` is True if the reducer returns the mean over ranks.
    ``checked`` has the names of parameters whose gradients must be finite, or is None.
    """

    checked: Mapping[Variable, str] | None = None

    def __init__(
        self, buckets: list[GradientBucket], reducer: Reducer, flags: Array | None = None,
        averages: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(reducer, buckets)
        self.averages, self.ends_with_message = averages, flags is None
        self._flags = flags
        self._not_finite: list[str] = []  # parameters with NaN or infinity in this pass
        self.register_hooks()

    def _send_bucket(self, bucket: GradientBucket, weight: float) -> None:
        self._unused.update([p for p in bucket.params if not weight or p.grad is None])
        for param in bucket.params:
            grad, home = param.grad, param.grad_buffer
            # The pass may not have used the parameter, or the user has set another gradient array.
            if grad is not home and home is not None:
                home[...] = 0 if grad is None else grad
                param.grad = home
        if self.checked is not None and not _is_finite(bucket.flat):
            wrong = [p for p in bucket.params if not _is_finite(gradient_pass.gradient_of(p))]
            self._not_finite += [self.checked[param] for param in wrong]
        if weight != 1.0:
            gradient_pass.weigh_in_place(bucket.flat, weight)
        flags = self._flags
        if flags is not None and bucket is self._buckets[-1]:
            flags.fill(1)
            if self._unused:
                flags[...] = array_module(flags).asarray(self._used_params(), flags.dtype)
        self.reducer.add(bucket.flat)

    def _next_arrays(self) -> Iterable[Array]:
        return [self._buckets[min(self._sent, len(self._buckets) - 1)].flat]

    def _finish(self) -> None:
        self.reducer.finalize()
        if self.checked is not None:
            self._require_finite()
        flags: Any = self._flags
        if flags is None:
            flags = gradient_pass.used_on_any_rank(self._used_params(), self.reducer.group)
        elif not self._unused:  # this rank used all parameters: all gradients are kept
            return
        kept = _kept(flags, list(map(gradient_pass.gradient_of, self._params)))
        for param, is_kept in zip(self._params, kept, strict=True):
            if not is_kept:
                param.grad = None

    def _require_finite(self) -> None:
        """Raise FloatingPointError on all ranks if a gradient or sum on any rank is not finite."""
        names, self._not_finite = self._not_finite, []
        wrong = bool(names) or not all(_is_finite(bucket.flat) for bucket in self._buckets)
        group = group_or_world(self.reducer.group)
        if self._flags is None:
            (wrong,) = gradient_pass.used_on_any_rank([wrong], group)
        if not wrong:
            return
        text = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
        texts = enumerate(group.all_gather_object(text))
        names_by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in texts if text)
        raise FloatingPointError(
            f"[backward] rank {group.rank} of {group.size}: expected finite gradients, got NaN or "
            f"infinity ({names_by_rank or 'only in the sums over ranks, which overflow'}). All "
            "gradients are now None. Check the batch and the loss"
        )


@as_one
def _kept(flags: Any, grads: list[Array]) -> list[bool]:
    """Return for each gradient whether to keep it: its flag or one of its elements is not 0."""
    flags = flags if isinstance(flags, list) else flags.tolist()
    return [bool(flag) or bool(grad.any()) for flag, grad in zip(flags, grads, strict=True)]


def _is_finite(array: Array) -> bool:
    """Return whether all elements are finite. If their sum is finite, only the sum is computed."""
    xp = array_module(array)
    with np.errstate(all="ignore"):
        return bool(xp.isfinite(array.sum())) or bool(xp.isfinite(array).all())


# The backward pass accumulates into shared memory, so gradients are not packed or copied. The flags
# show which parameters no rank used: their gradients must become None. Flags are the end of the
# last bucket and are summed with it, because a separate message would cost each step a round trip.
# A hook gets no flags, because it need not compute a sum.
def _bucketed(
    params: Sequence[Variable], scale: float | None, hook: CommunicationHook | None,
    group: ProcessGroup | None, limit: int,
) -> GradientSync:  # fmt: skip
    """Make gradients views of flat buckets, each of one dtype and device. Collective, blocking."""
    nbytes, dtypes = [param.data.nbytes for param in params], [param.dtype for param in params]
    planned = [
        [params[i] for i in indices] for indices in internal.plan_buckets(nbytes, limit, dtypes)
    ]
    buckets = []
    for bucket_params in planned:
        size, like = sum(param.size for param in bucket_params), bucket_params[0].data
        room = size + (len(params) if hook is None and bucket_params is planned[-1] else 0)
        if is_cupy(like):
            flat = array_module(like).zeros(room, like.dtype)
        else:  # shared memory, reduced without a copy
            flat = gradient_pass.shared_zeros(room, like.dtype, group)
        buckets.append(GradientBucket(bucket_params, flat))
    factor = 1.0 / group_or_world(group).size if scale is None else scale
    parts = [[p.grad_buffer for p in b.params if p.grad_buffer is not None] for b in buckets]
    reducer = internal.EagerReducer(factor, group=group, hook=hook, parts=parts)
    return GradientSync(buckets, reducer, flat[size:] if hook is None else None, scale is None)


def _check_arrays(
    of_leaves: Mapping[str, Variable], hook: CommunicationHook | None, params: Sequence[Variable]
) -> None:
    if hook is not None:
        internal.check_hook(hook, [[param.data] for param in params])
    for name, param in of_leaves.items():
        if is_cupy(param.data):
            raise ValueError(
                f"distribute_module_grads: expected NumPy arrays for leaves, got a CuPy array as "
                f"{name!r}. Move the module to the CPU: bits of a GPU depend on its model"
            )


def _names(module: Module, ignore: Iterable[str | Variable]) -> frozenset[str]:
    if isinstance(ignore, (str, Variable)):
        ignore = (ignore,)
    names = {param: name for name, param in module.named_params().items()}
    all_names = {*names.values(), *module.buffers}
    ignored: set[str] = set()
    for entry in ignore:
        if not isinstance(entry, (str, Variable)):
            raise TypeError(
                "distribute_module_grads: ignore must contain names and Variables, got "
                f"{type(entry).__name__}"
            )
        name = names.get(entry) if isinstance(entry, Variable) else entry
        if name not in all_names:
            raise ValueError(
                "distribute_module_grads: ignore must contain parameters or buffers of this "
                f"module, got {entry!r}. Use: {', '.join(sorted(all_names))}"
            )
        ignored.add(name)
    return frozenset(ignored)


def before_forward(sync: gradient_pass.GradientPass[Any], module: Module) -> None:
    """Copy the buffers of rank 0 to all ranks at the start of a synchronised training pass."""
    sync.check("forward")
    if module.training and sync.enabled and sync.weigh is None:
        state = {name: x for name, x in module.buffers.items() if name not in sync.ignored}
        if state:
            give_state(module, state, 0, sync.reducer.group)


@contextlib.contextmanager
def no_sync(module: Module) -> Iterator[None]:
    """Within the context, backward passes only accumulate this rank's own gradients.

    The next backward pass after the context reduces the accumulated sum. The function is not
    collective, but every rank must use it for the same passes. Raises ValueError if the module is
    not distributed, or was distributed with ``leaves``.
    """
    sync = gradient_pass.require_gradient_pass(module, "no_sync")
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

    :func:`distribute_module_grads` does the same in every pass. Collective, blocking. If a gradient
    is None on this rank but not on every rank, it counts as zeros and is replaced by the sum. A
    gradient that is None on every rank stays None.

    Args:
        module: Module with the same structure on every rank.
        scale: Factor of the sums.
        group: Process group. Default: the world.

    Raises:
        TypeError: If ``module`` is not a Module.
        ValueError: If a parameter is sharded.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    require_module(module)
    agreement.reject_sharded("all_reduce_gradients", module.params())
    gradient_pass.reduce_used([param for param in module.params() if param.calc_grad], scale, group)


class Trained(Protocol):
    """A network that ranks train together but that is not a Module: ``fl.tagi.DDPSequential``."""

    sync: gradient_pass.GradientPass[Any]

    def synchronize(self, root: int = 0) -> object:
        """Copy the values of rank ``root`` to all ranks. Collective, blocking."""


# A rank without data joins passes of the other ranks with zeros. In every synchronised pass, the
# ranks first add up two numbers: their number of samples in this pass, and 1 if they still train. A
# rank whose loop has ended sends two zeros. While any rank trains, this rank also adds zeros to the
# reductions of the pass. So each rank knows without further messages when all loops have ended.
class Joined:
    """The object that ``with fl.join(module) as joined`` returns."""

    def __init__(self, sync: gradient_pass.GradientPass[Any], group: ProcessGroup) -> None:
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
        number = internal.check_integer("join: count", "samples", samples)
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
        ((all_samples, trained),) = self._group.all_reduce(message).tolist()
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


_open_joins: list[Joined] = []


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
    the lowest rank that trained in every pass, except names ignored by ``distribute_module_grads``.

    With a module of :func:`flashlight_py.fully_shard`, all ranks step together. A rank whose loop
    has ended steps the module's optimizers after every pass of the other ranks. So call ``step()``
    exactly once after each pass, with a constant learning rate and no ``clip_grad_norm``.

    If ``distribute_module_grads`` was called with ``scale`` or ``reducer``, gradients are summed
    over the ranks that still have data and multiplied by this scale. Counts are ignored.

    Every rank must use ``join`` and, in its body, start no collectives except the backward passes
    of the module. Each synchronised pass needs one more blocking ``all_reduce``, of 16 bytes.
    Gradients accumulated in ``no_sync`` when a loop ends are not used. The end of the ``with`` is
    collective and blocks. If the body raises, this rank does not wait for the other ranks. The
    other ranks raise ``PeerLostError`` when this rank exits, or ``CollectiveTimeoutError``.

    Args:
        module: Module of ``distribute_module_grads`` or ``fully_shard``, or a
            ``fl.tagi.DDPSequential``. Its sums are not weighted; averages are over ranks with data.
        optimizer: Optimizer whose state is synchronised at the end.

    Raises:
        TypeError: If ``optimizer`` is not of ``fl.optim``, or ``module`` has another type.
        ValueError: If the module is not distributed, uses ``leaves``, or gathers parameters on
            GPUs, or another join is open on this rank.
        MismatchError: If a rank starts another collective in the body, or does not use ``join``.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    sync, group = getattr(module, "sync", None), gradient_pass.ranks_of({"module": module})
    with group.in_step("join"):
        if isinstance(module, Module):
            sync = gradient_pass.require_gradient_pass(module, "join")
        if not isinstance(sync, gradient_pass.GradientPass):
            name = type(module).__name__
            raise TypeError(f"join: expected a fl.nn.Module or a fl.tagi.DDPSequential, got {name}")
        if sync.not_joined:
            raise ValueError(f"join: {sync.not_joined}")
        if optimizer is not None and not isinstance(optimizer, FirstOrderOptimizer):
            raise TypeError(
                f"join: expected an optimizer of fl.optim, got {type(optimizer).__name__}"
            )
        if _open_joins:
            raise ValueError(
                "join: expected at most one open join per rank, got a second one. Join one module "
                "that contains both modules"
            )
    joined = Joined(sync, group)
    _open_joins.append(joined)
    sync.weigh = joined._weigh
    changed()
    try:
        yield joined
        joined._send_zeros_until_all_have_ended()
    finally:
        sync.weigh = None
        changed()
        _open_joins.remove(joined)
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
