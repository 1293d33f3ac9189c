"""Creation of groups and grids, and barriers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flashlight_py.checks import as_integer
from flashlight_py.device import Array
from flashlight_py.distributed.api.verb_call import Group, check_same, native_entry, reject_together
from flashlight_py.distributed.backend import Backend, exchange_bytes
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import check_rank, check_seconds
from flashlight_py.distributed.groups.membership import Membership, members_of, subgroup_numbers
from flashlight_py.distributed.rendezvous.store import Roster, Store
from flashlight_py.distributed.rendezvous.tree import FAN
from flashlight_py.distributed.verbs import BARRIER, RECV, SEND, Verb

if TYPE_CHECKING:
    from flashlight_py.distributed.api.group import ProcessGroup

__all__ = ["Grid", "barrier", "grid", "new_group", "split", "sync_distributed"]

# Tag of messages between ranks that create a group. Tags of users begin at 0.
_TAG = -1
# Maximum characters of the text of a list of ranks. A digest replaces the rest of a longer text.
_MOST_WORDS = 200


def new_group(
    ranks: Sequence[int], *, timeout: float | None = None, group: Group = None
) -> ProcessGroup:
    """Create a group of some ranks of ``group``, which is called the parent.

    Collective: every rank of the parent must call it with the same list, even ranks that are not in
    the list. Blocks. Collectives of different groups may run at the same time. To close the group,
    use a ``with`` block or call its ``close()``. If the parent is closed, the group is closed too.

    Args:
        ranks: Ranks in the parent, without duplicates. ``ranks[i]`` becomes rank i of the new
            group.
        timeout: Limit of each operation in seconds, equal on every rank. Default: the parent's.
        group: The parent. Default: the world.

    Returns:
        The group. If this rank is not in ``ranks``, ``is_member`` is False and verbs raise
        ValueError.

    Raises:
        ValueError: If ``ranks`` is empty, or has an invalid or repeated rank, or ``timeout`` <= 0.
        MismatchError: If the ranks pass different lists or timeouts. Every rank raises it.
        DistributedError: As for :func:`all_reduce` and :func:`distributed_init`.
    """
    parent = members_of(group)
    with reject_together(parent, "new_group"):
        members = [check_rank(parent.size, "new_group", "each of ranks", rank) for rank in ranks]
        if len(set(members)) < len(members):
            raise ValueError(f"new_group: ranks must not contain duplicates, got {members}")
        if not members:
            raise ValueError("new_group: ranks must contain at least one rank, got []")
        words = f"new_group {members}"
        if len(words) > _MOST_WORDS:
            digest = hashlib.sha256(words.encode()).hexdigest()[:16]
            words = f"{words[:_MOST_WORDS]}... of {len(members)} ranks (digest {digest})"
        return _create_group(parent, "new_group", words, timeout, lambda _: members)


def split(
    color: int | None, key: int = 0, *, timeout: float | None = None, group: Group = None
) -> ProcessGroup:
    """Create one group for each ``color``, with the ranks that pass this color.

    Collective over ``group`` (default: the world), like MPI_Comm_split. Blocks.

    Args:
        color: Any integer. None: this rank joins no group, and ``is_member`` of the result is
            False.
        key: Any integer. Ranks with a lower ``key`` have lower ranks in the new group. Ranks with
            equal keys keep their order.
        timeout, group: As for :func:`new_group`. The timeout is in seconds.

    Returns:
        The new group of this rank, as for :func:`new_group`.

    Raises:
        ValueError: If ``color`` or ``key`` is no integer, or ``timeout`` is not a positive number.
        DistributedError: As for :func:`new_group`.
    """
    parent = members_of(group)
    with reject_together(parent, "split"):
        number, order = None if isinstance(color, bool) else as_integer(color), as_integer(key)
        if number is None and color is not None:
            raise ValueError(f"split: color must be an integer or None, got {color!r}")
        if order is None:
            raise ValueError(f"split: key must be an integer, got {key!r}")

        def ranks_of_color(choices: Sequence[Any]) -> list[int]:
            pairs = [(k, rank) for rank, (c, k) in enumerate(choices) if c == number]
            return [] if number is None else [rank for _, rank in sorted(pairs)]

        return _create_group(parent, "split", (number, order), timeout, ranks_of_color)


@dataclass(frozen=True)
class Grid:
    """The ranks of a group as a grid, numbered row by row like in MPI_Cart_create.

    Attributes:
        rank: Rank of this process in the group.
        shape: Length of each dimension. The product is the size of the group.
        periodic: For each dimension, True if the first and the last rank are neighbours.
    """

    rank: int
    shape: tuple[int, ...]
    periodic: tuple[bool, ...]

    @property
    def coords(self) -> tuple[int, ...]:
        """Coordinates of this rank."""
        return self.coords_of(self.rank)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of ``rank``: one integer from 0 for each dimension.

        Raises:
            ValueError: If ``rank`` is no rank of the group.
        """
        rank = check_rank(math.prod(self.shape), "Grid.coords_of", "rank", rank)
        return tuple(map(int, np.unravel_index(rank, self.shape)))

    def rank_of(self, coords: Sequence[int]) -> int | None:
        """Return the rank at ``coords``. Beyond the edge of a dimension, return None.

        In a periodic dimension, coordinates beyond the edge continue at the other edge.

        Raises:
            ValueError: If ``coords`` does not have one number for each dimension.
        """
        if len(coords) != (dims := len(self.shape)):
            raise ValueError(f"Grid.rank_of: coords must have {dims} numbers, got {tuple(coords)}")
        rank = 0
        for coord, extent, wraps in zip(coords, self.shape, self.periodic, strict=True):
            if not wraps and not 0 <= coord < extent:
                return None
            rank = rank * extent + int(coord) % extent
        return rank

    def shift(self, dim: int, steps: int = 1) -> tuple[int | None, int | None]:
        """Return the ranks ``(src, dst)`` of a shift along ``dim``, like MPI_Cart_shift.

        ``dst`` is ``steps`` positions after this rank, and ``src`` is ``steps`` positions before
        it. A position beyond an edge gives None.

        Raises:
            ValueError: If the grid has no dimension ``dim``.
        """
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"Grid.shift: dim must be a dimension of {self.shape}, got {dim}")
        ends = [list(self.coords), list(self.coords)]
        ends[0][dim] -= steps
        ends[1][dim] += steps
        return self.rank_of(ends[0]), self.rank_of(ends[1])


