"""A pending operation, as torch.distributed waits for it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from sys import is_finalizing
from typing import Any

import torch
import torch.distributed as dist

from flashlight_py.distributed import Work
from flashlight_py.distributed.internal import Then, leave_first_at_exit
from flashlight_py.errors import DistributedError

# How long who completes futures waits for the first of several before it looks at the others.
_LOOK_SECONDS = 0.005
# A future of so few bytes is waited for so many seconds first, as a thread takes longer to wake.
_SMALL_BYTES, _MOMENT = 64 << 10, 1e-4
_types: dict[type[DistributedError], Any] = {}
# Waiters in C++ do not keep what a process group in Python has returned, before torch 2.7.
_kept: set[TensorWork] | None = set() if torch.__version__ < "2.7" else None


def as_torchs(error: DistributedError) -> Exception:
    """Return ``error`` as a DistBackendError, which it is besides what it was."""
    found: Exception = error
    if isinstance(error, dist.DistBackendError):
        return found
    kind = type(error)
    if kind not in _types:
        _types[kind] = type(kind.__name__, (dist.DistBackendError, kind), {"__doc__": kind.__doc__})
    found = _types[kind](*error.args)
    found.__dict__.update(error.__dict__)
    return found.with_traceback(error.__traceback__)


class TensorWork(dist.Work):
    """The operation ``work`` on ``tensors``, which hold its result."""

    def __init__(self, work: Work, tensors: Sequence[torch.Tensor], futures: Futures) -> None:
        super().__init__()
        self.work, self.tensors, self._futures = work, tensors, futures
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        if _kept is not None:
            _kept.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it has ended, for ``timeout`` at most, unless that is 0; returns True.

        Raises:
            DistBackendError: it has failed; or it has not ended in time, and goes on.
        """
        if _kept is not None:
            _kept.discard(self)
        try:
            self.work.wait(timeout.total_seconds() if timeout > timedelta(0) else None)
        except DistributedError as error:
            raise as_torchs(error) from None
        return True

    def synchronize(self) -> None:
        """Block until it has ended."""
        self.wait()

    def __del__(self) -> None:
        """Copy the result to the tensors if no call waits for it, unless the process ends."""
        if isinstance(self.work, Then) and not self.work.is_settled and not is_finalizing():
            with suppress(RuntimeError):  # no thread can start during the exit of Python 3.12
                kept = TensorWork(self.work, self.tensors, self._futures)
                self._futures.add(kept, torch.futures.Future())

    def ends_within(self, seconds: float | None) -> bool:
        """Return whether it ends within so many seconds, None: wait for that."""
        try:
            self.work.wait(seconds)
        except DistributedError as error:
            return not error.goes_on
        except Exception:  # noqa: BLE001  (of whoever waits)
            return True
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not; then the result is where it belongs."""
        return self.work.is_completed() and self.ends_within(0)

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return what it has failed with, if it has."""
        try:
            if self.is_completed():
                self.wait()
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the answer)
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result; blocks until it is there."""
        self.wait()
        return list(self.tensors)

    def source_rank(self) -> int:
        """Return which rank of the group has sent, of a receive that has ended."""
        source = self.work.source
        return -1 if source is None else source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors, which completes whether or not anybody waits."""
        if self._future is None:
            is_small = sum(tensor.nbytes for tensor in self.tensors) <= _SMALL_BYTES
            has_ended = self.is_completed() or (is_small and self.ends_within(_MOMENT))
            begun: torch.futures.Future[Any] = torch.futures.Future()
            if has_ended and self.exception() is None:
                self._future = begun
                begun.set_result(list(self.tensors))
                return begun
            # An exception there fails this future in C++, too, where DDP waits for it.
            self._future = begun.then(lambda _: self.result())
            if has_ended:
                begun.set_result(None)
            else:
                self._futures.add(self, begun)
        return self._future


class Ended(TensorWork):
    """An operation that had ended before it was asked about."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Futures:
    """A thread that completes futures as their operations end; it begins with the first."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: TensorWork, future: torch.futures.Future[Any]) -> None:
        """Complete ``future`` when ``work`` has ended."""
        if self._thread is None:
            how: Any = {"args": (self._asked,), "name": "flashlight-futures", "daemon": True}
            self._thread = threading.Thread(target=_complete, **how)
            self._thread.start()
            # torch 2.6 drops groups without a word. At exit the world is left first, which ends
            # every operation: a thread in C++ that waits for Python then would abort the process.
            weakref.finalize(self, _finish, self._asked, self._thread)
            leave_first_at_exit()
        if threading.current_thread() is self._thread:  # of a callback, which may wait for it
            work.ends_within(None)
            future.set_result(None)
        else:
            self._asked.put((work, future))

    def close(self) -> None:
        """End the thread when all that was added has ended."""
        if self._thread is not None:
            _finish(self._asked, self._thread)
            self._thread = None


def _finish(asked: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    asked.put(None)
    if thread is not threading.current_thread():  # it may drop the last reference
        thread.join()


def _complete(asked: queue.SimpleQueue[Any]) -> None:
    """Complete what is ``asked`` for, until None is and all of it has ended."""
    pending: list[Any] = []
    is_open = True
    while is_open or pending:
        while is_open and not (pending and asked.empty()):
            if (pair := asked.get()) is None:
                is_open = False
            else:
                pending.append(pair)
        ended = [pair for pair in pending if pair[0].is_completed()]
        for work, future in ended or pending[:1]:
            if work.ends_within(_LOOK_SECONDS):
                pending.remove((work, future))
                future.set_result(None)
