"""One model per host: ranks share its parameters, gradients and optimizer state.

In a backward pass, buckets are sent in their order in the flat arrays. A gradient that is complete
before its bucket can be sent waits in an array of this rank. The gradient of a large weight is a
matrix product. If its bucket is next, it is computed directly into the staging buffers.
"""

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import GradSink, is_last_contribution
from flashlight_py.device import Array, array_module, is_cupy, to_device
from flashlight_py.distributed import InlineReducer, ProcessGroup
from flashlight_py.distributed.internal import group_or_world, host_memory, in_step, reject_together
from flashlight_py.errors import DistributedError
from flashlight_py.nn import Module
from flashlight_py.optim.cpu import BLOCK, sum_of_squares, sums_of_squares
from flashlight_py.optim.optimizer import FirstOrderOptimizer, Placement, Shards
from flashlight_py.parallel import gradient_pass
from flashlight_py.parallel.agreement import check_modules_agree, check_settings_agree
from flashlight_py.parallel.data_parallel import before_forward, distribute_module_grads
from flashlight_py.parallel.gathered_shards import shard_by_gathering
from flashlight_py.parallel.shard_memory import FROZEN, HostBucket, HostMemory
from flashlight_py.parallel.synchronize import broadcast_parameters, give_state, require_module
from flashlight_py.structure import as_one

# Gradients of a bucket: arrays, pairs of matrices whose product is the gradient, or None.
Gradients: TypeAlias = "Sequence[Array | tuple[Array, Array] | None]"

# Modules with fewer bytes of parameters are not sharded: a separate step of each rank takes less
# time than ranks need to wait for each other. Time of a sharded step of two ranks, relative to
# separate steps: 1.15 at 8 MiB, 0.98 at 16 MiB. Four ranks at 16 MiB: 0.76.
SMALL_BYTES = 12 << 20


