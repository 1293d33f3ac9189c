"""Arrays between hosts: small ones travel with the comparison of the calls, in its one exchange.

A large array is reduced or collected inside each host. Then leader i of each host exchanges section
i with the others, which uses all links and cores, and the sections are shared inside the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.arrays import as_bytes, check_out_rows, dtype_code, row_bytes
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import factors, split_rows
from flashlight_py.distributed.failures.agreement import NO_LOAD, Load, RankMessage, between_hosts
from flashlight_py.distributed.verbs import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
)
from flashlight_py.distributed.work import Done, Work

# What a host sends each other one: no more than travels with a call of Gloo's, and some numbers.
_MOST_BYTES = 63 << 10

# Below this a section per leader would only multiply messages: one rank carries everything.
_SMALL_BYTES = 64 << 10

# Longer arrays go in pieces: one is reduced or shared inside while another is on the wire.
_PIECE_BYTES = 16 << 20

_DONE = Done()
_GATHERS = (ALL_GATHER, GATHER)
_MOVED = (ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST)


class HostCalls:
    """The calls of rank ``rank`` of ``hosts``.

    The data of small calls travels with their digests, by ``load``, ``has`` and ``take``: one
    exchange instead of two or three. The verdict comes before anything is written, so a mismatch
    changes no array. The other methods are for large arrays, once all ranks have called the same.

    ``inside`` and ``between`` are those of ``HierarchicalBackend``. ``far`` is the timeout in
    seconds between hosts. ``runs_ahead`` is called if a call ends before that of a local peer.
    """

    far: float

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        inside: Backend,
        between: Backend | None,
        runs_ahead: Callable[[], None],
    ) -> None:
        self._rank, self._hosts, self._inside, self._between = rank, hosts, inside, between
        self._order = [r for host in hosts for r in host]
        self._in_order, self._size = self._order == sorted(self._order), len(self._order)
        self._host_of = {r: h for h, host in enumerate(hosts) for r in host}
        self._home = self._host_of[rank]
        self._leaders, largest = min(map(len, hosts)), max(map(len, hosts))
        # All ranks are leaders, and a leader's section of what is of its host's ranks is its own.
        self._even = self._leaders == largest
        self._most = _MOST_BYTES // (len(hosts) - 1)
        self._most_of_each = self._most // largest
        self._native = _native.load("gloo")
        self._runs_ahead = runs_ahead

    def load(self, call: Call) -> Load:
        """Return what this rank gives with ``call``; of a large array no data."""
        if call.compared or call.refusal or call.array is None:
            return NO_LOAD
        array: Array = call.array
        if call.verb in _GATHERS:
            few = self._are_few(call, len(array))
            return Load(len(array), as_bytes(array) if few else NO_LOAD.data)
        if array.nbytes > self._most or call.verb not in _MOVED:
            return NO_LOAD
        if call.verb is BROADCAST:
            return Load(0, as_bytes(array)) if self._rank == call.root else NO_LOAD
        first, last = factors(array.dtype, call.op, call.scale)
        kind = call.name, array.dtype, call.op
        made = partial(self._combined, *kind, first), partial(self._combined, *kind, last)
        return Load(0, as_bytes(array), *made)

    def _are_few(self, call: Call, rows: int) -> bool:
        return rows * row_bytes(call.array) <= self._most_of_each

    def has(self, call: Call, found: RankMessage) -> bool:
        """Return whether ``found``, what the ranks have agreed with, has the result of ``call``."""
        if call.compared or call.array is None:
            return False
        if call.verb in _GATHERS:
            return all(self._are_few(call, rows) for rows in found.lengths)
        return call.verb in _MOVED and call.array.nbytes <= self._most

    def take(self, call: Call, found: RankMessage) -> Any:
        """Return the result of ``call``, which ``found`` has; writes what the verb writes."""
        array: Array = call.array
        if not call.verb.fills(self._rank, call.root):
            return array if call.verb.in_place else None
        if call.verb is BROADCAST and self._rank == call.root:
            return array  # which may be read-only
        if call.verb in _GATHERS:
            rows = sum(found.lengths)
            whole = np.ndarray((rows, *array.shape[1:]), array.dtype, found.data)
            return self._in_rank_order(call, whole, found.lengths)
        result, whole = array, np.ndarray(array.shape, array.dtype, found.data)
        if not call.verb.in_place:
            whole = whole[self._rows_of(call, self._rank)]
            result = call.room(len(whole))
        result[...] = whole
        return result

    def _combined(
        self, name: str, dtype: np.dtype[Any], op: int, scale: float, parts: Sequence[Array]
    ) -> Array:
        """Return ``parts``, bytes of ``dtype``, combined in their order as large arrays are."""
        ffi, count = self._native.ffi, parts[0].size // dtype.itemsize
        result = np.empty_like(parts[0])
        where = ffi.from_buffer("char[]", result, require_writable=True)
        sources = ffi.new("const void *[]", [ffi.from_buffer(part) for part in parts])
        code = dtype_code(name, dtype)
        self._native.lib.fl_reduce(code, op, scale, where, sources, len(parts), count)
        return result

    def all_reduce(self, call: Call) -> Array:
        """Reduce inside the hosts, between them, and share."""
        array: Array = call.array
        first, last = factors(array.dtype, call.op, call.scale)
        inside, between = (Call(ALL_REDUCE, None, call.op, scale) for scale in (first, last))
        self._exchange(array, inside, between)
        return array

    def broadcast(self, call: Call) -> Array:
        """Send it to the root's host, from there to the others."""
        array: Array = call.array
        home, inside = self._host_of[call.root], None
        if self._home == home:
            inside = Call(BROADCAST, root=self._hosts[home].index(call.root))
        self._exchange(array, inside, Call(BROADCAST, root=home))
        return array

    def _exchange(self, array: Array, inside: Call | None, between: Call) -> None:
        """Call ``inside`` of each piece, then ``between`` the hosts, and share it inside."""
        flat, index = array.reshape(-1), self._inside.rank
        before: tuple[Sequence[Array], Work] = (), _DONE
        for piece in cut_evenly(flat, max(1, array.nbytes // _PIECE_BYTES)):
            if inside is not None:
                self._inside.start(replace(inside, array=piece)).wait()
            work: Work = _DONE
            parts = cut_evenly(piece, 1 if piece.nbytes <= _SMALL_BYTES else self._leaders)
            if self._between is not None and index < len(parts):
                how = {"seconds": self.far, "blocking": piece.size == array.size}
                work = self._between.start(replace(between, array=parts[index], **how))
            self._share(*before)
            before = parts, work
        self._share(*before)

    def _share(self, sections: Sequence[Array], work: Work = _DONE) -> None:
        """Have every rank of the host get section i of leader i, when ``work`` has ended."""
        work.wait()
        for leader, part in enumerate(sections):
            self._send_inside(part, leader)

    def _send_inside(self, array: Array, leader: int) -> None:
        # So long a host's ranks wait for one of them that waits for other hosts.
        patience = between_hosts(self.far)
        self._inside.start(Call(BROADCAST, array, root=leader, seconds=patience)).wait()

    def reduce(self, call: Call) -> Array:
        """Reduce inside the hosts, then between them to the root's."""
        array: Array = call.array
        home = self._host_of[call.root]
        place = self._hosts[home].index(call.root)
        leader = place if place < self._leaders else 0  # of every host; only leaders are joined
        first, last = factors(array.dtype, call.op, call.scale)
        total = array.copy()
        self._inside.start(Call(REDUCE, total, call.op, first, root=leader)).wait()
        if self._inside.rank == leader and self._between is not None:
            between = Call(REDUCE, total, call.op, last, home, seconds=self.far)
            self._between.start(between).wait()
        else:
            self._runs_ahead()
        if self._home == home and place != leader:
            self._send_inside(total, leader)
        if self._rank == call.root:
            array[...] = total
        return array

    def all_gather(self, call: Call, rows: Sequence[int]) -> Array:
        """Collect the ``rows`` of each rank, given host by host, and exchange them."""
        total = sum(rows)
        whole = (call if self._in_order else replace(call, out=None)).room(total)
        lengths = [count * row_bytes(call.array) for count in rows]
        self._gather(as_bytes(call.array), self._regions(as_bytes(whole), lengths))
        return self._in_rank_order(call, whole, rows, not self._in_order)

    def _gather(self, mine: Array, regions: Sequence[Region]) -> None:
        """Fill the ``regions``; ``mine`` is this rank's part of its own host's."""
        home, index = regions[self._home], self._inside.rank
        work: Work = _DONE
        if self._even:  # its section is its part: those of the others can wait
            work = self._give(mine, blocking=False)
        self._inside.start(Call(ALL_GATHER, mine, out=home.whole)).wait()
        if self._between is not None and not self._even:
            work = self._give(home.sections[index], blocking=True)
        came = work.wait()
        if came is not None:
            places = [region.sections[index] for region in regions]
            for place, part in zip(places, split_rows(came, list(map(len, places))), strict=True):
                place[...] = part
        for region in regions:
            if region is not home:
                self._share(region.sections)

    def _give(self, section: Array, blocking: bool) -> Work:
        assert self._between is not None
        return self._between.start(Call(ALL_GATHER, section, blocking=blocking, seconds=self.far))

    def reduce_scatter(self, call: Call) -> Array:
        """Reduce each host's parts inside all hosts, then between them, and share what is due."""
        first, last = factors(call.array.dtype, call.op, call.scale)
        parts = [call.array[self._rows_of(call, rank)] for rank in self._order]
        flat = (call.array if self._in_order else np.concatenate(parts)).reshape(-1)
        counts = [part.size for part in parts]
        ours, lengths = self._reduce_regions(call, first, self._regions(flat, counts))
        result = call.room(len(call.array[self._rows_of(call, self._rank)]))
        if self._even:  # its section is its part
            self._reduce_section(call, last, ours, lengths, result.reshape(-1))
            self._runs_ahead()
            return result
        home = split_rows(counts, [len(host) for host in self._hosts])[self._home]
        whole = np.empty(sum(home), flat.dtype)
        sections = self._sections(whole, home)
        if self._between is not None:
            self._reduce_section(call, last, ours, lengths, sections[self._inside.rank])
        self._share(sections)
        result[...] = split_rows(whole, home)[self._inside.rank].reshape(result.shape)
        return result

    def _reduce_regions(
        self, call: Call, scale: float, regions: Sequence[Region]
    ) -> tuple[Array, list[int]]:
        """Return this leader's sections, reduced inside its host, and how long each is."""
        index = self._inside.rank
        sizes = [[len(section) for section in region.sections] for region in regions]
        lengths = [0 if self._between is None else some[index] for some in sizes]
        ours = np.empty(sum(lengths), call.array.dtype)
        rest = [0] * (self._inside.size - self._leaders)
        for region, some, room in zip(regions, sizes, split_rows(ours, lengths), strict=True):
            step = Call(REDUCE_SCATTER, region.whole, call.op, scale, rows=some + rest, out=room)
            self._inside.start(step).wait()
        return ours, lengths

    def _reduce_section(
        self, call: Call, scale: float, ours: Array, lengths: Sequence[int], out: Array
    ) -> None:
        assert self._between is not None
        step = Call(REDUCE_SCATTER, ours, call.op, scale, rows=lengths, out=out, seconds=self.far)
        self._between.start(step).wait()

    def _regions(self, whole: Array, counts: Sequence[int]) -> list[Region]:
        """Cut ``whole``, which has ``counts`` elements of each rank, host by host."""
        by_host = split_rows(counts, [len(host) for host in self._hosts])
        wholes = split_rows(whole, list(map(sum, by_host)))
        parts = zip(wholes, by_host, strict=True)
        return [Region(part, self._sections(part, some)) for part, some in parts]

    def _sections(self, whole: Array, counts: Sequence[int]) -> list[Array]:
        """Cut what is of one host's ranks into what its leaders exchange."""
        if self._even:
            return list(split_rows(whole, counts))
        return cut_evenly(whole, self._leaders)

    def _rows_of(self, call: Call, rank: int) -> slice:
        """Return the rows of a reduce_scatter that are for ``rank``."""
        rows = call.rows or [len(call.array) // self._size] * self._size
        begin = sum(rows[:rank])
        return slice(begin, begin + rows[rank])

    def _in_rank_order(
        self, call: Call, whole: Array, rows: Sequence[int], copies: bool = True
    ) -> Array:
        """Return ``whole``, the ``rows`` of each rank host by host, as the result of ``call``.

        Raises:
            ValueError: ``call.out`` has another number of rows.
        """
        if call.out is not None:
            check_out_rows(call.name, call.out, sum(rows), self._rank, self._size)
        if not copies:
            return whole
        parts = sorted(zip(self._order, split_rows(whole, rows), strict=True), key=itemgetter(0))
        return np.concatenate([part for _, part in parts], out=call.room(sum(rows)))


def cut_evenly(flat: Any, count: int) -> list[Any]:
    """Return the elements in ``count`` consecutive parts, whose sizes differ by one at most."""
    size = len(flat)
    return [flat[size * i // count : size * (i + 1) // count] for i in range(count)]


class Region(NamedTuple):
    """The parts of one host's ranks, one after the other; and cut for leaders."""

    whole: Array
    sections: Sequence[Array]
