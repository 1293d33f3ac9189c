"""Sum of gradients over the ranks, in a fixed order, during a backward pass.

Ranks may complete gradients in different orders or lack some, but every rank must send the same
sequence. So all ranks divide the gradients into the same buckets. A complete bucket waits until all
earlier buckets have been sent. At the end, the pass sends the other buckets and waits for sums.

Subclasses define the buckets and the use of the sums. ``data_parallel`` sums buckets in place.
``sharder`` writes the sums to memory that the ranks of a host share. ``gathered_shards`` scatters
the sums to the ranks. ``leaf_sync`` adds leaves in the order of a tree. ``tagi`` sums its updates.
"""

import abc
import contextlib
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
from flashlight_py.distributed import ProcessGroup, Reducer, all_reduce, internal, shared_empty
from flashlight_py.errors import DistributedError, GroupClosedError, MismatchError, OutOfMemoryError
from flashlight_py.nn import Module
from flashlight_py.structure import HoldsState, changed, count

_FAILED = "flashlight_py_failed"
_WORDS = "backward, and failed"
_positions = itertools.count(1)  # in the order of creation, the same on all ranks


class PassBucket(HoldsState):
    """Gradients that are sent together. ``pending`` of them are not computed yet in this pass."""

    def __init__(self, params: Sequence[Variable], parts: int | None = None) -> None:
        self.params = params
        self.parts = self.pending = len(params) if parts is None else parts


AnyBucket = TypeVar("AnyBucket", bound=PassBucket)