@in_step()
def fully_shard(
    module: Module, *, across_hosts: bool = False, group: ProcessGroup | None = None
) -> None:
    """Keep one copy of the module, its gradients and its optimizer's state on each host.

    Collective, blocking; in place. The parameters take the values of the group's rank 0. All ranks
    of a host then map the same memory for the parameters and their gradients. After ``backward()``
    a gradient is the mean over all ranks. ``optimizer.step()`` updates the elements that this rank
    owns; no data is gathered. ``module(x)``, ``params()``, ``state_dict()`` and checkpoints keep
    the shapes of the whole module. Create the optimizer afterwards. A second call shards again.

    Every synchronised backward pass, the creation of an optimizer, ``step()``, ``clip_grad_norm``,
    and saving or loading the optimizer's state become collective. Do not write to parameters
    between steps: all ranks would see the change, some of them in the middle of a pass. With
    FLASHLIGHT_DEBUG_SHARED=1 in the environment, NumPy rejects such a write. Copies and pickles of
    the module and its optimizer are ordinary objects of this process.

    If the parameters have less than 12 MiB and ``across_hosts`` is not set, each rank keeps its own
    copy, as with :func:`flashlight_py.distribute_module_grads`: ranks would wait for each other
    longer than a separate step takes. Ranks that share no memory, for example with Gloo alone,
    count as separate hosts. In that case only ``across_hosts`` saves memory.

    Args:
        module: Module with the same structure on every rank. CuPy parameters are sharded over all
            ranks and gathered module by module for use (ZeRO-3); see docs/sharding-gpu.md.
        group: Process group. Default: the world.
        across_hosts: If True, each host updates only a part of the parameters, stores optimizer
            state only for this part, and sends the updated part to the other hosts (ZeRO-1).
            ``grad`` then has the mean over all ranks only in this part.

    Raises:
        TypeError: If ``module`` is not a Module.
        ValueError: If no parameter has ``calc_grad``, an array is not C-contiguous, or a weight was
            cut by ``shard_linear``. On GPUs: if ``across_hosts`` is set, or parameters are already
            sharded or have a gradient hook.
        MemoryError, OSError: If memory cannot be allocated. No rank's module has changed. On GPUs
            some parameters may already be sharded: create the module again.
        MismatchError: If modules or arguments differ, or another rank has raised one of the errors
            above. The message contains the difference or the reason.
        TornStateError: If the module was sharded before and a rank ended during a step.
        DistributedError: As :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> fl.fully_shard(model)  # one process: everything works as before
        >>> optimizer = fl.optim.AdamOptimizer(model.params(), lr=0.01)
        >>> model(fl.input(np.ones((1, 3), np.float32))).backward(np.ones((1, 2), np.float32))
        >>> optimizer.step()
    """
    require_module(module)
    members = group_or_world(group)
    check_settings_agree("fully_shard", {"across_hosts": bool(across_hosts)}, members)
    named = module.named_params()
    check_modules_agree(named, members)
    if not any(param.calc_grad for param in named.values()):
        raise ValueError("fully_shard: expected at least one trainable parameter, got 0")
    if any(is_cupy(param.data) for param in named.values()):
        if across_hosts:
            remedy = "Remove across_hosts: on GPUs everything is sharded over all ranks"
            raise ValueError(f"fully_shard: expected NumPy arrays, got CuPy arrays. {remedy}")
        with reject_together(members, "fully_shard"):
            gradient_pass.install_pass(module, shard_by_gathering(module, members), before_forward)
        return
    for name, param in named.items():
        if param.placement is not None and param.placement.is_cut:
            raise ValueError(
                f"fully_shard: expected parameters that are not cut, got {name} of shard_linear. "
                "Call fully_shard on the other submodules"
            )
        if param.placement is not None:
            param.placement.shards.check("fully_shard")
    nbytes = sum(param.data.nbytes for param in named.values())
    if nbytes < SMALL_BYTES and not across_hosts:
        with reject_together(members, "fully_shard"):  # if a copy fails, no rank changes
            copies = {p: np.array(p.data) for p in named.values() if p.placement is not None}
            for param, data in copies.items():
                param.placement, param.data = None, data
        gradient_pass.drop_pass(module)
        broadcast_parameters(module, group=members)
        distribute_module_grads(module, group=members)
        return
    with reject_together(members, "fully_shard"):
        for name, param in named.items():
            if not param.data.flags.c_contiguous:  # BLAS rounds differently for other layouts
                raise ValueError(
                    f"fully_shard: {name} of shape {param.shape} must be C-contiguous, got strides "
                    f"{param.data.strides}. Set param.array = np.ascontiguousarray(param.array), "
                    "which may change the last bits of products"
                )
    sharder = HostSharder(_in_order(module), members, across_hosts)
    give_state(module, module.buffers, 0, members)
    gradient_pass.drop_pass(module)
    sharder.adopt_params()
    sharder.ignored = frozenset(named)
    gradient_pass.install_pass(module, sharder, before_forward)


def _in_order(module: Module) -> list[Variable]:
    """Return the parameters in about the order in which a backward pass completes them."""
    named = module.named_params()
    layers = itertools.groupby(named, key=lambda name: name.rpartition(".")[0])
    grouped = [[named[name] for name in names] for _, names in layers]
    return [param for layer in reversed(grouped) for param in layer]


