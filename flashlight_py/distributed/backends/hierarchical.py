"""Several hosts: shared memory inside each, another backend between them, by composition.

Small arrays travel with the comparison of the calls, large ones after it: see
``hierarchical_calls.py``. Reductions add the ranks of a host in order, then the hosts in
order: the same bits on every rank and in every run with the same placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.hierarchical_calls import LargeCalls, SmallCalls
from flashlight_py.distributed.backends.hierarchical_messages import (
    FutureWork,
    HierarchicalMessages,
    Searches,
)
from flashlight_py.distributed.backends.native import NativeBackend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.call_site import Place, called_at, caller
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.failures.agreement import Agreement, Load, between_hosts
from flashlight_py.distributed.failures.wording import names
from flashlight_py.distributed.verbs import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Verb,
)
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)


class HierarchicalBackend(HierarchicalMessages):
    """Joins the ranks of ``hosts``, each a list of ranks that share memory.

    Args:
        rank: this process's rank.
        hosts: ranks of each host; every rank is in exactly one.
        inside: joins this host's ranks, in the order of ``hosts``.
        between: joins local rank i of all hosts; None where some host has no such rank.
        flat: joins all ranks, for verbs that gain nothing from the hierarchy.
        timeout: seconds that ``inside`` allows each operation; hosts wait a little longer.
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
        self._inside, self._between, self._flat = inside, between, flat
        team = object()
        take_along = getattr(flat, "take_along", None)
        for part in (inside, between):
            if take_along is not None and isinstance(part, NativeBackend):
                take_along(part)
        self._parts = [part for part in (inside, between, flat) if part is not None]
        for part in self._parts:
            part.team = team
        # What ranks do after they have agreed takes longer than agreeing, and a local peer may wait
        # for another host that does it: whoever waits for the late rank itself reports it first.
        self._far = between_hosts(timeout, 3 if checked else 1)
        self._checked = checked
        self._agreement = Agreement(inside, between, flat, timeout)
        self._small = SmallCalls(rank, hosts)
        waits = self._far, between_hosts(self._far)
        self._large = LargeCalls(rank, hosts, inside, between, *waits, self._agreement.runs_ahead)
        self._host_of = {r: h for h, host in enumerate(self._hosts) for r in host}
        self._callers = Callers(f"rank {rank} of {flat.size}", self._parts)
        self._steps: dict[Verb, Callable[[Call], Any]] = {
            ALL_REDUCE: self._large.all_reduce,
            BROADCAST: self._large.broadcast,
            REDUCE: self._large.reduce,
            REDUCE_SCATTER: self._large.reduce_scatter,
            ALL_GATHER: self._all_gather,
        }
        self._rows: Sequence[int] = ()  # of each rank's array, in the call that has been agreed on
        self._thread: ThreadPoolExecutor | None = None
        self._searches = Searches()
        self._running: list[FutureWork] = []
        self._notified: list[Backend] = []  # parts that end since another one was lost
        self._is_closed = False

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """The ranks of each host; see ``Backend``."""
        return self._hosts

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``."""
        if call.verb.is_message:
            return self.message(call)
        if call.refusal:
            return self._refuse(call)
        run: Callable[[Call], Any] = self._steps.get(call.verb, self._flatly)
        if call.verb is BARRIER and self._checked:
            run = _nothing  # to agree on it is to have arrived
        if call.compared:
            run = self._compare
        return self._start(call, lambda: run(call))

    def _compare(self, call: Call) -> Any:
        """Find out what else is asked for: that all call the same is agreed upon before."""
        wanted = call.is_ragged or call.verb is SCATTER
        return self._flatly(call) if wanted or not self._checked else None

    def _all_gather(self, call: Call) -> Any:
        """Exchange rows: how many each rank has is known where calls have been compared."""
        if not self._checked:
            load = Load(len(call.array))
            self._rows = self._agreement.meet(call.verb.name, load, None).lengths
        return self._large.all_gather(call, self._rows)

    def _flatly(self, call: Call) -> Any:
        """Have the backend that joins all ranks do it: the hierarchy would save nothing."""
        seconds = self._far if call.verb is not BARRIER else call.seconds
        result = self._flat.start(replace(call, blocking=True, seconds=seconds)).wait()
        self._agreement.runs_ahead()  # a local peer may wait for its part from another host
        return result

    def shared_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array in the memory of this rank's host; see ``Backend``."""
        call = Call(BARRIER, part_of=f"shared_empty({dtype} {shape})")
        array: Array = self._start(call, lambda: self._inside.shared_empty(shape, dtype)).wait()
        return array

    def _refuse(self, call: Call) -> Work:
        """Have the others raise. Without checks that ends the group."""
        if not self._checked:  # the others may be in the middle of anything
            self.end(MismatchError(f"{names([self.rank])} called {call}"))
            return Done()
        work = self._start(replace(call, blocking=False), lambda: None)
        assert isinstance(work, FutureWork)
        work.failure_reported = True  # this rank raises its own
        return work

    def _start(self, call: Call, run: Callable[[], Any]) -> Work:
        """Run here, or on a thread after what was started before: backends keep an order."""
        thread, number = self._callers.check(call.name), self.count[0]
        running = self._running  # they end in their order
        ended = next((n for n, one in enumerate(running) if not one.is_completed()), len(running))
        self._running = running[ended:]
        try:
            self._callers.threads.add(thread)
            if call.blocking and not self._running:
                return Done(self._run(call, number, run))
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "flashlight_py hierarchical")
            work = FutureWork(self._thread.submit(self._run_there, caller(), call, number, run))
            work.failure_reported = call.compared  # by whoever compares
        finally:
            self._callers.threads.discard(thread)
        self._running.append(work)
        return work

    def _run_there(self, place: Place, call: Call, number: int, run: Callable[[], Any]) -> Any:
        with called_at(place):
            return self._run(call, number, run)

    def _run(self, call: Call, number: int, run: Callable[[], Any]) -> Any:
        """Run; what breaks one backend ends the others, on which other hosts would wait."""
        try:
            if not self._checked:
                return run()
            found = self._agreement.reach(call, number, self._small.load(call))
            if self._small.has(call, found):
                return self._small.take(call, found)
            self._rows = found.lengths
            return run()
        except MismatchError as error:
            if not error.group_lives:
                self.end(error)
            elif not self._checked:  # other ranks may be in the middle of it
                self._close_backends()
            raise
        except (PeerLostError, CollectiveTimeoutError) as error:
            # Where much is on its way between hosts, words about a loss may not come through before
            # the connection closes; the ranks of this host know who it was.
            known = self._inside.lost(call.name) if isinstance(error, PeerLostError) else None
            cause = known if isinstance(known, PeerLostError) else error
            self.end(cause)
            raise type(error)(f"in {call.steps}: {cause}{self._last(error)}") from error
        except ValueError:  # of `out`, when all have called: the others have their results
            raise
        except GroupClosedError as error:
            raise self.of_lost_hosts(call.name, error) from error
        except BaseException as error:
            abort.report(error, self._parts)
            self._close_backends()
            raise

    def of_lost_hosts(self, doing: str, error: GroupClosedError) -> DistributedError:
        """Return that hosts are lost, if that is why the parts have ended; else ``error``.

        What waits inside of this host ends with the part that watches over the hosts. And a part
        may have ended by another operation, for whose failure nobody has waited yet.
        """
        found = self._flat.lost(doing)
        cause = found if isinstance(found, PeerLostError) else error
        if not self._is_closed:
            self.end(cause)
        return cause

    def is_calling(self) -> bool:
        """Return whether this thread is in the middle of a call; see ``Backend``."""
        return self._callers.has_this()

    def synchronize(self) -> None:
        """Block until all that was started has ended."""
        for work in [*self._running, *self._searches.running()]:
            if not work.failure_reported:
                work.wait()
        for part in self._parts:  # messages
            self.guarded("sync_distributed", part.synchronize)

    def _last(self, error: DistributedError) -> str:
        """Say of a timeout what the late rank has joined before, as far as that is known."""
        if not self._checked or not isinstance(error, CollectiveTimeoutError):
            return ""
        return f". {self._agreement.last()}"

    def end(self, error: DistributedError) -> None:
        """End all backends because of ``error`` of one of them."""
        self.abort(error)
        self._close_backends()

    def abort(self, cause: str | DistributedError) -> None:
        """Notify the others inside and outside of this host; see ``Backend``."""
        for backend in self._parts:
            backend.abort(cause)

    def leave(self) -> None:
        """Let the others know that this rank begins no more messages; see ``Backend``."""
        for backend in self._parts:
            backend.leave()

    def lost(self, doing: str) -> DistributedError | None:
        """Return why the group cannot be used any more; see ``Backend``.

        Not all ranks are connected: who learns it notifies those that it is connected with.
        """
        found = {part: part.lost(doing) for part in self._parts if part not in self._notified}
        why = next(filter(None, found.values()), None)
        if isinstance(why, PeerLostError):
            for part in (part for part, loss in found.items() if loss is None):
                self._notified.append(part)
                part.abort(why)
        return why

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
        self._is_closed = True
        self._close_backends()
        self._searches.join()
        thread, self._thread = self._thread, None
        if thread is not None and not self._callers.has_this():
            thread.shutdown(cancel_futures=True)

    def _close_backends(self) -> None:
        for backend in self._parts:
            backend.close()


def _nothing(_: Call) -> None:
    """Be done: the agreement was all."""