class GradientPass(HoldsState, InPasses, abc.ABC, Generic[AnyBucket]):
    """A sum over the ranks in every backward pass. Ranks without data can join it with zeros.

    If ``weigh`` is set, each bucket is multiplied by ``weigh(first)``. ``first`` is True for the
    first bucket of a pass. If the factor is 0, all parameters count as unused on this rank.
    ``enabled`` is False in ``no_sync``. ``ignored`` names parameters and buffers that may differ.
    """

    averages = True  # whether gradients are averaged over the ranks, not only summed
    ends_with_message = True  # whether ranks exchange a message after the last bucket
    is_shared = False  # whether ranks share the state of the optimizer
    not_joined = ""  # reason why ``join`` is not supported
    leaves = 0  # number of leaves of a global batch; 0 without leaves

    def __init__(self, reducer: Reducer, buckets: Iterable[AnyBucket]) -> None:
        self.reducer = reducer
        self.weigh: Callable[[bool], float] | None = None
        self.ignored: frozenset[str] = frozenset()
        self.enabled = True
        self._position = next(_positions)
        self._buckets = list(buckets)
        self._params = [param for bucket in self._buckets for param in bucket.params]
        self._unused: set[Variable] = set()  # parameters without gradient, of buckets already sent
        self._sent = 0
        self._running = False
        self._has_failed = False  # whether this pass failed on this rank
        self._ends_together = False  # whether all ranks must call end_together()
        self._module: Callable[[], Module | None] = lambda: None
        self._known_params: set[Variable] = set()
        self._new_params: dict[str, Variable] = {}  # parameters that no bucket contains
        self._structure = self._pending = 0  # values of ``count`` and ``pending`` at the last check

    def register_hooks(self) -> None:
        for bucket in self._buckets:
            for param in bucket.params:
                param.register_grad_hook(functools.partial(self._on_ready, bucket))

    def detach(self) -> None:
        """Clear the gradient hooks that this pass has set, and the gradient buffers."""
        for param in (*self._params, *self._new_params.values()):
            if _owner_of(param) is self:
                param.clear_grad_hook()
                param.grad_buffer = None
        self._module, self._new_params = (lambda: None), {}

    def watch(self, module: Module) -> None:
        """Make later passes raise if they use parameters that ``module`` does not have now."""
        named = module.named_params().items()
        self._known_params = {p for name, p in named if p.calc_grad or name in self.ignored}
        self._module, self._structure = weakref.ref(module), int(count[0])
        reference: weakref.ref[InPasses] = weakref.ref(self, watching.remove)
        watching.append(reference)

    def on_begin(self) -> None:
        """Search for new parameters if the module has changed. Called before a backward pass."""
        if count[0] != self._structure:
            self._find_new_params()

    def _find_new_params(self) -> None:
        module, self._structure = self._module(), int(count[0])
        named = {} if module is None else module.named_params()
        new = {n: p for n, p in named.items() if p.calc_grad and p not in self._known_params}
        self._new_params = {n: p for n, p in new.items() if _owner_of(p) in (None, self)}
        for param in self._new_params.values():
            if param.hook is None:
                param.register_grad_hook(functools.partial(self._on_new_param))

    def _on_new_param(self, _: object) -> None:
        """Begin a pass if none is running. ``_check_params`` then rejects the new parameter."""
        if self.enabled and not self._running:
            self._begin()

    def _check_params(self) -> None:
        pending = sum(bucket.pending for bucket in self._buckets)
        if pending != self._pending:  # a parameter in a list may have been replaced
            self._find_new_params()
        if self._new_params:
            raise ValueError(
                f"backward: expected distributed parameters, got {next(iter(self._new_params))!r}, "
                "which was assigned, added or unfrozen later. Call distribute_module_grads or "
                "fully_shard again, and make a new optimizer"
            )
        self._pending = pending

    def _on_ready(self, bucket: AnyBucket, _: object = None) -> None:
        """Record one complete gradient of ``bucket``. Then send complete buckets in order."""
        if not self.enabled:
            return
        if not self._running:
            self._begin()
        bucket.pending -= 1
        if bucket.pending:
            return
        buckets = self._buckets
        while self._sent < len(buckets) and not buckets[self._sent].pending:
            self._send_next()

    def _begin(self) -> None:
        self._prepare()
        self._join()

    def _join(self) -> None:
        self._running = True
        at_end(self._on_computed, 0)
        at_end(self._on_end, self._position)

    def join_failed(self) -> None:
        if self.enabled and not self._running:
            self._begin()

    def _on_computed(self, completed: bool) -> None:
        """Send the remaining buckets after all gradients are computed, and before any wait."""
        try:
            if completed:
                self._check_params()
                self._send_remaining()
        except BaseException:
            completed = False
            raise
        finally:
            # If all buckets were sent and no message follows, the sums are right.
            if not completed and (self.ends_with_message or self._sent < len(self._buckets)):
                self.fail()

    def _on_end(self, completed: bool) -> None:
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
            if not is_right:  # the gradients may differ between ranks
                self._clear_gradients()
            try:
                if self._has_failed:
                    self.end_failed()
            finally:
                self._reset()

    def _send_remaining(self) -> None:
        while self._sent < len(self._buckets):
            self._send_next()

    def _send_next(self) -> None:
        self._send_bucket(self._buckets[self._sent], self._next_weight())
        self._sent += 1

    def _next_weight(self) -> float:
        return 1.0 if self.weigh is None else self.weigh(self._sent == 0)

    def _used_params(self) -> list[bool]:
        return [param not in self._unused for param in self._params]

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.pending = bucket.parts
        self._sent, self._running = 0, False
        self._unused.clear()

    def _clear_gradients(self) -> None:
        for param in self._params:
            param.grad = None

    def fail(self) -> None:
        """Make the current pass fail on all ranks, because this rank has raised an exception."""
        self._has_failed = True
        self._ends_together = fail_pass(self._members, sys.exc_info()[1], self._next_arrays())

    def end_failed(self) -> None:
        ends_together, self._has_failed, self._ends_together = self._ends_together, False, False
        self.reducer.abandon()
        if ends_together:
            end_together(self._members)

    @property
    def _members(self) -> ProcessGroup:
        return internal.group_or_world(self.reducer.group)

    def check(self, operation: str) -> None:
        """Raise an error for ``operation`` if a rank has ended in the middle of a step."""

    def weight(self, samples: int, all_samples: int, training: int, ranks: int) -> float:
        """If ``averages``, return ``samples * ranks / all_samples`` (0 if no samples), else 1."""
        if not self.averages:
            return 1.0
        return samples * ranks / all_samples if all_samples else 0.0

    def send_zeros(self) -> None:
        """Join a pass of the other ranks with zeros, and receive the sums. Blocks."""
        try:
            self._prepare()
            for bucket in self._buckets:
                self._send_bucket(bucket, 0.0)
            self._finish()
        finally:
            self._reset()

    def _prepare(self) -> None:
        """Prepare a pass, before its first bucket."""

    @abc.abstractmethod
    def _send_bucket(self, bucket: AnyBucket, weight: float) -> None:
        """Send ``bucket`` multiplied by ``weight``."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Wait for the sums, and set the gradients of parameters that no rank used to None."""

    def _next_arrays(self) -> Iterable[Array]:
        """Return arrays with the shapes and dtypes that the other ranks send next."""
        return ()


# If a pass fails on one rank, this rank rejects the next collective of the other ranks, so that
# they raise in it. By then, the ranks may have started different numbers of collectives. So after a
# failure all ranks call ``end_together``, which returns when all of them have left the pass.
#
# A failed pass of fully_shard sends zeros for the remaining buckets. It rejects only its last
# collective, which all ranks call. Earlier collectives may be in smaller groups.
def fail_pass(group: ProcessGroup, error: BaseException | None, sent: Iterable[Array] = ()) -> bool:
    """Reject the next collective of the other ranks, because ``error`` ends the pass here.

    The other ranks raise MismatchError. ``sent`` are the arrays that they reduce next. If they
    already know of the error, nothing is sent. If ``error`` is an interrupt, all groups fail.
    Return True if any rank has rejected a call. All ranks must then call ``end_together``.
    """
    if error is None or group.size == 1:
        return False
    if not isinstance(error, Exception):
        internal.abort.report(error)
        return False
    failed_groups = getattr(error, _FAILED, ())
    if group.journal.name in failed_groups:
        return True
    if group.journal.has_recorded(error):
        calls = error.calls if isinstance(error, MismatchError) and error.group_lives else ()
        return any(call.startswith((_WORDS, internal.PASS_FAILED)) for call in calls)
    setattr(error, _FAILED, (*failed_groups, group.journal.name))
    with contextlib.suppress(GroupClosedError):  # the other ranks already know the reason
        internal.reject_together(group, "backward", arrays=sent, outcome="failed").reject(error)
    return True