def grid(
    shape: int | Sequence[int | None], periodic: bool | Sequence[bool] = False, *,
    group: Group = None,
) -> Grid:  # fmt: skip
    """Return a Cartesian grid of the ranks of ``group``.

    Ranks are numbered like in MPI_Cart_create. Nothing is sent, and no group is created.
    ``shift(dim, +1)`` of the grid returns the two neighbours of this rank along dimension ``dim``.
    Pass them to :func:`sendrecv` or :class:`P2POp`. Beyond an edge, the neighbour is None.

    Args:
        shape: Length of each dimension. The product must be the size of the group. Lengths of None
            or -1 are computed like in MPI_Dims_create: as equal as possible, longer ones first.
        periodic: True if the first and the last rank of a dimension are neighbours. One value for
            all dimensions, or one value for each.
        group: The process group. Default: the world.

    Raises:
        ValueError: If the product of the lengths is not the size of the group, a length is invalid,
            ``periodic`` has a wrong length, or this process is not in the group.

    Example:
        >>> fl.grid((1, None), periodic=(True, False)).shift(0, +1)  # one rank is its own neighbour
        (0, 0)
        >>> fl.grid((1, None)).shift(0, +1)  # not periodic: no neighbours
        (None, None)
    """
    members = members_of(group)
    rank = check_rank(members.size, "grid", "the rank of this process", members.rank)
    extents = extents_of(shape, members.size)
    wraps = (periodic,) * len(extents) if isinstance(periodic, bool) else tuple(periodic)
    if len(wraps) != len(extents):
        raise ValueError(f"grid: periodic must have 1 or {len(extents)} values, got {periodic!r}")
    return Grid(rank, extents, tuple(map(bool, wraps)))


