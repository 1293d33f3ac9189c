"""The base class of groups, without their verbs: members, backends and subgroups.

The garbage collector may free a group on any thread, even during a call. Closing the backends of
the group at that moment could cause a deadlock. So the next call of any group closes them, unless
an operation is pending, for which other ranks may wait. Closing a group closes its subgroups.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flashlight_py import system
from flashlight_py.device import is_cupy
from flashlight_py.distributed.backend import Backend, EntryPoints, dropped, left_to_python
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.journal import Journal, name_of_group
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.verbs import BARRIER
from flashlight_py.distributed.work import SelfMessages, Then, Work, wait_for
from flashlight_py.errors import BackendUnavailableError, GroupClosedError
from flashlight_py.structure import thread_state

if TYPE_CHECKING:
    from typing_extensions import Self


class OpenGroup(NamedTuple):
    """The backends of an open group, and references to the group and to each group above it."""

    backends: list[Backend]
    lineage: tuple[weakref.ref[Membership], ...] = ()


# When a group is collected, only the C function ``dropped.append`` runs. In Python code a signal
# handler could raise, and Python would ignore its exception.
_watched: dict[weakref.ref[Membership], OpenGroup] = {}

_LEAST_UNFINISHED = 8  # number of unfinished results before the first cleanup
subgroup_numbers = itertools.count(1)  # the number of this process's next subgroup
# Backends of the parent process. References keep a forked child from destroying them.
_inherited: list[list[Backend]] = []


@dataclass(frozen=True)
class Joiner:
    """Functions that create backends: ``join`` for ranks of a store, ``join_gpus`` for their GPUs.

    ``limited`` returns a Joiner with another timeout in seconds.
    """

    join: Callable[[Store], Backend]
    join_gpus: Callable[[Backend], Backend]
    limited: Callable[[float], Joiner]


class Membership:
    """Ranks of the world, and their backends. If this process is not a member, ``rank`` is -1."""

    rank = -1
    _lineage: tuple[weakref.ref[Membership], ...] = ()  # see ``OpenGroup``
    gpus: Backend | None = None  # backend for CuPy arrays; None before the GPUs are joined
    _forked = False

    def __init__(
        self, backend: Backend | None, ranks: Sequence[int] | None = None,
        joiner: Joiner | None = None, first_use: Callable[[], None] | None = None,
        parent: Membership | None = None,
    ) -> None:  # fmt: skip
        self.on_first_use = first_use  # called by the first verb, which Python must handle
        self.fast = EntryPoints()
        self._backend, self._joiner = backend, joiner
        self._backends: list[Backend] = []  # closed even if the group is garbage-collected
        self._lineage = (*(parent._lineage if parent else ()), weakref.ref(self))
        self._unfinished: list[Then] = []
        self._most_unfinished = _LEAST_UNFINISHED
        self.messages_to_self = SelfMessages()
        self.packed_bytes = (0, 0) if backend is None else backend.packed_bytes
        if backend is None:
            self.ranks, self.journal = tuple(ranks or ()), Journal("none of this process", (), "")
        else:
            self.ranks = tuple(range(backend.size) if ranks is None else ranks)
            self.rank = backend.rank
            name = "world" if ranks is None else name_of_group(self.ranks)
            self.journal = Journal(name, self.ranks, backend.path)
            self._backends.append(backend)
            if parent is not None or joiner is not None or backend.size > 1:
                group = OpenGroup(self._backends, self._lineage)
                _watched[weakref.ref(self, dropped.append)] = group
            if first_use is None:
                self.fast.replace_by(backend.bind(self.journal))
            backend.count = self.journal.count
        self.size = len(self.ranks)

    def open_fast_path(self) -> None:
        """Replace the functions of ``fast`` by the backend's current fast path."""
        self.on_first_use = None
        self.fast.replace_by(self.backend().bind(self.journal))
        if self.gpus is not None:
            self.fast.barrier = left_to_python  # a barrier also waits for GPUs, in Python
        if self is _world:
            use_as_world(self)

    @property
    def is_member(self) -> bool:
        """Whether this process is a rank of the group."""
        return self.rank >= 0

    @property
    def is_open(self) -> bool:
        """Whether the group is not closed, and this process is not a forked child."""
        return self._backend is not None

    def backend(self, array: Any = None) -> Backend:
        """Return the backend for ``array`` (None: a NumPy array).

        For the first CuPy array of a group, the ranks connect their GPUs. This is collective and
        blocks. Raises ValueError on a process that is no member, GroupClosedError, or
        BackendUnavailableError if no backend moves arrays of this kind.
        """
        if dropped:
            close_dropped()
        if self.on_first_use is not None:
            first_use = self.on_first_use
            self.open_fast_path()
            first_use()
        if self._backend is None:
            raise self._unusable()
        if self.size > 1 and is_cupy(array):
            return self.gpus or self.join_gpus()
        return self._backend

    def _unusable(self) -> Exception:
        if not self.is_member:
            return ValueError(
                f"expected a call on a member of the group of world ranks {list(self.ranks)}, got "
                "a call on another rank. Check group.is_member first."
            )
        rank = f"rank {self.rank} of {self.size}"
        if self._forked:
            return GroupClosedError(
                f"{rank}: expected a call in the process of this rank, got a forked child. "
                "Call distributed_init in the child to create a world for the child."
            )
        return GroupClosedError(f"{rank}: this group is closed. Use another group.")

    def join_gpus(self) -> Backend:
        """Connect the GPUs of the ranks by NCCL. The first call is collective and blocks.

        If a rank lacks NCCL, CuPy or a GPU, every rank raises BackendUnavailableError.
        """
        if self.gpus is None:
            if self._joiner is None:
                raise BackendUnavailableError(
                    f"rank {self.rank} of {self.size}: expected a NumPy array because this group "
                    "has no NCCL, got a CuPy array. Pass array.get()."
                )
            backend = self.backend()
            self.gpus = backend.cupy_side() or self._joiner.join_gpus(backend)
            self._backends.insert(0, self.gpus)
            self.open_fast_path()
        return self.gpus

    def subgroup(
        self, members: list[int], store: Store | None, timeout: float | None,
        count: int | None = None,
    ) -> Self:  # fmt: skip
        """Return the group of the ranks ``members`` of this group.

        Collective among the members; blocks. If this process is no member, pass None as ``store``:
        nothing is sent. ``timeout`` is in seconds; None: as in this group. ``count`` is the number
        that the first member took from ``subgroup_numbers``. If ``count`` is None, the members
        receive it from the first member.
        """
        ranks, joiner = [self.ranks[member] for member in members], self._joiner
        if store is None:
            return type(self)(None, ranks)
        assert joiner is not None or self.size == 1
        if joiner is not None and timeout is not None:
            joiner = joiner.limited(timeout)
        parent = self.backend()
        if count is None and (parent.network or parent.memory):
            count = int(store.exchange(b"%d" % next(subgroup_numbers))[0])
        if parent.network is not None:
            store.subgroup = parent.network.subgroup(members, count, parent.network is parent)
        if parent.memory is not None:
            first = (parent.network or parent.memory).network_ranks[members[0]]
            memory_ranks = [parent.memory_ranks[member] for member in members]
            store.memory_subgroup = parent.memory.subgroup(memory_ranks, count, first)
        backend = self.backend() if joiner is None else joiner.join(store)
        child = type(self)(backend, ranks, joiner, parent=self)
        try:
            # A member may close the group while other members connect. So wait for all members.
            if store.subgroup is None or not store.subgroup.is_flat:
                store.exchange(b"")
        except BaseException:
            child.close()
            raise
        return child

    def limit(self, seconds: float) -> None:
        """Set the timeout in seconds of later calls and subgroups. Not collective."""
        self.backend()
        if self._joiner is not None:
            self._joiner = self._joiner.limited(seconds)
        for backend in self._backends:
            backend.limit(seconds)
        self.open_fast_path()

    def run(self, call: Call) -> Work:
        return self.run_many([call], call.name)

    def run_many(self, calls: Sequence[Call], name: str) -> Work:
        """Start ``calls`` with arrays of one device as one operation, ``name``."""
        if thread_state.recorder is not None:
            return thread_state.recorder.verb(self, calls, name)  # type: ignore[no-any-return]
        call, *more_calls = calls
        backend = self.backend(call.out if call.array is None else call.array)
        if call.verb is BARRIER:  # a barrier waits for all devices
            backend = self.gpus or backend
        start = partial(backend.start_many, calls) if more_calls else partial(backend.start, call)
        return self.journal.run(calls, name, start)

    def keep(self, work: Then) -> Then:
        """Keep ``work`` until it has ended, so that ``synchronize`` can wait for it."""
        self._unfinished.append(work)
        if len(self._unfinished) > self._most_unfinished:
            self._unfinished = [other for other in self._unfinished if not other.is_settled]
            self._most_unfinished = max(_LEAST_UNFINISHED, 2 * len(self._unfinished))
        return work

    def synchronize(self) -> None:
        """Block until every operation that this rank started in the group has ended."""
        wait_for(self._unfinished)
        if self.gpus is not None:  # first: GPU operations may have steps on the CPU
            self.gpus.synchronize()
        self.backend().synchronize()

    def is_calling(self) -> bool:
        """Return whether this thread runs a signal handler that has interrupted a call."""
        return any(backend.is_calling() for backend in (self.gpus, self._backend) if backend)

    def end(self, error: BaseException) -> None:
        """End the group after ``error``, such as Ctrl-C. The other ranks raise PeerLostError."""
        abort.report(error, self._backends)  # no effect in a group of one rank

    def close(self) -> None:
        """Close the group and its subgroups: end pending operations, and release all resources.

        Not collective; idempotent. If another thread runs a verb of the group, this verb raises
        GroupClosedError. If a signal handler closes the group, the interrupted verb raises it.
        """
        close_all(self)
        for backend in self._leave():
            backend.close()

    def _leave(self, forked: bool = False) -> list[Backend]:
        """Make the group unusable and return its backends. A forked child must not close them."""
        self._forked |= forked
        backends, self._backends = self._backends, []
        self.gpus = self._backend = None
        self.fast.replace_by(EntryPoints())
        _watched.pop(weakref.ref(self), None)
        return backends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self.is_member:
            return f"ProcessGroup(not a member, ranks={list(self.ranks)})"
        state = "closed" if self._backend is None else self._backend.kind.name
        return f"ProcessGroup(rank={self.rank}, size={self.size}, {state})"