def refuse_message(group: ProcessGroup, verb: internal.Verb, peer: int, tag: int) -> None:
    """Send the current exception to ``peer`` instead of the message for which ``peer`` waits."""
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        with contextlib.suppress(GroupClosedError):
            words = f"{_WORDS} ({internal.reason_of(error)})"
            group.backend().start(
                internal.Call(verb, peer=peer, tag=tag, blocking=False, refusal=words)
            )


def end_together(group: ProcessGroup) -> None:
    """Wait until all ranks have ended the pass, so that their next calls match again.

    If another rank is in a different call, that call raises ``MismatchError``, and this function
    waits again. If the group has failed, it returns, and the next call on the group raises.
    """
    while True:
        try:
            internal.host_memory.wait_for_ranks(group, internal.PASS_FAILED)
        except MismatchError as error:
            if error.group_lives:
                continue
        except DistributedError:
            pass
        return


def weigh_in_place(array: Array, weight: float) -> None:
    """Multiply ``array`` by ``weight``, in place. If ``weight`` is 0, NaN becomes 0 as well."""
    if not weight:
        array[...] = 0  # the mean over a batch without samples is NaN
    elif weight != 1.0:
        internal.call_arrays.scale_in_place(array, weight)


def gradient_of(param: Variable) -> Array:
    """Return the gradient of ``param``; set it to zeros if this rank computed none."""
    if param.grad is None:
        param.grad = array_module(param.data).zeros_like(param.data)
    elif not param.grad.shape or param.grad.dtype != param.dtype:
        # NumPy operations on arrays without dimensions return scalars.
        param.grad = array_module(param.grad).asarray(param.grad, param.dtype)
    return param.grad


def used_on_any_rank(used: Iterable[bool], group: ProcessGroup | None) -> list[bool]:
    """Return for each parameter whether any rank used it. Collective, blocking."""
    flags = np.array([*used], np.int32)
    all_reduce(flags, op="max", group=group)
    return [bool(flag) for flag in flags.tolist()]


def reduce_used(params: Sequence[Variable], scale: float, group: ProcessGroup | None) -> None:
    """Sum each gradient that any rank has, times ``scale``, in place. Collective, blocking."""
    used = used_on_any_rank((param.grad is not None for param in params), group)
    internal.reduce_all(
        [gradient_of(param) for param in itertools.compress(params, used)], scale, group
    )


def shared_zeros(size: int, dtype: DTypeLike, group: ProcessGroup | None) -> Array:
    """Return zeros in memory that collectives reduce without a copy. Collective, blocking."""
    try:
        flat = shared_empty(size, dtype, group=group)
    except MemoryError as error:
        raise OutOfMemoryError(f"gradient buckets cannot be allocated: {error}") from error
    flat[...] = 0
    return flat


_passes: weakref.WeakKeyDictionary[Module, GradientPass[Any]] = weakref.WeakKeyDictionary()


def install_pass(
    module: Module, sync: GradientPass[Any],
    before_forward: Callable[[GradientPass[Any], Module], None] | None = None,
) -> None:  # fmt: skip
    """Register ``sync``. Forward passes first call ``before_forward(sync, module)``, if passed."""
    _passes[module] = sync
    changed()
    sync.watch(module)
    if before_forward is not None:
        module.before_forward = functools.partial(before_forward, sync)


def drop_pass(module: Module) -> None:
    sync = _passes.pop(module, None)
    if sync is not None:
        sync.detach()
        if getattr(module.before_forward, "args", None) == (sync,):
            module.before_forward = None


def pass_of(module: Module) -> GradientPass[Any] | None:
    return _passes.get(module)


def ranks_of(arguments: Mapping[str, Any]) -> ProcessGroup:
    """Return the group of the pass that is installed for ``arguments["module"]``, or the world."""
    module = arguments.get("module")
    sync = pass_of(module) if isinstance(module, Module) else getattr(module, "sync", None)
    return internal.group_or_world(sync.reducer.group if isinstance(sync, GradientPass) else None)


def require_gradient_pass(module: Module, caller: str) -> GradientPass[Any]:
    """Return the pass installed for ``module``; ValueError if there is none or it uses leaves."""
    sync = pass_of(module)
    if sync is None:
        raise ValueError(
            f"{caller}: call distribute_module_grads or fully_shard on this module first"
        )
    if sync.leaves:
        raise ValueError(
            f"{caller}: expected a module without leaves, got one distributed with "
            f"leaves={sync.leaves}. Pass a larger global batch to fl.leaves instead of "
            "accumulating gradients"
        )
    return sync


def is_synchronised(param: Variable) -> bool:
    return isinstance(_owner_of(param), GradientPass)


def _owner_of(param: Variable) -> object:
    """Return the object whose method is the gradient hook of ``param``, or None."""
    owner = param.hook.func if isinstance(param.hook, functools.partial) else None
    return getattr(owner, "__self__", None)
