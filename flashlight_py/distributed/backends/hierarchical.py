"""Several hosts: shared memory inside each, another backend between them, by composition.

An array is reduced inside each host first. Then local rank i of every host exchanges part i of it
with its counterparts, so that all links and cores are busy, and the parts are shared inside the
host. Reductions so add the ranks of a host in order, then the hosts in order: the same bits on
every rank and in every run with the same placement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.agreement import STEP, Agreement, between_hosts
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.hierarchical_messages import HierarchicalMessages
from flashlight_py.distributed.backends.hierarchical_search import Searches
from flashlight_py.distributed.backends.hierarchical_work import FutureWork
from flashlight_py.distributed.call_site import Place, called_at, caller
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.people import names
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    PeerLostError,
)

__all__ = ["HierarchicalBackend", "part_of"]

# Below this a part per local rank would only multiply messages: one rank carries everything.
_SMALL_BYTES = 64 << 10


def part_of(count: int, carriers: int, index: int) -> slice:
    """Return the elements that carrier ``index`` of ``carriers`` exchanges between hosts.

    Example:
        >>> [part_of(10, 3, i) for i in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    return slice(count * index // carriers, count * (index + 1) // carriers)


class HierarchicalBackend(HierarchicalMessages):
    """Joins the ranks of ``hosts``, each a list of ranks that share memory.

    Args:
        rank: this process's rank.
        hosts: ranks of each host; every rank is in exactly one.
        inside: joins this host's ranks, in the order of ``hosts``.
        between: joins local rank i of all hosts; None where some host has no such rank.
        flat: joins all ranks, for verbs that gain nothing from the hierarchy.
        timeout: seconds that ``inside`` gives each operation; hosts wait a little longer.
        checked: compare what ranks call before anything moves. Otherwise what differs between
            hosts breaks the group, at once or after the timeout.
    """

    kind = DistributedBackend.GLOO
    path = "shared memory inside hosts, Gloo between them"

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        inside: Backend,
        between: Backend | None,
        flat: Backend,
        timeout: float,
        checked: bool = True,
    ) -> None:
        self.rank, self.size = rank, flat.size
        self._hosts = [list(host) for host in hosts]
        self.timeout = timeout
        self._carriers = min(len(host) for host in hosts)
        self._inside, self._between, self._flat = inside, between, flat
        team = object()
        self._parts = [part for part in (inside, between, flat) if part is not None]
        for part in self._parts:
            part.team = team
        # What ranks do after they have agreed takes longer than agreeing, and a mate may wait for
        # another host that does it: so whoever waits for the late rank itself is the first to tell.
        self._far = between_hosts(timeout, 3 if checked else 1)
        self._patience = between_hosts(self._far)
        self._agreement = Agreement(inside, between, flat, timeout) if checked else None
        self._host_of = {r: h for h, host in enumerate(self._hosts) for r in host}
        self._part_of = ""  # with STEP
        self._callers = Callers(f"rank {rank} of {flat.size}", self._parts)
        self._thread: ThreadPoolExecutor | None = None
        self._searches = Searches()
        self._running: list[FutureWork] = []

    def all_reduce(self, array: Array, op: ReduceOp, scale: float, blocking: bool = False) -> Work:
        """Reduce inside the hosts, between them, and share; see ``Backend``."""
        call = f"all_reduce({_kind(array)}, op={op.name.lower()}, scale={float(scale)!r})"
        return self._start(call, lambda: self._all_reduce(array, op, scale), blocking)

    def _all_reduce(self, array: Array, op: ReduceOp, scale: float) -> Array:
        narrow = _is_narrow(array)
        wide = array.astype(np.float32) if narrow else array  # to be rounded once
        self._inside.all_reduce(wide, op, 1.0, blocking=True).wait()
        self._exchange(
            wide.reshape(-1),
            lambda part, between: between.all_reduce(part, op, scale, blocking=True),
        )
        if narrow:
            array[...] = wide
        return array

    def broadcast(self, array: Array, root: int, blocking: bool = False) -> Work:
        """Give it to ``root``'s host, from there to the others; see ``Backend``."""
        call = f"broadcast({_kind(array)}, root={root})"
        return self._start(call, lambda: self._broadcast(array, root), blocking)

    def _broadcast(self, array: Array, root: int) -> Array:
        home = self._host_of[root]
        if self._host_of[self.rank] == home:
            local = self._hosts[home].index(root)
            self._inside.broadcast(array, local, blocking=True).wait()
        self._exchange(
            array.reshape(-1), lambda part, between: between.broadcast(part, home, blocking=True)
        )
        return array

    def _exchange(self, flat: Array, step: Callable[[Array, Backend], Work]) -> None:
        """Do ``step`` between the hosts, each carrier on its part; share the parts inside."""
        carriers = 1 if flat.nbytes <= _SMALL_BYTES else self._carriers
        if self._inside.rank < carriers and self._between is not None:
            with self._between.within(self._far):
                step(flat[part_of(flat.size, carriers, self._inside.rank)], self._between).wait()
        with self._inside.within(self._patience):
            for carrier in range(carriers):
                part = flat[part_of(flat.size, carriers, carrier)]
                self._inside.broadcast(part, carrier, blocking=True).wait()

    def reduce(
        self, array: Array, op: ReduceOp, scale: float, root: int, blocking: bool = False
    ) -> Work:
        """Reduce inside the hosts, then between them to ``root``'s; see ``Backend``."""
        call = f"reduce({_kind(array)}, op={op.name.lower()}, scale={float(scale)!r}, root={root})"
        return self._start(call, lambda: self._reduce(array, op, scale, root), blocking)

    def _reduce(self, array: Array, op: ReduceOp, scale: float, root: int) -> Array:
        home = self._host_of[root]
        place = self._hosts[home].index(root)
        leader = place if place < self._carriers else 0  # of every host; only carriers are joined
        total = array.astype(np.float32) if _is_narrow(array) else array.copy()
        self._inside.reduce(total, op, 1.0, leader, blocking=True).wait()
        if self._inside.rank == leader and self._between is not None:
            with self._between.within(self._far):
                self._between.reduce(total, op, scale, home, blocking=True).wait()
        elif self._agreement is not None:
            self._agreement.is_ahead = True
        if self._host_of[self.rank] == home and place != leader:
            with self._inside.within(self._patience):
                self._inside.broadcast(total, leader, blocking=True).wait()
        if self.rank == root:
            array[...] = total
        return array

    def reduce_scatter(
        self,
        array: Array,
        op: ReduceOp,
        scale: float,
        blocking: bool = False,
        out: Array | None = None,
        rows: Sequence[int] | None = None,
    ) -> Work:
        """Reduce among all ranks at once; see ``Backend``."""
        parts = "" if rows is None else f", rows={list(rows)}"
        call = (
            f"reduce_scatter({_kind(array)}, op={op.name.lower()}, scale={float(scale)!r}{parts})"
        )
        return self._flatly(
            call, lambda flat: flat.reduce_scatter(array, op, scale, True, out, rows), blocking
        )

    def all_gather(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Gather among all ranks at once; see ``Backend``."""
        call = f"all_gather({_rows(array)})"
        return self._flatly(call, lambda flat: flat.all_gather(array, True, out), blocking)

    def gather(
        self, array: Array, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Gather among all ranks at once; see ``Backend``."""
        call = f"gather({_rows(array)}, root={root})"
        return self._flatly(call, lambda flat: flat.gather(array, root, True, out), blocking)

    def scatter(
        self, array: Array | None, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Scatter among all ranks at once; see ``Backend``."""
        call = f"scatter(root={root})"  # who receives may not know more
        return self._flatly(call, lambda flat: flat.scatter(array, root, True, out), blocking)

    def all_to_all(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Exchange among all ranks at once; see ``Backend``."""
        call = f"all_to_all({_kind(array)})"
        return self._flatly(call, lambda flat: flat.all_to_all(array, True, out), blocking)

    def all_to_all_uneven(
        self,
        array: Array,
        rows: Sequence[int],
        blocking: bool = False,
        out: Array | None = None,
        came: list[int] | None = None,
    ) -> Work:
        """Exchange among all ranks at once; see ``Backend``."""
        call = f"all_to_all({_rows(array)}, rows=...)"
        return self._flatly(
            call, lambda flat: flat.all_to_all_uneven(array, rows, True, out, came), blocking
        )

    def _flatly(self, call: str, verb: Callable[[Backend], Work], blocking: bool) -> Work:
        """Have the backend that joins all ranks do it: the hierarchy would save nothing."""

        def run() -> Any:
            with self._flat.within(self._far):
                return verb(self._flat).wait()

        return self._start(call, run, blocking)

    def shared_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array in the memory of this rank's host; see ``Backend``."""
        call = f"shared_empty({dtype} {shape})"
        work = self._start(call, lambda: self._inside.shared_empty(shape, dtype), blocking=True)
        array: Array = work.wait()
        return array

    def refuse(self, call: str) -> None:
        """Have the others raise; see ``Backend``. Without checks that ends the group."""
        if self._agreement is None:  # the others may be in the middle of anything
            self.end(MismatchError(f"{names([self.rank])} called {call}"))
            return
        work = self._start(call, lambda: None, blocking=False)
        assert isinstance(work, FutureWork)
        work.failure_told = True  # this rank raises its own

    def barrier(self, timeout: float | None = None) -> Work:
        """Wait for all ranks, up to ``timeout`` seconds; see ``Backend``."""
        if self._agreement is not None:  # to agree on it is to have come
            return self._start("barrier()", lambda: None, blocking=True, seconds=timeout)
        return self._start("barrier()", lambda: self._flat.barrier(timeout).wait(), blocking=True)

    def _start(
        self,
        call: str,
        run: Callable[[], Any],
        blocking: bool,
        seconds: float | None = None,
    ) -> Work:
        """Run here, or on a thread after what was started before: backends keep an order."""
        thread = self._callers.check(call.partition("(")[0])
        call, number = f"{self._part_of}{call}", self.count[0]
        self._running = [work for work in self._running if not work.is_completed()]
        try:
            self._callers.threads.add(thread)
            if blocking and not self._running:
                return Done(self._run(call, number, run, seconds))
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "flashlight_py hierarchical")
            work = FutureWork(
                self._thread.submit(self._run_there, caller(), call, number, run, seconds)
            )
        finally:
            self._callers.threads.discard(thread)
        self._running.append(work)
        return work

    def _run_there(
        self, place: Place, call: str, number: int, run: Callable[[], Any], seconds: float | None
    ) -> Any:
        with called_at(place):
            return self._run(call, number, run, seconds)

    def _run(self, call: str, number: int, run: Callable[[], Any], seconds: float | None) -> Any:
        """Run; what breaks one backend ends the others, on which other hosts would wait."""
        try:
            if self._agreement is not None:
                self._agreement.reach(call, number, seconds)
            return run()
        except MismatchError as error:
            if not error.group_lives:
                self.end(error)
            elif self._agreement is None:  # other ranks may be in the middle of it
                self._close_backends()
            raise
        except (PeerLostError, CollectiveTimeoutError) as error:
            self.end(error)
            called = call.replace(STEP, ": ")
            raise type(error)(f"in {called}: {error}{self._last(error)}") from error
        except BaseException:
            self._close_backends()
            raise

    @contextlib.contextmanager
    def part_of(self, call: str) -> Iterator[None]:
        """Mark what is started within as steps of ``call``; see ``Backend``."""
        before, self._part_of = self._part_of, f"{call}{STEP}"
        try:
            if self._agreement is not None:
                yield
                return
            with self._flat.part_of(call):  # which compares, then, what it is given
                yield
        finally:
            self._part_of = before

    def is_calling(self) -> bool:
        """Return whether this thread is in the middle of a call; see ``Backend``."""
        return self._callers.has_this()

    def synchronize(self) -> None:
        """Block until all that was started has ended."""
        for work in [*self._running, *self._searches.running()]:
            if not work.failure_told:
                work.wait()

    def give_up(self, traceback: str) -> None:
        """Notify the others inside and outside of this host; see ``Backend``."""
        for backend in self._parts:
            backend.give_up(traceback)

    def _last(self, error: DistributedError) -> str:
        """Say of a timeout what the late rank has joined before, as far as that is known."""
        if self._agreement is None or not isinstance(error, CollectiveTimeoutError):
            return ""
        return f". {self._agreement.last()}"

    def end(self, error: DistributedError) -> None:
        """End all backends because of ``error`` of one of them."""
        self.pass_on(error)
        self._close_backends()

    def pass_on(self, error: DistributedError) -> None:
        """Have the others raise ``error``, inside and outside of this host; see ``Backend``."""
        for backend in self._parts:
            backend.pass_on(error)

    def is_busy(self) -> bool:
        """Return whether something runs; see ``Backend``."""
        if self._searches.running() or any(part.is_busy() for part in self._parts):
            return True
        return any(not work.is_completed() for work in self._running)

    def close(self) -> None:
        """Close the backends, which ends what runs, then the thread.

        In a signal handler that may have interrupted the use of the thread's queue, which is locked
        then, the thread ends by itself a little later.
        """
        self._close_backends()
        self._searches.join()
        thread, self._thread = self._thread, None
        if thread is not None and not self._callers.has_this():
            thread.shutdown(cancel_futures=True)

    def _close_backends(self) -> None:
        for backend in self._parts:
            backend.close()


def _is_narrow(array: Array) -> bool:
    return array.dtype.itemsize == 2 and array.dtype.kind not in "iu"


def _kind(array: Array) -> str:
    return f"{array.dtype} {array.shape}"


def _rows(array: Array) -> str:
    """Describe arrays whose first dimensions may differ."""
    return f"{array.dtype} rows of {array.shape[1:]}"
