"""Collectives over several hosts. A small array is sent with the comparison of the calls.

The leaders of a host are its first ranks; every host has the same number of leaders. A large array
is first reduced or collected inside each host, and cut into one section for each leader. Leader i
of each host then exchanges section i with leader i of every other host, so all leaders send in
parallel. Finally, each leader broadcasts its section inside its host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.arrays import as_bytes, check_out_rows, row_bytes
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import (
    combine_natively,
    factors,
    split_rows,
    store_each,
)
from flashlight_py.distributed.failures.agreement import NO_LOAD, Load, RankMessage, between_hosts
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_REDUCE, BROADCAST, Verb
from flashlight_py.distributed.work import Done, Work

# Maximum bytes of array data that a host sends to another in a comparison: one Gloo message.
_MAX_BYTES = 63 << 10

# Arrays up to this number of bytes are sent by one leader: sections would need more messages.
_SMALL_BYTES = 64 << 10

# Longer arrays (bytes) are cut into chunks: a chunk is reduced inside a host during the transfer of
# another chunk between hosts.
_CHUNK_BYTES = 16 << 20

_DONE: Work = Done()


class HostCalls:
    """The collectives of rank ``rank`` in ``hosts``.

    Ranks send small arrays with the comparison of the call: ``load`` returns the data that this
    rank sends, and ``take`` returns the result. This saves one or two exchanges, and detects a
    mismatch before any array changes. The other methods send large arrays, after all ranks have
    made the same call.

    ``inside`` and ``between``: see ``HierarchicalBackend``. ``far`` is the timeout between hosts in
    seconds. ``runs_ahead`` is called if this rank may end a call before other ranks of its host.
    """

    far: float

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], inside: Backend, between: Backend | None,
        runs_ahead: Callable[[], None],
    ) -> None:  # fmt: skip
        self._rank, self._hosts, self._inside, self._between = rank, hosts, inside, between
        self._order = [r for host in hosts for r in host]
        self._in_order, self._size = self._order == sorted(self._order), len(self._order)
        self._host_of = {r: h for h, host in enumerate(hosts) for r in host}
        self._home = self._host_of[rank]
        self._leaders, largest = min(map(len, hosts)), max(map(len, hosts))
        # If True, each rank is a leader, and its section is its own data.
        self._even = self._leaders == largest
        self._max_bytes = _MAX_BYTES // (len(hosts) - 1)
        self._max_rank_bytes = self._max_bytes // largest
        self._native = _native.load_extension("gloo")
        self._runs_ahead = runs_ahead

    def load(self, call: Call) -> Load:
        """Return the data of ``call`` for its comparison; ``NO_LOAD`` if the array is large."""
        if call.compared or call.refusal or call.array is None:
            return NO_LOAD
        array: Array = call.array
        if call.verb.ragged:
            fits = self._fits_in_message(call, len(array))
            return Load(len(array), as_bytes(array) if fits else NO_LOAD.data)
        if not self._fits_whole(call.verb, array):
            return NO_LOAD
        if call.verb is BROADCAST:
            return Load(0, as_bytes(array)) if self._rank == call.root else NO_LOAD

        def combined(scale: float, parts: Sequence[Array]) -> Array:
            result = np.empty_like(parts[0])  # the parts are bytes
            combine_natively(self._native, parts, call.op, scale, result.view(array.dtype))
            return result

        scales = factors(array.dtype, call.op, call.scale)
        return Load(0, as_bytes(array), *(partial(combined, scale) for scale in scales))

    def _fits_whole(self, verb: Verb, array: Array) -> bool:
        is_sent = verb is BROADCAST or (verb.reduces and not verb.prefix)
        return is_sent and array.nbytes <= self._max_bytes

    def _fits_in_message(self, call: Call, rows: int) -> bool:
        return rows * row_bytes(call.array) <= self._max_rank_bytes

    def has(self, call: Call, message: RankMessage) -> bool:
        """Return whether ``message``, received in the comparison, has the result of ``call``."""
        if call.compared or call.array is None:
            return False
        if call.verb.ragged:
            return all(self._fits_in_message(call, rows) for rows in message.lengths)
        return self._fits_whole(call.verb, call.array)

    def take(self, call: Call, message: RankMessage) -> Any:
        """Copy the result in ``message`` to ``call.array`` or ``call.out``, and return it."""
        array: Array = call.array
        if not call.verb.fills(self._rank, call.root):
            return array if call.verb.in_place else None
        if call.verb is BROADCAST and self._rank == call.root:
            return array  # do not write to it: it may be read-only
        if call.verb.ragged:
            values = np.ndarray((sum(message.lengths), *array.shape[1:]), array.dtype, message.data)
            return self._in_rank_order(call, values, message.lengths)
        result, values = array, np.ndarray(array.shape, array.dtype, message.data)
        if not call.verb.in_place:
            values = values[self._rows_of(call, self._rank)]
            result = call.room(len(values))
        result[...] = values
        return result

    def all_reduce(self, call: Call) -> Any:
        """Reduce inside each host and then between hosts. Copy the result to all ranks."""
        first, last = factors(call.array.dtype, call.op, call.scale)
        inside, between = (Call(call.verb, None, call.op, scale) for scale in (first, last))
        self._exchange(call.array, inside, between)
        return call.array

    def broadcast(self, call: Call) -> Any:
        """Send the root's array to the leaders of its host, then to the other hosts."""
        home, inside = self._host_of[call.root], None
        if self._home == home:
            inside = Call(call.verb, root=self._hosts[home].index(call.root))
        self._exchange(call.array, inside, Call(call.verb, root=home))
        return call.array

    def _exchange(
        self, array: Array, inside: Call | None, between: Call, is_shared: bool = True
    ) -> None:
        """Run the calls ``inside`` and then ``between`` (on leaders only) for each chunk of
        ``array``; then ``_share`` the chunk, if ``is_shared``."""
        flat, index = array.reshape(-1), self._inside.rank
        before: tuple[Sequence[Array], Work] = (), _DONE
        for chunk in cut_evenly(flat, max(1, array.nbytes // _CHUNK_BYTES)):
            if inside is not None:
                self._inside.start(replace(inside, array=chunk)).wait()
            work: Work = _DONE
            parts = cut_evenly(chunk, 1 if chunk.nbytes <= _SMALL_BYTES else self._leaders)
            if self._between is not None and index < len(parts):
                options = {"seconds": self.far, "blocking": chunk.size == array.size}
                work = self._between.start(replace(between, array=parts[index], **options))
            self._share(*before)
            before = parts if is_shared else (), work
        self._share(*before)

    def _share(self, sections: Sequence[Array], work: Work = _DONE) -> None:
        """Wait for ``work``, then broadcast each ``sections[i]`` from leader i inside this host."""
        work.wait()
        # A leader may itself wait for other hosts, so the ranks of its host wait longer.
        patience = between_hosts(self.far)
        for leader, part in enumerate(sections):
            self._inside.start(Call(BROADCAST, part, root=leader, seconds=patience)).wait()

    def reduce(self, call: Call) -> Any:
        """Reduce inside each host, then between hosts to the host of the root."""
        first, last = factors(call.array.dtype, call.op, call.scale)
        home, inside = self._host_of[call.root], Call(ALL_REDUCE, None, call.op, first)
        array = call.array if self._rank == call.root else call.array.copy()
        between = Call(call.verb, None, call.op, last, home)
        self._exchange(array, inside, between, is_shared=self._home == home)
        self._runs_ahead()
        return call.array

    def all_gather(self, call: Call, rows: Sequence[int]) -> Array:
        """Gather the arrays of all ranks; ``rows`` has a row count for each rank, host by host."""
        gathered = (call if self._in_order else replace(call, out=None)).room(sum(rows))
        data, index = as_bytes(call.array), self._inside.rank
        sizes = [count * row_bytes(call.array) for count in rows]
        counts = split_rows(sizes, [len(host) for host in self._hosts])
        regions = split_rows(as_bytes(gathered), list(map(sum, counts)))  # one for each host
        # Each region has a section for each leader.
        sections = [
            split_rows(region, of_host) if self._even else cut_evenly(region, self._leaders)
            for region, of_host in zip(regions, counts, strict=True)
        ]
        work, step = _DONE, Call(ALL_GATHER, data, blocking=False, seconds=self.far)
        if self._between is not None and self._even:  # the section is this rank's data
            work = self._between.start(step)
        self._inside.start(Call(ALL_GATHER, data, out=regions[self._home])).wait()
        if self._between is not None and not self._even:
            step = replace(step, array=sections[self._home][index], blocking=True)
            work = self._between.start(step)
        if (received := work.wait()) is not None:
            targets = [of_host[index] for of_host in sections]
            store_each(targets, split_rows(received, list(map(len, targets))))
        for host, of_host in enumerate(sections):
            if host != self._home:
                self._share(of_host)
        return self._in_rank_order(call, gathered, rows, not self._in_order)

    def reduce_scatter(self, call: Call) -> Array:
        """Reduce inside hosts, then between hosts; return this rank's part of the result."""
        own_rows = self._rows_of(call, self._rank)
        result = call.room(own_rows.stop - own_rows.start)
        if not self._even:
            total = replace(call, verb=ALL_REDUCE, array=call.array.copy())
            result[...] = self.all_reduce(total)[own_rows]
            return result
        assert self._between is not None  # each rank is a leader
        first, last = factors(call.array.dtype, call.op, call.scale)
        parts = [call.array[self._rows_of(call, rank)] for rank in self._order]
        flat = (call.array if self._in_order else np.concatenate(parts)).reshape(-1)
        counts = split_rows([part.size for part in parts], [len(host) for host in self._hosts])
        lengths = [of_host[self._inside.rank] for of_host in counts]
        reduced = np.empty(sum(lengths), flat.dtype)
        arrays = split_rows(flat, list(map(sum, counts))), split_rows(reduced, lengths)
        for array, out, rows in zip(*arrays, counts, strict=True):
            step = Call(call.verb, array, call.op, first, rows=rows, out=out)
            self._inside.start(step).wait()
        step = Call(call.verb, reduced, call.op, last, seconds=self.far)
        self._between.start(replace(step, rows=lengths, out=result.reshape(-1))).wait()
        self._runs_ahead()
        return result

    def _rows_of(self, call: Call, rank: int) -> slice:
        """Return the rows that ``rank`` receives in a reduce_scatter."""
        rows = call.rows or [len(call.array) // self._size] * self._size
        begin = sum(rows[:rank])
        return slice(begin, begin + rows[rank])

    def _in_rank_order(
        self, call: Call, gathered: Array, rows: Sequence[int], copies: bool = True
    ) -> Array:
        """Return the rows of ``gathered`` in rank order. In ``gathered`` they are sorted by host.

        Raises ValueError if ``call.out`` has a wrong number of rows.
        """
        if call.out is not None:
            check_out_rows(call.name, call.out, sum(rows), self._rank, self._size)
        if not copies:
            return gathered
        parts = sorted(zip(self._order, split_rows(gathered, rows), strict=True), key=itemgetter(0))
        return np.concatenate([part for _, part in parts], out=call.room(sum(rows)))


def cut_evenly(flat: Any, count: int) -> list[Any]:
    """Cut ``flat`` into ``count`` consecutive parts, whose lengths differ by at most one."""
    size = len(flat)
    return [flat[size * i // count : size * (i + 1) // count] for i in range(count)]
