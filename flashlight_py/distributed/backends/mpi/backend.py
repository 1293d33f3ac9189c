"""Groups of processes that one ``mpirun`` has started. Their MPI library moves the arrays.

First, the ranks compare each call over ``control``, their CPU backend. The comparison detects
mismatches, and late or lost ranks. Then MPI moves the arrays: collectives one after another,
messages in parallel.

MPI makes progress only while a thread calls it. An operation is therefore a generator that yields
between its steps. A waiting thread runs the steps of all operations of this process. If no thread
waits, a background thread does, provided that MPI allows calls from any thread.
"""

import atexit
import contextlib
import fcntl
import inspect
import json
import math
import os
import stat
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from flashlight_py import errors
from flashlight_py.device import Array, array_module
from flashlight_py.distributed.backend import Backend, Callers
from flashlight_py.distributed.backends.mpi.verb_steps import Steps, VerbSteps, on_device, settle
from flashlight_py.distributed.calls.arrays import check_out_rows
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.failures.wording import UNUSABLE, did_not_join, process_list
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.rendezvous.stores import load_mpi
from flashlight_py.distributed.verbs import BARRIER, SCATTER, SEND
from flashlight_py.distributed.work import Done, Then, Work, wait_for, wait_timeout_error

# Seconds between checks for lost ranks while a rank waits for MPI.
_CHECK_SECONDS = 0.05
# Seconds to wait for a comparison in a closed group: it ends soon with an error.
_COMPARISON_SECONDS = 0.5
_CLOSED = "the group was closed"
_OF_OTHERS = errors.PeerLostError, errors.CollectiveTimeoutError  # another rank is the cause

# MPI has no wait with a time limit, so a wait polls: first without a pause, then it yields the
# processor, then it sleeps. A sleep takes a tenth of the time since MPI last ran an operation.
_POLLS = 20
_YIELDING_SECONDS = 1e-3
_LONGEST_SLEEP = 2e-3
# Seconds of a wait that only shows the CPU backend that a caller waits.
_NO_TIME = 1e-4
# Sent as the last message of a rank, instead of the number of collectives, if an operation has not
# ended.
_UNFINISHED = -1
# Maximum seconds that a failed rank waits for readers of its output, and for other ranks.
_LINGER_SECONDS = 1.0
# Seconds that the background thread may take to end its last step.
_STOP_SECONDS = 10.0

# Calls, requests and groups of failed operations, kept as long as the process: MPI cannot cancel a
# collective, which may still use its arrays and its communicator.
_abandoned: list[Any] = []


class Operation(Work):
    """A started call. Its ``steps`` wait for ``comparison``, and at most ``seconds`` for MPI."""

    def __init__(self, group: "MpiBackend", name: str, seconds: float) -> None:
        self.name, self.seconds, self.where = name, seconds, f"[{name}] {group.rank_text}"
        self.steps: Steps
        self.comparison: Work | None = None
        self.ended = self.is_suspect = False  # is_suspect: a rank may be lost
        self.error: BaseException | None = None
        self.next_check = self.deadline = math.inf
        self.room: Array | None = None  # the caller's ``out``; ``end`` checks its number of rows
        self._value: Any = None
        self._group = group

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Store ``value`` or ``error``, and stop ``steps``. Only the first call has an effect."""
        if self.ended:  # a signal handler has closed the group in the meantime
            return
        if inspect.getgeneratorstate(self.steps) != inspect.GEN_RUNNING:
            self.steps.close()  # a signal handler may run inside a step, which cannot be closed
        self._end_time, group = time.monotonic(), self._group
        if error is None and self.room is not None:
            try:
                check_out_rows(self.name, self.room, value.shape[0], group.rank, group.size)
            except ValueError as failure:  # an error of this rank only
                error = failure
        self._value, self.error, self.is_settled, self.ended = value, error, error is None, True

    def cause(self) -> errors.DistributedError | None:
        """Wait for the comparison. Return its error if another rank is the cause, else None."""
        try:
            if self.comparison is not None:
                self.comparison.wait(_COMPARISON_SECONDS)
        except errors.DistributedError as error:
            if isinstance(error, _OF_OTHERS) and not error.goes_on:
                return error
        return None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait at most ``timeout`` seconds; see ``Work``. Ctrl-C makes the group unusable."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            in_time = self.ended or self._group.progress.wait(self, end)
        except BaseException as error:
            self._group.interrupt(self, error)
            raise
        if timeout is not None and not in_time:
            raise wait_timeout_error(self.where, timeout)
        if self.error is not None:
            self.is_settled = True
            raise self.error
        return self._value

    def is_completed(self) -> bool:
        """Run a step of every operation; return whether this operation has ended."""
        if not self.ended:
            self._group.progress.step()
        return self.ended


class Leaving:
    """The last messages of a group. Each rank of ``comm`` sends how many collectives MPI has run.

    The messages use a second communicator. Both communicators are freed only after all ranks have
    left. Otherwise MPI, which cannot cancel an abandoned operation, would run it in a new group.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comms = mpi, (comm, comm.Dup())
        self._moved, self._counts = np.zeros(1, np.int64), np.empty(comm.Get_size(), np.int64)
        self._request: Any = None

    def leave(self, moved: int) -> None:
        """Send ``moved`` to the other ranks as the last message. A second call does nothing."""
        if self._request is None and not self._mpi.Is_finalized():
            self._moved[:] = moved
            with contextlib.suppress(self._mpi.Exception):  # MPI raises if the group has failed
                self._request = self._comms[1].Iallgather(self._moved, self._counts)

    def have_all_left(self) -> bool:
        with contextlib.suppress(self._mpi.Exception):
            return self._request is not None and bool(self._request.Test())
        return False

    def free(self) -> bool:
        """If all ranks have finished and sent equal counts, free the communicators; return True."""
        is_over = _UNFINISHED < min(self._counts) == max(self._counts)
        for comm in self._comms if is_over else ():
            with contextlib.suppress(self._mpi.Exception):
                comm.Free()
        return bool(is_over)