class HostPlacement(Placement, GradSink):
    """Position of one parameter in the memory of its host, and receiver of its gradient.

    ``total`` is the gradient summed over ranks, in shared memory. This rank's gradient before it is
    sent is ``unsent`` if ``Variable.grad`` is ``total``; otherwise it is ``Variable.grad``.
    """

    shards: "HostSharder"

    def __init__(self, shards: "HostSharder", bucket: HostBucket, position: int) -> None:
        param, start, memory = bucket.params[position], bucket.starts[position], shards.memory
        self.shards, self.bucket = shards, bucket
        self.shape, self.dtype = param.shape, param.dtype
        self._range = slice(start, start + param.size)
        # Ranges of the parameter's elements that optimizers of this host and of this rank update.
        host = memory.host_range(bucket.name, memory.host)
        low, high = (min(max(edge - start, 0), param.size) for edge in (host.start, host.stop))
        self._host_range = slice(low, high)
        parts = [memory.rank_range(chunk) for chunk in bucket.chunks]
        edges = [(max(part.start - start, low), min(part.stop - start, high)) for part in parts]
        self.owned_ranges = [slice(a, b) for a, b in edges if a < b]
        self._data = memory.params[bucket.name][self._range]
        self.total = self.view(memory.grads[bucket.name])
        self.unsent: Array | None = None

    def view(self, flat: Array) -> Array:
        return flat[self._range].reshape(self.shape)

    def zeros(self, variable: Variable, dtype: DTypeLike) -> Array:
        return self.view(self.shards.new_state(self, dtype))

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        if self.bucket.name.endswith(FROZEN):
            raise ValueError(
                f"optimizer.step: expected a parameter with calc_grad during fully_shard, got a "
                f"frozen one of shape {self.shape}. Call fully_shard again to train it"
            )
        assert variable.grad is not None
        arrays = [self._data, *(array.reshape(-1) for array in (variable.grad, *states))]
        return [tuple([array[piece] for array in arrays]) for piece in self.owned_ranges]

    def sum_of_squares(self, variable: Variable) -> float:
        if self.shards.memory.across:
            return super().sum_of_squares(variable)
        assert variable.grad is not None
        return sum_of_squares(variable.grad)

    def full_state(self, state: Array) -> Array:
        memory = self.shards.memory
        if not memory.across:
            return state
        part = state.reshape(-1)[self._host_range if memory.local.rank == 0 else slice(0)]
        return self.shards.group.all_gather(part).reshape(self.shape)

    def put(self, state: Array, value: Any) -> None:
        state.reshape(-1)[self._host_range] = to_device(value, "cpu").reshape(-1)[self._host_range]

    def add(self, leaf: Variable, contribution: Array, is_new: bool) -> None:
        gradient = self.unsent_gradient(leaf)
        if gradient is not None:
            gradient += contribution
        else:  # array() is needed because NumPy's copy() of a 0-d result is a scalar
            gradient = contribution if is_new else array_module(contribution).array(contribution)
        if leaf.grad is self.total:
            self.unsent = gradient
        else:
            leaf.grad = gradient

    def unsent_gradient(self, leaf: Variable) -> Array | None:
        if leaf.grad is self.total:
            return self.unsent
        self.unsent = None  # zero_grad() has made it obsolete
        return leaf.grad

    def product(self, leaf: Variable, a: Array, b: Array) -> Array | GradSink:
        """Return ``a @ b``, or compute it into staging buffers if this parameter is sent next."""
        fits = a.dtype == b.dtype == self.dtype and self.unsent_gradient(leaf) is None
        if fits and is_last_contribution(leaf) and self.shards.stream(self.bucket, a, b):
            return self
        product: Array = a.dot(b)
        return product


