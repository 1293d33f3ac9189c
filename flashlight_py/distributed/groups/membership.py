"""Groups without their verbs: members, backends, subgroups, and the open groups of this process.

A group may be collected in the middle of a wait and on any thread, where closing its backends could
wait for the interrupted call. The next call of any group closes them once their operations have
ended, because other ranks may still wait for these. A shutdown closes all groups.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flashlight_py.device import is_cupy
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.fast_path import EntryPoints, dropped, left_to_python
from flashlight_py.distributed.calls.journal import Journal, name_of_group
from flashlight_py.distributed.calls.self_messages import SelfMessages
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.verbs import BARRIER
from flashlight_py.distributed.work import Then, Work, wait_for
from flashlight_py.errors import BackendUnavailableError, GroupClosedError
from flashlight_py.structure import here

if TYPE_CHECKING:
    from typing_extensions import Self


# The backends of each group that is not closed. Weak references call no Python code when a group is
# collected: an exception of a signal handler would be lost there.
_watched: dict[weakref.ref[Membership], list[Backend]] = {}

_LEAST_UNFINISHED = 8  # kept results, before those that have been waited for are removed
groups_so_far = itertools.count(1)  # subgroups that this process has made or been asked for
# A forked child keeps the backends of its parent, because it must not destroy them.
_inherited: list[list[Backend]] = []


@runtime_checkable
class HasCupySide(Protocol):
    """A backend whose library also moves CuPy arrays, so that NCCL is not needed."""

    def cupy_side(self) -> Backend: ...


@dataclass(frozen=True)
class Joiner:
    """Functions that join ranks or their GPUs; ``limited`` returns those for another timeout."""

    join: Callable[[Store], Backend]
    join_gpus: Callable[[Backend], Backend]
    limited: Callable[[float], Joiner]


class Membership:
    """Some ranks of the world and the backends that join them. ``rank`` is -1 outside of it."""

    rank = -1
    gpus: Backend | None = None  # that of CuPy arrays, once the GPUs are joined
    _forked = False

    def __init__(
        self,
        backend: Backend | None,
        ranks: Sequence[int] | None = None,
        joiner: Joiner | None = None,
        first_use: Callable[[], None] | None = None,
    ) -> None:
        self.on_first_use = first_use  # the first call calls it; until then there is no fast path
        self.fast = EntryPoints()
        self._backend, self._joiner = backend, joiner
        self._joined: list[Backend] = []  # what is to be closed, also where the group is dropped
        self._children: dict[weakref.ref[Membership], None] = {}
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
            self._joined.append(backend)
            if joiner is not None or backend.size > 1:
                _watched[weakref.ref(self, dropped.append)] = self._joined
            if first_use is None:
                self.fast.replace_by(backend.bind(self.journal))
            backend.count = self.journal.count
        self.size = len(self.ranks)

    def open_fast_path(self) -> None:
        """Use the fast path of the backend as it is now."""
        self.on_first_use = None
        self.fast.replace_by(self.backend().bind(self.journal))
        if self.gpus is not None:
            self.fast.barrier = left_to_python  # it is one of the GPUs too
        if self is _world:
            use_as_world(self)

    @property
    def is_member(self) -> bool:
        """Whether this process is one of the group's ranks."""
        return self.rank >= 0

    @property
    def is_open(self) -> bool:
        """Whether the group can be used: it was not closed, and the process is not a fork."""
        return self._backend is not None

    def backend(self, array: Any = None) -> Backend:
        """Return the backend that ``array`` (None: a NumPy array) goes through.

        The first CuPy array of a group joins its GPUs: collective then, and blocking.

        Raises:
            ValueError: this process is not in the group.
            GroupClosedError: the group was closed.
            BackendUnavailableError: nothing here moves arrays of this kind.
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
                f"this process is not in the group of the world's ranks {list(self.ranks)}, and "
                "only they can use it; ask group.is_member first"
            )
        place = f"rank {self.rank} of {self.size}"
        if self._forked:
            return GroupClosedError(
                f"{place}: this process was forked from that rank, and is none itself: its groups "
                "cannot be used here. Call distributed_init in the child for a world of its own"
            )
        return GroupClosedError(f"{place}: this group is closed")

    def join_gpus(self) -> Backend:
        """Join the ranks' GPUs by NCCL, unless they are. Collective and blocking the first time.

        Raises:
            BackendUnavailableError: NCCL, CuPy or a GPU is missing on a rank; raised on all.
            DistributedError: NCCL failed, or a rank (named) did not arrive.
        """
        if self.gpus is None:
            if self._joiner is None:
                raise BackendUnavailableError(
                    f"rank {self.rank} of {self.size}: CuPy arrays travel through NCCL, and this "
                    "group was made without it; use array.get()"
                )
            backend, join = self.backend(), self._joiner.join_gpus
            self.gpus = backend.cupy_side() if isinstance(backend, HasCupySide) else join(backend)
            self._joined.insert(0, self.gpus)
            self.open_fast_path()
        return self.gpus

    def subgroup(
        self,
        members: list[int],
        store: Store | None,
        timeout: float | None,
        count: int | None = None,
    ) -> Self:
        """Join ``members`` of this group by ``store``; None: this rank is not one of them.

        Collective among them, blocking. ``timeout`` (seconds) is for calls of the new group; None:
        as in this one. ``count`` is that of ``groups_so_far`` on the first member, if known.
        """
        ranks, joiner = [self.ranks[member] for member in members], self._joiner
        if store is None:
            return type(self)(None, ranks)
        assert joiner is not None or self.size == 1
        if joiner is not None and timeout is not None:
            joiner = joiner.limited(timeout)
        parent = self.backend()
        if count is None and (parent.network or parent.memory):
            count = int(store.exchange(b"%d" % next(groups_so_far))[0])
        if parent.network is not None:
            store.subgroup = parent.network.subgroup(members, count, parent.network is parent)
        if parent.memory is not None:
            first = (parent.network or parent.memory).network_ranks[members[0]]
            near = [parent.memory_ranks[member] for member in members]
            store.memory_subgroup = parent.memory.subgroup(near, count, first)
        backend = self.backend() if joiner is None else joiner.join(store)
        child = type(self)(backend, ranks, joiner)
        self._children[weakref.ref(child, self._children.pop)] = None
        try:
            # One that closes the group at once must not do so while others still connect to it.
            if store.subgroup is None or not store.subgroup.is_flat:
                store.exchange(b"")
        except BaseException:
            child.close()
            raise
        return child

    def limit(self, seconds: float) -> None:
        """Set the timeout in seconds of later calls and subgroups; not collective."""
        self.backend()
        if self._joiner is not None:
            self._joiner = self._joiner.limited(seconds)
        for joined in self._joined:
            joined.limit(seconds)
        self.open_fast_path()

    def run(self, call: Call) -> Work:
        """Start ``call``, and wait for its end if it is blocking; the journal has it."""
        return self.run_many([call], call.name)

    def run_many(self, calls: Sequence[Call], name: str) -> Work:
        """Start ``calls`` of arrays of one device together: in the journal one call of ``name``."""
        if here.recorder is not None:
            return here.recorder.verb(self, calls, name)  # type: ignore[no-any-return]
        call, *others = calls
        backend = self.backend(call.out if call.array is None else call.array)
        if call.verb is BARRIER:  # of everything that ranks do
            backend = self.gpus or backend
        start = partial(backend.start_many, calls) if others else partial(backend.start, call)
        return self.journal.run(calls, name, start)

    def keep(self, work: Then) -> Then:
        """Remember a result that is still to be brought home, also if nobody waits for it."""
        self._unfinished.append(work)
        if len(self._unfinished) > self._most_unfinished:
            self._unfinished = [other for other in self._unfinished if not other.is_heard]
            self._most_unfinished = max(_LEAST_UNFINISHED, 2 * len(self._unfinished))
        return work

    def synchronize(self) -> None:
        """Block until every operation that this rank has started in the group has ended."""
        wait_for(self._unfinished)
        if self.gpus is not None:  # before the host's side, which may do a part of the same work
            self.gpus.synchronize()
        self.backend().synchronize()

    def is_calling(self) -> bool:
        """Return whether this thread is in the middle of a call: it runs a signal handler."""
        return any(backend.is_calling() for backend in (self.gpus, self._backend) if backend)

    def end(self, error: BaseException) -> None:
        """End the group after Ctrl-C interrupted a call; the other ranks raise ``error``."""
        abort.report(error, self._joined)  # none, or one that does nothing, where there is no other

    def close(self) -> None:
        """End pending operations, also of subgroups, and free the sockets.

        Not collective; idempotent. A verb on another thread, or one that a signal handler has
        interrupted to close the group, raises GroupClosedError.
        """
        for known in list(self._children):
            if (child := known()) is not None:
                child.close()
        for backend in self._leave():
            backend.close()

    def _leave(self, forked: bool = False) -> list[Backend]:
        """Make the group unusable and return its backends, which a ``forked`` child leaves open."""
        self._forked |= forked
        backends, self._joined = self._joined, []
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
    """Close what belonged to groups that were dropped, unless something runs there."""
    for _ in range(len(dropped)):
        try:
            group = dropped[0]
        except IndexError:  # another thread does the same
            return
        dropped.rotate(-1)  # it stays until it is closed, also where that is interrupted
        backends = _watched.get(group, [])
        if any(backend.is_busy() for backend in backends):
            continue
        for backend in backends:
            backend.close()
        _watched.pop(group, None)
        with suppress(ValueError):  # another thread has closed it too
            dropped.remove(group)


def leave_all() -> None:
    """Let the other ranks know that this one begins no more messages in any group."""
    for backends in list(_watched.values()):
        for backend in list(backends):
            backend.leave()


def close_all() -> None:
    """Close every group that is open, and those that were dropped."""
    for group in _groups():
        group.close()
    for known in list(_watched):
        for backend in _watched.pop(known, []):
            backend.close()
    dropped.clear()


def _groups() -> list[Membership]:
    """Return the groups that are neither closed nor dropped."""
    return [group for known in list(_watched) if (group := known()) is not None]


def _forget_in_child() -> None:
    """After a fork: the groups are the parent's, whose threads and connections are not here."""
    _inherited.extend(_watched.values())
    for group in _groups():
        group._leave(forked=True)
        group.journal.ranks = ()
    dropped.clear()
    _watched.clear()


os.register_at_fork(after_in_child=_forget_in_child)


_world: Membership | None = None
world_fast = EntryPoints()
"""The fast path of the world, whichever group that is: a call of 0.2 us has no time to ask."""


def use_as_world(group: Membership) -> None:
    """Make ``group`` what stands for the world: all ranks as they are now."""
    global _world  # noqa: PLW0603  (the world of the process)
    _world = group
    world_fast.replace_by(group.fast)


def of(group: Membership | None) -> Membership:
    """Return ``group``, or the world in place of None."""
    if group is None:
        assert _world is not None  # world.py begins with a world of this process alone
        return _world
    if not isinstance(group, Membership):
        raise TypeError(
            "group must be a ProcessGroup, as new_group(ranks) and split(color) make it; got "
            f"{type(group).__name__}"
        )
    return group