def extents_of(shape: int | Iterable[int | None], size: int) -> tuple[int, ...]:
    values: list[int | None] = list(shape) if isinstance(shape, Iterable) else [shape]
    extents = [as_integer(extent) for extent in values if extent is not None and extent != -1]
    if any(extent is None or extent < 1 for extent in extents):
        raise ValueError(f"grid: shape must have positive integers, None or -1, got {shape!r}")
    product = math.prod(filter(None, extents))
    unknown = len(values) - len(extents)
    if size % product or (not unknown and product != size):
        raise ValueError(
            f"grid: the product of shape must be {size}, the number of ranks, or a divisor of it, "
            f"got {product} for shape {tuple(values)}. Pass None for a length to be computed."
        )
    computed = iter(_balanced(size // product, unknown))
    return tuple(next(computed) if extent in (None, -1) else int(extent) for extent in values)


def _balanced(size: int, dims: int) -> list[int]:
    """Return ``dims`` integers of similar size with product ``size``, larger ones first."""
    if dims < 2:
        return [size] * dims
    small = itertools.takewhile(lambda number: number**dims <= size, itertools.count(1))
    least = max(number for number in small if size % number == 0)
    return sorted([*_balanced(size // least, dims - 1), least], reverse=True)


def _create_group(
    parent: Membership, verb: str, choice: Any, timeout: float | None,
    select_members: Callable[[Sequence[Any]], list[int]],
) -> ProcessGroup:  # fmt: skip
    """Return a new group. The ``choice`` of every rank of ``parent`` determines its members.

    ``select_members`` receives the choices of all ranks and returns the members. Every rank raises
    MismatchError if ranks differ in ``timeout``, or in a ``choice`` that is a string.
    """
    seconds, backend = check_seconds(verb, timeout), parent.backend()
    with parent.journal.recording(verb):
        request = json.dumps([choice, seconds, next(subgroup_numbers)]).encode()
        answers = map(json.loads, exchange_bytes(backend, request, verb))
        choices, limits, counts = zip(*answers, strict=True)
        texts = [
            (c if isinstance(c, str) else verb) + ("" if limit is None else f", timeout={limit!r}")
            for c, limit in zip(choices, limits, strict=True)
        ]
        check_same(parent, verb, texts)
        members, store, count = select_members(choices), None, None
        if parent.rank in members:
            store, count = MemberStore(backend, verb, members), counts[members[0]]
        return cast("ProcessGroup", parent.subgroup(members, store, seconds, count))


# The members exchange their addresses through the old group, so they need no port and no file.
class MemberStore(Store):
    """A store for the members of a new group. The backend of the old group sends its messages.

    The members form a tree, so each member exchanges messages with few members. To find the parent
    of a member, write the member's rank in base FAN, and set the last nonzero digit to 0.
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
        """Send ``payload`` to all members, and return the payloads of all members. Blocks."""
        payloads = [payload]  # first this member, then the members below it in the tree
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
        return self._backend.start(call).wait()


@native_entry(BARRIER)
def barrier(timeout: float | None = None, *, group: Group = None) -> None:
    """Block until every rank of ``group`` has called ``barrier``.

    Args:
        timeout: Maximum time in seconds. Default: the timeout of the group.
        group: The process group. Default: the world.

    Raises:
        ValueError: If ``timeout`` is not positive.
        CollectiveTimeoutError: If a rank does not call it in time. The error names the rank.
        DistributedError: As for :func:`all_reduce`.
    """
    members = members_of(group)
    with reject_together(members, BARRIER):
        members.run(Call(BARRIER, seconds=check_seconds("barrier", timeout)))


def sync_distributed(*, group: Group = None) -> None:
    """Block until every operation that this rank has started in ``group`` has ended.

    Raises:
        DistributedError, ValueError: The error of an operation, if no ``wait()`` has raised it.
    """
    members_of(group).synchronize()
