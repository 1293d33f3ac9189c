"""Groups of some ranks, and what ranks wait for together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.api.verb_call import Group, native, refusing
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.exchange import exchange_bytes
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import check_rank, check_seconds, whole
from flashlight_py.distributed.groups.grid import Grid, extents_of
from flashlight_py.distributed.groups.membership import Membership, groups_so_far, of
from flashlight_py.distributed.rendezvous.places import FAN
from flashlight_py.distributed.rendezvous.store import Roster, Store
from flashlight_py.distributed.verbs import BARRIER, RECV, SEND, Verb
from flashlight_py.errors import MismatchError

if TYPE_CHECKING:
    from flashlight_py.distributed.api.group import ProcessGroup

__all__ = ["Grid", "barrier", "grid", "new_group", "split", "sync_distributed"]

# Users' tags begin at 0: this one is for members that are about to become a group.
_TAG = -1
# All ranks of the parent tell each other whom they mean: in so many characters.
_MOST_WORDS = 200


def new_group(
    ranks: Sequence[int], *, timeout: float | None = None, group: Group = None
) -> ProcessGroup:
    """Make a group of some ranks of the world, or of ``group``.

    Collective over the world (or ``group``), blocking: every rank calls it with the same list, also
    ranks that are not in it. Its collectives may be in flight together with those of other groups.
    ``with``, ``close()`` and the end of the world close it.

    Args:
        ranks: ranks in the world (or ``group``), each once; their order is that of the new ranks.
        timeout: seconds for each collective and message of the new group, default the timeout of
            the parent; the same on every rank.
        group: the parent, default the world.

    Returns:
        The group; on a rank that is not in it, a group with ``is_member`` False and ``rank`` -1,
        whose verbs raise ValueError.

    Raises:
        ValueError: a rank is out of range or twice in the list, the list is empty, or ``timeout``
            is no positive number.
        MismatchError: the ranks passed different lists or timeouts; raised on every rank.
        DistributedError: as for :func:`all_reduce` and :func:`distributed_init`.
    """
    parent = of(group)
    with refusing(parent, "new_group"):
        members = [check_rank(parent.size, "new_group", "each of ranks", rank) for rank in ranks]
        if len(set(members)) < len(members):
            raise ValueError(f"new_group: a rank is in the list twice: {members}")
        if not members:
            raise ValueError("new_group: a group has at least one rank, got none")
        return _founded(parent, "new_group", _in_words(members), timeout, lambda _: members)


def split(
    color: int | None, key: int = 0, *, timeout: float | None = None, group: Group = None
) -> ProcessGroup:
    """Make one group of all ranks that pass the same ``color``, for each color.

    Collective over the world (or ``group``), blocking, like MPI_Comm_split. The ranks of a new
    group are in the order of ``key``, then of their old ranks.

    Args:
        color: any integer; None: this rank joins no group, and gets one that it is not in.
        key: any integer.
        timeout, group: in seconds, and the parent; as for :func:`new_group`.

    Returns:
        This rank's new group; see :func:`new_group`.

    Raises:
        ValueError: ``color`` or ``key`` is no integer, or ``timeout`` no positive number.
        DistributedError: as for :func:`new_group`.
    """
    parent = of(group)
    with refusing(parent, "split"):
        number, place = None if isinstance(color, bool) else whole(color), whole(key)
        if number is None and color is not None:
            raise ValueError(f"split: color must be an integer, or None to stay out; got {color!r}")
        if place is None:
            raise ValueError(f"split: key must be an integer, got {key!r}")

        def alike(choices: Sequence[Any]) -> list[int]:
            pairs = [(k, rank) for rank, (c, k) in enumerate(choices) if c == number]
            return [] if number is None else [rank for _, rank in sorted(pairs)]

        return _founded(parent, "split", (number, place), timeout, alike)


def grid(
    shape: int | Sequence[int | None],
    periodic: bool | Sequence[bool] = False,
    *,
    group: Group = None,
) -> Grid:
    """Give the ranks of the world, or of ``group``, their places in a Cartesian grid.

    Like MPI_Cart_create without reordering; but nothing is sent, and no group is made.
    ``shift(dim, +1)`` of the result names the neighbours along a dimension, for :func:`sendrecv`
    and :class:`P2POp`: None, which is no rank there, at an edge.

    Args:
        shape: extents, whose product is the size of the group. None or -1 in place of some: they
            are computed, near each other and the larger ones first, as MPI_Dims_create does.
        periodic: whether the two ends of a dimension are neighbours: of all, or one for each.
        group: the process group, default the world.

    Raises:
        ValueError: the grid has not as many places as the group has ranks, ``shape`` has something
            else than extents, ``periodic`` another length, or this process is not in the group.

    Example:
        >>> fl.grid((1, None), periodic=(True, False)).shift(0, +1)  # a ring of one, (src, dst)
        (0, 0)
        >>> fl.grid((1, None)).shift(0, +1)  # its edges have no neighbour
        (None, None)
    """
    members = of(group)
    rank = check_rank(members.size, "grid", "the rank of this process", members.rank)
    extents = extents_of(shape, members.size)
    wraps = (periodic,) * len(extents) if isinstance(periodic, bool) else tuple(periodic)
    if len(wraps) != len(extents):
        raise ValueError(f"grid: periodic must have one value, or {len(extents)}; got {periodic!r}")
    return Grid(rank, extents, tuple(map(bool, wraps)))


def _in_words(members: Sequence[int]) -> str:
    """Return which ``members`` a new group has; of very many the first, and a digest of all."""
    words = f"new_group {list(members)}"
    if len(words) <= _MOST_WORDS:
        return words
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    return f"{words[:_MOST_WORDS]}... of {len(members)} ranks (digest {digest})"


def _founded(
    parent: Membership,
    verb: str,
    choice: Any,
    timeout: float | None,
    members_of: Callable[[Sequence[Any]], list[int]],
) -> ProcessGroup:
    """Return a group of the ``members_of`` the choices of all ranks, which exchange them.

    Texts and timeouts must be the same on all ranks, else every rank raises MismatchError.
    """
    seconds, backend = check_seconds(verb, timeout), parent.backend()
    with parent.journal.recording(verb):
        mine = json.dumps([choice, seconds, next(groups_so_far)]).encode()
        answers = map(json.loads, exchange_bytes(backend, mine, verb))
        choices, limits, counts = zip(*answers, strict=True)
        texts = [
            (c if isinstance(c, str) else verb) + ("" if limit is None else f", timeout={limit!r}")
            for c, limit in zip(choices, limits, strict=True)
        ]
        if len(set(texts)) > 1:
            calls = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise MismatchError(
                f"[{verb}] rank {parent.rank} of {parent.size}: the ranks asked for different "
                f"groups ({calls}). Every rank of the parent must pass the same"
            )
        members, store, count = members_of(choices), None, None
        if parent.rank in members:
            store, count = MemberStore(backend, verb, members), counts[members[0]]
        return cast("ProcessGroup", parent.subgroup(members, store, seconds, count))


# Members of a new group meet by messages of the old one: no port, no file, and the code that
# joined the world joins them. Every rank of the parent calls, members or not: ranks that mean
# different groups raise at once, instead of waiting for each other.
class MemberStore(Store):
    """Some ranks of a joined backend as a store; the others have nothing to do with it.

    They are a tree, by the digits of their numbers to the base FAN: each is below the one that has
    0 in the place of its last digit that is not 0. So none has many connections.
    """

    def __init__(self, backend: Backend, verb: str, members: Sequence[int]) -> None:
        self._backend, self._verb, self._members = backend, verb, list(members)
        self.rank, self.size = self._members.index(backend.rank), len(self._members)
        span, self._below = 1, list[int]()
        while span < self.size and self.rank % (span * FAN) == 0:
            end = min(self.rank + span * FAN, self.size)
            self._below += self._members[self.rank + span : end : span]
            span *= FAN
        self._above = self._members[self.rank - self.rank % (span * FAN)]

    def exchange(self, payload: bytes) -> Roster:
        """Pass ``payload`` and return every member's; collective among them, blocking."""
        payloads = [payload]  # of this rank and those below it, which follow it
        for member in self._below:
            payloads += Roster(self._receive(member))
        roster = Roster.of(payloads)
        if self.rank:
            self._send(self._above, roster.body)
            roster = Roster(self._receive(self._above))
        for member in self._below:
            self._send(member, roster.body)
        return roster

    def _send(self, peer: int, payload: bytes) -> None:
        data = np.frombuffer(bytearray(payload), np.uint8)
        for array in (np.array([data.size]), data):
            self._step(SEND, array, peer)

    def _receive(self, peer: int) -> bytes:
        length = self._step(RECV, np.zeros(1, np.int64), peer)
        return self._step(RECV, np.empty(length[0], np.uint8), peer).tobytes()

    def _step(self, verb: Verb, array: Array, peer: int) -> Array:
        call = Call(verb, array, peer=peer, tag=_TAG, part_of=self._verb)
        moved: Array = self._backend.start(call).wait()
        return moved


@native(BARRIER)
def barrier(timeout: float | None = None, *, group: Group = None) -> None:
    """Block until every rank of the group has called it, up to ``timeout`` seconds.

    Raises:
        ValueError: ``timeout`` is not positive.
        CollectiveTimeoutError: a rank (named) did not arrive in time.
        DistributedError: as for :func:`all_reduce`.
    """
    members = of(group)
    with refusing(members, BARRIER):
        members.run(Call(BARRIER, seconds=check_seconds("barrier", timeout)))


def sync_distributed(*, group: Group = None) -> None:
    """Block until every operation that this rank has started has ended, as flashlight names it.

    Raises:
        DistributedError, ValueError: a failure that no ``wait()`` has raised; each only once.
    """
    of(group).synchronize()