# The MPI tag of a message is the number of the message in the comparison. Both ends know the
# number, even in a receive from any rank.
class MpiBackend(Backend):
    """Backend for the ranks of ``comm``; ``control`` is the CPU backend that compares calls.

    Each operation may take ``seconds``. If ``checked``, ranks compare all calls. If ``gpu_aware``,
    the library accepts pointers to GPU memory. ``path`` is a description of the library.
    """

    kind = DistributedBackend.MPI

    def __init__(
        self, progress: "Progress", comm: Any, control: Backend, path: str, seconds: float,
        checked: bool, gpu_aware: bool,
    ) -> None:  # fmt: skip
        self.progress, self.control, self.parts = progress, control, [control]
        self.network, self.memory = control.network, control.memory
        self.memory_ranks = control.memory_ranks
        self.leaving = Leaving(progress.mpi, comm)
        self.timeout, self._compares_all = seconds, checked
        self.rank, self.size, self.hosts = control.rank, control.size, control.hosts
        self.processes, self.path, self._gpu_aware = control.processes, path, gpu_aware
        self.rank_text = f"rank {self.rank} of {self.size}"
        self.callers = Callers(self.rank_text, self.parts)
        self._verb_steps = VerbSteps(progress.mpi, comm, progress.until, gpu_aware)
        self._queue: deque[Operation] = deque()
        self._messages: list[Operation] = []
        self._unreported: list[Operation] = []  # operations that ``synchronize`` awaits
        self._moved_count = 0  # number of collectives that have moved arrays
        self._unusable = ""  # why no operation can be started, or ""
        progress.add(self)

    def cupy_side(self) -> Backend:
        return MpiGpuBackend(self, self._gpu_aware)

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``. MPI chooses the order of ranks in a sum."""
        thread = self.callers.check(call.name)
        self.control.count = self.count
        try:
            self.callers.threads.add(thread)
            if call.refusal:
                if self._is_compared(call):
                    self.control.start(call)
                else:  # no comparison would notify the other ranks
                    self.control.abort(self._lost(call.name, f"MismatchError: {call}"))
                return Done()
            if call.verb.is_message:
                call.received = []  # the comparison appends the number of the message
            work = self._begin(call)
            return Done(work.wait()) if call.blocking else work
        finally:
            self.callers.threads.discard(thread)

    def _begin(self, call: Call) -> Operation:
        """Begin ``call``. MPI runs it after all ranks have agreed on it."""
        with self.progress.lock:  # all ranks begin operations in the order of the comparisons
            if self._unusable:
                raise errors.GroupClosedError(f"[{call.name}] {self.rank_text}: {self._unusable}")
            seconds = self.timeout if call.seconds is None else call.seconds
            operation = Operation(self, call.name, seconds)
            operation.steps = self._steps(operation, call)
            if call.is_ragged and call.verb.fills(self.rank, call.root):
                operation.room = call.out
            try:
                if self._is_compared(call):
                    compared = replace(call, compared=True, blocking=False)
                    operation.comparison = self.control.start(compared)
                (self._messages if call.verb.is_message else self._queue).append(operation)
                if not call.blocking:
                    begun = (*self._unreported, operation)
                    self._unreported = [op for op in begun if not (op.ended and op.is_settled)]
                    self.advance()
            except BaseException as error:
                if not isinstance(error, errors.DistributedError):  # the other ranks wait
                    self.interrupt(operation, error)
                raise
        if not call.blocking and not operation.ended:
            self.progress.ensure_thread()
        return operation

    def _is_compared(self, call: Call) -> bool:
        needs_outcome = call.is_ragged or call.verb.is_message or call.verb in (SCATTER, BARRIER)
        return self._compares_all or needs_outcome

    def _steps(self, operation: Operation, call: Call) -> Steps:
        outcome = None
        if operation.comparison is not None:
            while not operation.comparison.is_completed():
                yield
            outcome = operation.comparison.wait()
        now = time.monotonic()
        operation.next_check, operation.deadline = now + _CHECK_SECONDS, now + operation.seconds
        return (yield from on_device(call.like, self._verb_steps.steps_of(call, outcome)))

    def synchronize(self) -> None:
        """Block until all operations have ended; raises the first unreported failure."""
        wait_for(self._unreported)

    def advance(self) -> None:
        """Run the steps of all operations, each until it would have to wait."""
        while self._queue and self._step(self._queue[0]):
            if self._queue:  # empty if a step has ended the group
                self._moved_count += self._queue.popleft().deadline < math.inf
        for operation in tuple(self._messages):
            if not operation.ended and self._step(operation) and operation in self._messages:
                self._messages.remove(operation)

    def _step(self, operation: Operation) -> bool:
        """Run the next step of ``operation``; return whether the operation has ended."""
        try:
            next(operation.steps)
        except StopIteration as end:
            operation.end(end.value)
        except errors.DistributedError as error:
            if isinstance(error, errors.MismatchError) and error.group_lives:
                operation.end(error=error)
            else:
                self._break(operation, error)
        except self.progress.mpi.Exception as error:
            failure = errors.DistributedError(f"{operation.where}: MPI failed: {error}")
            failure.__cause__ = error
            self._break(operation, failure, f"MPI failed: {error}")
        except BaseException as error:
            self._break(operation, error, f"it stopped in {operation.name}: {error!r}")
            if not isinstance(error, Exception):
                raise
        else:
            self._check_peers(operation)
        return operation.ended

    def _check_peers(self, operation: Operation) -> None:
        """Every ``_CHECK_SECONDS``, end the group if a rank is lost or ``operation`` is late."""
        now = time.monotonic()
        if now < min(operation.next_check, operation.deadline):
            return
        operation.next_check = now + _CHECK_SECONDS
        loss = self.control.lost(operation.name)
        if loss is not None and not operation.is_suspect:
            operation.is_suspect = True  # the data may have arrived before the loss: check again
        elif loss is not None:
            self._break(operation, loss)
        elif now >= operation.deadline:
            who = "a rank did not join, or all" if operation.comparison is None else "all ranks"
            who += " joined and did not finish"
            limit = f"{operation.seconds:g} seconds"
            text = did_not_join(operation.where, who, limit, "MPI moves the arrays", "")
            self._break(operation, errors.CollectiveTimeoutError(text))

    def interrupt(self, operation: Operation, error: BaseException) -> None:
        """End the group after an exception such as Ctrl-C in a wait. All operations fail."""
        with self.progress.lock:
            if not operation.ended:
                reason = f"{type(error).__name__} in {operation.name}"
                closed = errors.GroupClosedError(
                    f"{operation.where}: a signal ended a wait: {reason}"
                )
                self._break(operation, closed, reason)

    def _lost(self, name: str, reason: str) -> errors.PeerLostError:
        """Return the error that other ranks raise because they lose this rank, for ``reason``."""
        processes = process_list([self.rank], self.control.processes)
        return errors.PeerLostError(
            f"[{name}] {self.rank_text}: lost rank {self.rank} ({reason}){processes}. Read the "
            f"output of that rank. {UNUSABLE}"
        )

    def _break(self, operation: Operation, error: BaseException, reason: str = "") -> None:
        """End all operations because of ``error``; ``reason`` is set if this rank is the cause."""
        cause = error
        if isinstance(error, errors.GroupClosedError) and not reason:
            causes = (other.cause() for other in (*self._queue, *self._messages))
            cause = next(filter(None, causes), error)
        if cause is error:
            operation.end(error=error)
        reported = cause if isinstance(cause, errors.DistributedError) and not reason else None
        self.control.abort(reported or self._lost(operation.name, reason))
        for_all = cause if isinstance(cause, _OF_OTHERS) else None
        self._end_all(f"this group failed earlier: {cause}", for_all)

    def _end_all(self, reason: str, error: errors.DistributedError | None = None) -> None:
        """End all operations with ``error``, or else with a GroupClosedError for ``reason``."""
        self._unusable = text = reason
        kind: type[errors.DistributedError] = errors.GroupClosedError
        if error is not None:
            kind, text = type(error), str(error).partition(f"{self.rank_text}: ")[2] or str(error)
        for operation in (*self._queue, *self._messages):
            operation.end(error=kind(f"{operation.where}: {text}"))
        self._queue.clear()
        self._messages.clear()

    def is_busy(self) -> bool:
        return bool(self.pending()) or super().is_busy()

    def pending(self) -> int:
        return len(self._queue) + len(self._messages)

    def close(self) -> None:
        """Leave the group and notify the other ranks. Running operations fail. Idempotent."""
        with self.progress.lock:
            if self._unusable == _CLOSED:
                return
            healthy = not self._unusable and not self.pending()
            if not healthy:  # ranks that wait for this rank must raise
                self.control.abort(self._lost("close", "it has left the group"))
            self.control.close()
            self.leaving.leave(self._moved_count if healthy else _UNFINISHED)
            self._end_all(_CLOSED)
        self.progress.remove(self, healthy)


class MpiGpuBackend(Backend):
    """Backend for CuPy arrays; ``host`` is the MPI backend of the same ranks.

    If ``gpu_aware``, MPI accesses GPU memory, and CuPy reduces arrays on the GPU. Otherwise arrays
    are copied to pinned host memory and back. A call first waits until all work on the current
    stream has ended.
    """

    kind = DistributedBackend.MPI

    def __init__(self, host: Backend, gpu_aware: bool) -> None:
        self.rank, self.size = host.rank, host.size
        transfer = "memory of the GPU" if gpu_aware else "staged through pinned memory"
        self.path = f"{host.path}, {transfer}"
        self._host, self._aware = host, gpu_aware
        self._unfinished: list[Then] = []

    def start(self, call: Call) -> Work:
        if self._aware or call.refusal or call.verb is BARRIER:
            settle(call.array)
            settle(call.out)
            return self._host.start(call)
        host_array = None
        if call.array is not None:
            host_array = _pinned(call.array)
            call.array.get(out=host_array)
        # The host backend must know the shape of a scatter's result.
        host_out = _pinned(call.out) if call.verb is SCATTER and call.out is not None else None
        work = self._host.start(replace(call, array=host_array, out=host_out))
        if call.verb is SEND:
            return work
        work = Then(work, partial(self._copy_back, call, host_array))
        # Keep unfinished works: ``synchronize`` copies their results if the caller never waits.
        self._unfinished = [other for other in self._unfinished if not other.is_settled]
        self._unfinished.append(work)
        return work

    def _copy_back(self, call: Call, host_array: Array | None, result: Any) -> Any:
        """Copy the result to the caller's array, or to a new array if the caller passed none."""
        if call.is_open:
            call.array.set(host_array)
            settle(call.array)
            return result
        if result is None or not call.verb.fills(self.rank, call.root):
            return call.array if call.verb.in_place else None
        target: Any = call.array if call.verb.in_place else call.out
        if target is None:
            target = sys.modules["cupy"].asarray(result)
        else:
            if target.shape != result.shape:
                check_out_rows(call.name, target, result.shape[0], self.rank, self.size)
            target.set(result)
        settle(target)  # afterwards the host copy may be reused
        return target

    def synchronize(self) -> None:
        """Block until all results are back on the GPU; raises each failure once."""
        wait_for(self._unfinished)
        self._host.synchronize()

    def close(self) -> None:
        """Do nothing: the creator of the host backend closes it."""
        self._unfinished.clear()