class HostSharder(Shards, gradient_pass.GradientPass[HostBucket]):
    """A pass that sums the gradients of ``params`` into memory that the ranks of a host share."""

    group: ProcessGroup
    is_shared = True

    def __init__(self, params: Sequence[Variable], group: ProcessGroup, across_hosts: bool) -> None:
        self.group, self.memory = group, HostMemory(group, params, across_hosts)
        sent = [bucket for bucket in self.memory.buckets if not bucket.name.endswith(FROZEN)]
        super().__init__(InlineReducer(1.0, group=group), sent)
        for bucket in self.memory.buckets:
            bucket.placements = [HostPlacement(self, bucket, n) for n in range(len(bucket.params))]
        self._states: dict[tuple[str, str, int], Array] = {}
        self._taken: Counter[tuple[int, str]] = Counter()
        # Optimizers that all ranks step together, in the order of creation.
        self._optimizers = weakref.WeakKeyDictionary[FirstOrderOptimizer, None]()
        self._error: Exception | None = None  # error of this rank that other ranks do not know

    def adopt_params(self) -> None:
        """Move rank 0's parameters into shared memory, bucket by bucket. Collective, blocking.

        If the call fails, no module changes, except that parameters may already use the shared
        memory. On hosts other than the first, they may then have values of rank 0.
        """
        memory, local = self.memory, self.memory.local
        with memory.loading():
            if local.rank == 0:
                for bucket in memory.buckets:
                    self._fill(bucket)
            local.barrier()
            for param, placement in _with_placements(memory.buckets):
                param.data = placement.view(memory.params[placement.bucket.name])
                param.data.flags.writeable = not memory.is_debugged
                param.placement = placement
        for param, placement in _with_placements(self._buckets):
            param.buffer, param.grad = placement, None
        self.register_hooks()

    def _fill(self, bucket: HostBucket) -> None:
        """Copy rank 0's parameters of a bucket to this host. Unreferenced old arrays are freed."""
        memory, flat = self.memory, self.memory.params[bucket.name]
        for param, placement in _with_placements([bucket]) if memory.host == 0 else ():
            placement.view(flat)[...] = param.data
        values = flat[bucket.starts[0] : bucket.starts[-1] + bucket.params[-1].size]
        if memory.between is not None and values.size:
            memory.between.broadcast(values, root=0)
        for param, placement in _with_placements([bucket]):
            if param.placement is None:
                param.data = placement.view(flat)

    def detach(self) -> None:
        """Detach the parameters; another pass reduces their gradients from now on."""
        self.enabled = False
        for param, placement in _with_placements(self._buckets):
            if param.buffer is placement:
                param.buffer = None
                param.clear_grad_hook()
        # Breaking reference cycles frees shared memory now. It may be most of the host's memory.
        for bucket in self.memory.buckets:
            bucket.placements = []

    def attach(self, optimizer: FirstOrderOptimizer) -> None:
        """Register ``optimizer``, before its state is created. Collective; see ``Shards``."""
        self.group.barrier()
        self._optimizers[optimizer] = None
        self._states, self._taken = {}, Counter()

    def making(self, name: str) -> AbstractContextManager[None]:
        return self.group.in_step(name)

    def new_state(self, placement: HostPlacement, dtype: DTypeLike) -> Array:
        """Return a shared array for the next state of a parameter. Creating it is collective."""
        name, kind = placement.bucket.name, np.dtype(dtype).str
        key = name, kind, self._taken[id(placement), kind]
        self._taken[id(placement), kind] += 1
        if key not in self._states:
            self._states[key] = self.memory.new_flat(self.memory.params[name].size, kind)
        return self._states[key]

    def in_step(self, name: str) -> AbstractContextManager[None]:
        return (self.group if self.memory.across else self.memory.local).in_step(name)

    def sum_of_squares(self, variables: Sequence[Variable]) -> float:
        if self.memory.across:
            return super().sum_of_squares(variables)
        local, parts = self.memory.local, [np.zeros(0)]
        for variable in variables:
            assert variable.grad is not None
            sums = np.zeros(-(-variable.size // BLOCK))
            indices = slice(local.rank, None, local.size)
            sums[indices] = sums_of_squares(variable.grad, indices)
            parts.append(sums)
        return float(sum(local.all_reduce(np.concatenate(parts)).tolist()))

    def wait_for_all(self) -> None:
        host_memory.wait_for_ranks(self.memory.local, "clip_grad_norm of a sharded module")

    def changing(self, operation: str) -> AbstractContextManager[None]:
        return self.memory.changing(operation)

    @as_one
    def check(self, operation: str) -> None:
        self.memory.check(operation)

    @contextmanager
    def loading(self) -> Iterator[None]:
        params = [param for bucket in self.memory.buckets for param in bucket.params]
        with self.memory.loading():
            for param in params:
                param.data.flags.writeable = True
            yield
            for param in params:
                param.data.flags.writeable = not self.memory.is_debugged

    def stream(self, bucket: HostBucket, a: Array, b: Array) -> bool:
        """Send ``a @ b`` if it is the next bucket's only gradient. Return whether it was sent."""
        is_next = self._buckets[self._sent : self._sent + 1] == [bucket]
        if not (self.enabled and is_next and len(bucket.params) == 1):
            return False
        if not self._running:
            self._begin()
        self._pack_weighed(bucket, [(a, b)], self._next_weight())
        self._sent += 1
        return True

    def _send_bucket(self, bucket: HostBucket, weight: float) -> None:
        with_placements = list(_with_placements([bucket]))
        gradients = [placement.unsent_gradient(param) for param, placement in with_placements]
        self._pack_weighed(bucket, gradients, 0.0 if self._error is not None else weight)
        for param, placement in with_placements:
            placement.unsent = None
            if param.grad is not placement.total:
                param.grad = None

    def _pack_weighed(self, bucket: HostBucket, grads: Gradients, weight: float) -> None:
        if not weight:
            grads = [None] * len(grads)  # the mean over a batch without samples is NaN
        self._unused.update(p for p, grad in zip(bucket.params, grads, strict=True) if grad is None)
        self._pack(bucket, grads, weight, self._adds(bucket))

    def _adds(self, bucket: HostBucket) -> bool:
        """Return True if sums of earlier passes remain (no ``zero_grad``) and must be added."""
        kept = [param.grad is placement.total for param, placement in _with_placements([bucket])]
        for placement, is_kept in zip(bucket.placements, kept, strict=True) if any(kept) else ():
            for piece in () if is_kept else placement.owned_ranges:  # no earlier sum: start from 0
                placement.total.reshape(-1)[piece] = 0
        return any(kept)

    @as_one
    def _pack(self, bucket: HostBucket, grads: Gradients, weight: float, adds: bool) -> None:
        for chunk in bucket.chunks:
            staging = self.memory.staging(chunk, self.memory.grads[bucket.name], adds)
            _fill(staging, chunk, bucket, grads)
            gradient_pass.weigh_in_place(staging, weight)
            self.memory.add_up_chunk(bucket.name, chunk, adds)

    def _finish(self) -> None:
        used = self._complete(self._used_params())
        for (param, placement), is_used in zip(_with_placements(self._buckets), used, strict=True):
            if is_used:
                param.grad = placement.total

    @as_one
    def _complete(self, used: list[bool]) -> list[bool]:
        """Sum gradients between hosts; return for each parameter whether a rank used it."""
        self.memory.sum_between_hosts()
        # Each rank sends these flags when its sums are complete, so now all sums are complete.
        return gradient_pass.used_on_any_rank(used, self.group)

    def send_zeros(self) -> None:
        """Join a pass of the other ranks with zeros. Then call ``step`` of each optimizer."""
        for param in self._params:
            param.grad = None
        super().send_zeros()
        for optimizer in list(self._optimizers):
            optimizer.step()

    def join_failed(self) -> None:
        if self._failure() is not None:
            super().join_failed()

    def _failure(self) -> Exception | None:
        """Return the error that ends the pass, or None if another rank already knows of it."""
        error, group = sys.exc_info()[1], self.group
        if isinstance(error, Exception):
            return None if group.size == 1 or group.journal.has_recorded(error) else error
        gradient_pass.fail_pass(group, error)
        return None

    def fail(self) -> None:
        """Send zeros for the remaining buckets of a failed pass. All ranks raise at its end."""
        if not self._running:
            super().fail()
            return
        self._has_failed, self._error = True, self._failure()
        if self._error is None:
            return
        try:
            self._send_remaining()
        except Exception as error:  # the exception that ended the pass is raised instead
            self._error = None
            if not isinstance(error, DistributedError):
                raise

    def end_failed(self) -> None:
        """Reject the pass's last call, ``used_on_any_rank``, so that the other ranks raise."""
        error, self._error, self._has_failed = self._error, None, False
        if error is not None:
            with suppress(DistributedError):
                self.memory.sum_between_hosts()
                reject_together(self.group, "backward", outcome="failed").reject(error)


def _with_placements(buckets: Iterable[HostBucket]) -> Iterator[tuple[Variable, HostPlacement]]:
    for bucket in buckets:
        yield from zip(bucket.params, bucket.placements, strict=True)


def _fill(staging: Array, chunk: slice, bucket: HostBucket, grads: Gradients) -> None:
    """Copy the gradients in ``chunk`` into ``staging``; write zeros for missing gradients."""
    end = chunk.start
    for start, size, grad in zip(bucket.starts, bucket.sizes, grads, strict=True):
        low, high = max(start, chunk.start), min(start + size, chunk.stop)
        if low >= high:
            continue
        room = staging[low - chunk.start : high - chunk.start]
        if isinstance(grad, tuple):
            _product_into(room, *grad, low - start)
        else:
            room[...] = 0 if grad is None else grad.reshape(-1)[low - start : high - start]
        end = high
    staging[end - chunk.start :] = 0


def _product_into(room: Array, a: Array, b: Array, low: int) -> None:
    """Fill ``room`` with elements of ``a @ b``, in row-major order from element ``low`` on."""
    at, end, columns = low, low + room.size, b.shape[1]
    while at < end:
        row, column = divmod(at, columns)
        if column or end - at < columns:  # part of one row
            stop = min(end, (row + 1) * columns)
            part = room[at - low : stop - low]
            part[...] = a[row].dot(b[:, column : column + part.size])
        else:
            rows = (end - at) // columns
            stop = at + rows * columns
            np.dot(a[row : row + rows], b, out=room[at - low : stop - low].reshape(rows, columns))
        at = stop