def close_dropped() -> None:
    """Close the backends of garbage-collected groups, unless an operation is pending."""
    for _ in range(len(dropped)):
        try:
            group = dropped[0]
        except IndexError:  # another thread has emptied the list
            return
        dropped.rotate(-1)  # keep the group until it is closed: an exception may come first
        backends = _watched.get(group, OpenGroup([])).backends
        if any(backend.is_busy() for backend in backends):
            continue
        for backend in backends:
            backend.close()
        _watched.pop(group, None)
        with suppress(ValueError):  # another thread has removed it
            dropped.remove(group)


def open_groups(top: Membership | None = None) -> dict[weakref.ref[Membership], list[Backend]]:
    """Return the backends of ``top`` and its subgroups (None: all groups), subgroups first."""
    return {
        reference: group.backends
        for reference, group in reversed(list(_watched.items()))
        if top is None or weakref.ref(top) in group.lineage
    }


def leave_all(top: Membership) -> None:
    """Notify the other ranks of ``top`` and its subgroups that this rank sends no more messages."""
    for backends in open_groups(top).values():
        for backend in list(backends):
            backend.leave()


def close_all(top: Membership | None = None) -> None:
    """Close ``top`` and its subgroups (None: all groups), also if they are garbage-collected."""
    for reference, backends in open_groups(top).items():
        if (group := reference()) is not None:
            group._leave()
        _watched.pop(reference, None)
        for backend in backends:
            backend.close()


def _forget_in_child() -> None:
    """Make all groups unusable in a forked child, which lacks their threads and connections."""
    for reference, backends in open_groups().items():
        _inherited.append(backends)
        if (group := reference()) is not None and (group.size > 1 or group._joiner is not None):
            group._leave(forked=True)
            group.journal.ranks = ()
    dropped.clear()
    _watched.clear()


system.register_at_fork(after_in_child=_forget_in_child)


_world: Membership | None = None
world_fast = EntryPoints()
"""The fast path of the world. It is a global because a call of 0.2 us has no time for a lookup."""


def use_as_world(group: Membership) -> None:
    global _world  # noqa: PLW0603  (the world of the process)
    _world = group
    world_fast.replace_by(group.fast)


def members_of(group: Membership | None) -> Membership:
    if group is None:
        assert _world is not None  # world.py sets it at import
        return _world
    if not isinstance(group, Membership):
        raise TypeError(
            "group must be a ProcessGroup, such as the result of new_group(ranks) or split(color), "
            f"got {type(group).__name__}"
        )
    return group