def _pinned(array: Array) -> Array:
    """Return pinned host memory like ``array``, uninitialised. The GPU can copy to it directly."""
    if not array.size:
        return np.empty(array.shape, array.dtype)
    memory = array_module(array).cuda.alloc_pinned_memory(array.nbytes)
    return np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)


class Progress:
    """Scheduler for the operations of all MPI groups; ``threaded`` if any thread may call MPI."""

    def __init__(self, mpi: Any, threaded: bool) -> None:
        self.lock = threading.RLock()  # held while a thread steps the groups
        self.threaded = threaded
        self.mpi = mpi
        self._groups: list[MpiBackend] = []
        self._closed: list[MpiBackend] = []
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # number of waiting threads, which run the steps
        self._moving = 0  # number of operations that MPI is running
        self._pid = os.getpid()
        atexit.register(self._close_all)

    def add(self, group: "MpiBackend") -> None:
        """Run the steps of ``group`` from now on. Free closed groups that all ranks have left."""
        with self.lock:
            for closed in [other for other in self._closed if other.leaving.have_all_left()]:
                self._closed.remove(closed)
                if not closed.leaving.free():
                    _abandoned.append(closed)
            if not self._groups:
                abort.install_hooks()
                abort.after_report.append(self.abort_job)
            self._groups.append(group)

    def remove(self, group: "MpiBackend", healthy: bool) -> None:
        """Remove ``group``; if ``healthy``, it is freed after all other ranks have left it."""
        with self.lock:
            self._groups.remove(group)
            (self._closed if healthy else _abandoned).append(group)
            if self._groups:
                return
            abort.after_report.remove(self.abort_job)
        with self._turn:
            thread, self._thread = self._thread, None
            self._turn.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def step(self) -> None:
        with self.lock:
            for group in tuple(self._groups):
                group.advance()

    # The other ranks and MPI_Finalize would wait for a rank that ended with an exception.
    def abort_job(self) -> None:
        """Leave every group, give the other ranks time to print their errors, and abort the job.

        The caller has printed and sent the exception. After mpirun has read the output, MPI ends
        all processes with exit code 1.
        """
        if self.mpi.Is_finalized():
            return
        end, groups = time.monotonic() + _LINGER_SECONDS, tuple(self._groups)

        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # None under pythonw
                    stream.flush()
            for descriptor in (1, 2):  # poll, because no event reports that a pipe has been read
                with contextlib.suppress(OSError):
                    while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and time.monotonic() < end:
                        if not any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))):
                            break
                        time.sleep(_LONGEST_SLEEP)
            for group in groups:
                group.leaving.leave(_UNFINISHED)
            while time.monotonic() < end:
                with self.lock:
                    if all(group.leaving.have_all_left() for group in groups):
                        break
                time.sleep(_LONGEST_SLEEP)
        finally:  # even after Ctrl-C or a broken pipe; Abort runs no exit handlers
            self.mpi.COMM_WORLD.Abort(1)

    def until(self, begins: Iterable[partial[Any]]) -> Steps:
        """Start the MPI requests of ``begins``. Yield until all have ended."""
        calls, requests, done = tuple(begins), list[Any](), False
        self._moving += 1
        try:
            # This line runs in C only, so no signal handler can interrupt it and lose a request.
            requests.extend(map(partial.__call__, calls))
            while not (done := self.mpi.Request.Testall(requests)):
                yield
        finally:
            self._moving -= 1
            if not done:
                _abandoned.append((calls, requests))  # a request does not keep its array alive

    def wait(self, operation: Operation, end: float | None) -> bool:
        """Step until ``operation`` ends (return True) or until the time ``end`` (return False)."""
        alone = self._pending() == 1  # without other operations, sleep during the comparison
        left = None if end is None else max(0.0, end - time.monotonic())
        if operation.comparison is not None and not operation.ended:
            with contextlib.suppress(errors.DistributedError):  # the next step raises the error
                operation.comparison.wait(left if alone else _NO_TIME)  # shows that a caller waits
        with self._turn:
            self._waiting += 1
        try:
            pauses = self._pauses()
            while not operation.ended:
                if end is not None and not time.monotonic() < end:
                    return False
                self.step()
                if not operation.ended:
                    next(pauses)
            return True
        finally:
            with self._turn:
                self._waiting -= 1
                self._turn.notify()

    def ensure_thread(self) -> None:
        """If ``threaded``, let a background thread run the steps while no other thread waits."""
        if not self.threaded:
            return
        with self._turn:
            if self._thread is None:
                name = "flashlight_py mpi"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._turn.notify()

    def _run(self) -> None:
        while self._groups:
            with self._turn:
                self._turn.wait_for(
                    lambda: not self._groups or (not self._waiting and self._pending())
                )
            pauses = self._pauses()
            while not self._waiting and self._pending():
                self.step()
                next(pauses)

    def _pauses(self) -> Iterator[None]:
        """Pause between steps of a wait: first not at all, then by a yield, then by a sleep."""
        since = time.monotonic()
        for _ in range(_POLLS - 1):
            yield
        while True:
            now = time.monotonic()
            if self._moving:
                since = now
            idle = now - since
            if idle < _YIELDING_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(idle / 10, _LONGEST_SLEEP))
            yield

    def _pending(self) -> int:
        return sum(group.pending() for group in tuple(self._groups))

    def _close_all(self) -> None:
        """At exit, leave every group, so that the other ranks do not wait for this rank."""
        if self._pid != os.getpid():
            return  # a forked child is not a rank of the groups
        for group in tuple(self._groups):
            group.close()


