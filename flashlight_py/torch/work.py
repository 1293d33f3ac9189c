"""Pending operations for torch.distributed."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from sys import is_finalizing
from typing import Any

import torch
import torch.distributed as dist

from flashlight_py.distributed import Work
from flashlight_py.distributed.internal import Then, initialize
from flashlight_py.errors import DistributedError
from flashlight_py.torch.tracing import untraced

# Seconds that the thread of Futures waits for one operation before it checks the others.
_LOOK_SECONDS = 0.005
# The caller polls operations of at most _SMALL_BYTES for _MOMENT seconds, then uses a thread.
_SMALL_BYTES, _MOMENT = 64 << 10, 1e-3
_types: dict[type[DistributedError], Any] = {}
# Before torch 2.7, C++ code that waits for a TensorWork does not keep the object alive.
_kept: set[TensorWork] | None = set() if torch.__version__ < "2.7" else None


def as_torchs(error: DistributedError) -> Exception:
    """Return ``error`` as an instance of its class and of DistBackendError."""
    if isinstance(error, dist.DistBackendError):
        return error  # type: ignore[no-any-return]
    kind = type(error)
    if kind not in _types:
        _types[kind] = type(kind.__name__, (dist.DistBackendError, kind), {"__doc__": kind.__doc__})
    converted: Exception = _types[kind](*error.args)
    converted.__dict__.update(error.__dict__)
    return converted.with_traceback(error.__traceback__)


def ends_soon(work: Work, tensors: Sequence[torch.Tensor]) -> bool:
    """Poll ``work``, for at most ``_MOMENT`` if its ``tensors`` are small. True: it has ended."""
    nbytes = sum([tensor.numel() * tensor.itemsize for tensor in tensors])  # also if sparse
    end = time.monotonic() + (nbytes <= _SMALL_BYTES) * _MOMENT
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        os.sched_yield()  # ranks may share a core
    return True


@untraced
class TensorWork(dist.Work):
    """The operation ``work``, which stores its result in ``tensors``."""

    def __init__(self, work: Work, tensors: Sequence[torch.Tensor], futures: Futures) -> None:
        super().__init__()
        self.work, self.tensors, self._futures = work, tensors, futures
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._error: Exception | None = None  # of an ended operation
        if _kept is not None:
            _kept.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation has ended, at most ``timeout`` (0: no limit), and return True.

        After ``timeout``, the operation continues, and this call raises DistBackendError.
        """
        if _kept is not None:
            _kept.discard(self)
        try:
            self.work.wait(timeout.total_seconds() if timeout > timedelta(0) else None)
        except DistributedError as error:
            raise as_torchs(error) from None
        return True

    synchronize = wait

    def __del__(self, at_exit: Callable[[], bool] = is_finalizing) -> None:
        """Copy the result to the tensors in the background, if no call has waited for it."""
        # At exit, the globals of this module may be None.
        if not at_exit() and isinstance(self.work, Then) and not self.work.is_settled:
            with suppress(RuntimeError):  # Python 3.12 starts no threads at exit
                kept = TensorWork(self.work, self.tensors, self._futures)
                self._futures.add(kept, torch.futures.Future())

    def ends_within(self, seconds: float | None) -> bool:
        """Wait at most ``seconds`` (None: no limit), and return whether the operation has ended."""
        try:
            self.work.wait(seconds)
        except DistributedError as error:
            self._error = None if error.goes_on else as_torchs(error)
            return not error.goes_on
        except Exception as error:  # noqa: BLE001 (waiters get it)
            self._error = error
        return True

    def is_completed(self) -> bool:
        # A native wait without a limit is faster. Another thread may be computing a Then's result.
        limit = 0 if isinstance(self.work, Then) else None
        return self.work.is_completed() and self.ends_within(limit)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors with the result. Blocks until the operation has ended."""
        self.wait()
        return list(self.tensors)

    def source_rank(self) -> int:
        """Return the rank that sent the message of a completed receive, or -1."""
        return -1 if self.work.source is None else self.work.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors, which completes even if no thread waits."""
        if self._future is None:
            has_ended = ends_soon(self.work, self.tensors) and self.is_completed()
            begun: torch.futures.Future[Any] = torch.futures.Future()
            # If result() raises, the future fails, also in C++, where DDP waits for it.
            self._future = begun.then(lambda _: self.result())
            if has_ended:
                begun.set_result(None)
            else:
                self._futures.add(self, begun)
        return self._future


class Ended(TensorWork):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Futures:
    """A thread that completes futures when operations end. The first future starts it."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: TensorWork, future: torch.futures.Future[Any]) -> None:
        if self._thread is None:
            options: Any = {"args": (self._asked,), "name": "flashlight-futures", "daemon": True}
            self._thread = threading.Thread(target=_complete, **options)
            self._thread.start()
            # torch 2.6 deletes groups without shutdown(). At exit, leave the world first to end all
            # operations. Otherwise a C++ thread that waits for Python would abort the process.
            weakref.finalize(self, _finish, self._asked, self._thread)
            initialize.leave_first_at_exit()
        if threading.current_thread() is self._thread:  # a callback in this thread: complete it now
            work.ends_within(None)
            future.set_result(None)
        else:
            self._asked.put((work, future))

    def close(self) -> None:
        if self._thread is not None:
            _finish(self._asked, self._thread)
            self._thread = None


def _finish(asked: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    asked.put(None)
    if thread is not threading.current_thread():  # a thread cannot join itself
        thread.join()


def _complete(requests: queue.SimpleQueue[Any]) -> None:
    """Complete the futures in ``requests``. None asks to return after all operations have ended."""
    pending: list[Any] = []
    is_open = True
    while is_open or pending:
        while is_open and not (pending and requests.empty()):
            if (pair := requests.get()) is None:
                is_open = False
            else:
                pending.append(pair)
        ended = [pair for pair in pending if pair[0].is_completed()]
        for work, future in ended or pending[:1]:
            if work.ends_within(_LOOK_SECONDS):
                pending.remove((work, future))
                future.set_result(None)