progress_of = cache(Progress)  # MPI exists once per process


class MpiCard(NamedTuple):
    """A rank's report: its rank in MPI's world, and its settings."""

    world_rank: int = -1
    world_size: int = 0
    gpu_aware: bool = False
    problem: str = ""


def connect_mpi(
    store: Store, join_cpus: Callable[[], Backend], seconds: float, checked: bool, gpu_aware: bool
) -> "MpiBackend":
    """Connect the ranks of ``store`` by their MPI library. Collective, blocking.

    ``join_cpus()`` returns a backend of the same ranks that compares their calls. For the other
    arguments, see ``MpiBackend``. ``checked`` must be equal on all ranks.

    Raises UnavailableEverywhereError on every rank if a rank lacks mpi4py or a library, MPI did not
    start the processes together, or settings differ.
    """
    mpi: Any = None
    try:
        mpi = load_mpi()
        world = mpi.COMM_WORLD
        card = MpiCard(world.Get_rank(), world.Get_size(), gpu_aware)
    except errors.DistributedError as error:
        card = MpiCard(problem=str(error))
    cards = [MpiCard(*json.loads(text)) for text in store.exchange(json.dumps(card).encode())]
    _check_cards(cards)
    control = join_cpus()
    try:
        # All members are running, because each of them has just sent a card.
        members = mpi.COMM_WORLD.Get_group().Incl([other.world_rank for other in cards])
        comm = mpi.COMM_WORLD.Create_group(members)
        members.Free()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    except BaseException:
        control.close()
        raise
    progress = progress_of(mpi, mpi.Query_thread() == mpi.THREAD_MULTIPLE)
    import mpi4py

    line = mpi.Get_library_version().splitlines()[0].split(",")[0]
    library = " ".join(line.replace("Version:", "").split())
    threads = "any thread" if progress.threaded else "one thread: async verbs advance in waits only"
    path = f"MPI ({library}; mpi4py {mpi4py.__version__}; {threads})"
    return MpiBackend(progress, comm, control, path, seconds, checked, gpu_aware)


def _check_cards(cards: Sequence[MpiCard]) -> None:
    """Raise, on every rank alike, if these processes cannot form an MPI group."""
    for rank, card in enumerate(cards):
        if card.problem:
            raise errors.UnavailableEverywhereError(f"rank {rank}: {card.problem}")
    world_ranks = [card.world_rank for card in cards]
    if len(set(world_ranks)) < len(world_ranks) or len({card.world_size for card in cards}) > 1:
        raise errors.UnavailableEverywhereError(
            f"BACKEND is mpi: expected {len(cards)} ranks of one MPI job, got the MPI ranks "
            f"{', '.join(f'{c.world_rank} of {c.world_size}' for c in cards)}. Start all ranks by "
            "one mpirun (of the MPI that mpi4py has loaded), or omit BACKEND"
        )
    if len({card.gpu_aware for card in cards}) > 1:
        raise errors.UnavailableEverywhereError(
            "BACKEND is mpi: MPI_CUDA_AWARE differs between ranks. Set one value on all ranks"
        )
