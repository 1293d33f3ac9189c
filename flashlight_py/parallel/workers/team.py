"""The workers of one module: the memory that they share with this process, requests and answers."""

from __future__ import annotations

import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.cores import thread_variables
from flashlight_py.device import Array
from flashlight_py.distributed import blas
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.worker import Worker
from flashlight_py.parallel.workers.memory import Memory, Place, lay_out
from flashlight_py.parallel.workers.serving import Raised, serve

WHAT = "DataParallel"


class Team:
    """``count`` workers; the arrays of ``params`` are moved into memory that all of them map.

    They and this process share ``cores``.

    One request at a time: :meth:`ask`, then :meth:`answers`. Whatever goes wrong in between ends
    the workers, as nobody knows then what is still on its way. They end as well when nothing refers
    to this object any more, and with this process.

    Raises:
        RankFailedError: a worker cannot import the script.
        TypeError, RuntimeError, OSError: as ``Worker``.
    """

    def __init__(self, count: int, params: Sequence[Variable], cores: int) -> None:
        self.numbers: dict[weakref.ref[Any], int] = {}  # of graphs
        self.dropped: list[weakref.ref[Any]] = []  # those that nobody can differentiate any more
        self._params = list(params)
        self._pid = os.getpid()
        self._waiting = 0  # workers whose answer has not been received
        self._before_next: weakref.WeakMethod[Callable[[], None]] | None = None
        self._workers: list[Worker] = []
        self._memories: list[Memory] = []
        self._limited: list[Any] = []
        self._end = weakref.finalize(
            self, _end, self._pid, self._workers, self._memories, self._limited
        )
        with self._ending_on_errors():
            self._start(count, cores)

    def _start(self, count: int, cores: int) -> None:
        model = self._memory()
        places, places_of_grads = self._place(model, count)
        self._views = model.views(places)
        for param, view in zip(self._params, self._views, strict=True):
            view[...] = param.data
            param.data = view
        self._grads = [[p and model.views([p])[0] for p in grads] for grads in places_of_grads]
        self._inboxes = [self._memory() for _ in range(count)]
        self._outboxes = [self._memory() for _ in range(count)]
        # In a notebook; what processes print themselves goes past the object in its place.
        takes_output = sys.stdout is not sys.__stdout__
        variables = thread_variables(os.environ, count + 1, cores)
        for number, grads in enumerate(places_of_grads):
            fds = (model.fd, self._inboxes[number].fd, self._outboxes[number].fd)
            name = (WHAT, number + 1, count + 1)
            args = (fds, places, grads, takes_output)
            self._workers.append(Worker(name, serve, args, fds, variables))
        for worker in self._workers:
            worker.wait_for_start()
        if not blas.chosen():
            self._limited += blas.limit_each(max(1, cores // (count + 1)))

    def holds(self, params: Sequence[Variable]) -> bool:
        """Return whether the workers are there, and have the memory of these parameters.

        An array that was replaced by another of its shape and dtype is moved there.
        """
        same = len(params) == len(self._params) and all(map(_is, params, self._params))
        if not (self.is_there and same):
            return False
        for param, view in zip(self._params, self._views, strict=True):
            if param.data is not view:
                if (param.data.shape, param.data.dtype) != (view.shape, view.dtype):
                    return False
                view[...] = param.data
                param.data = view
        return True

    @property
    def is_there(self) -> bool:
        """Whether the workers have not been ended."""
        return self._end.alive

    def ask(
        self,
        requests: Sequence[tuple[Any, Sequence[Array]]],
        before_next: Callable[[], None] | None = None,
        module: bytes | None = None,
    ) -> None:
        """Send the first workers a request each, with arrays that are put into their inboxes.

        The last field of a request is replaced by the places of its arrays. All workers receive
        the form of the ``module``, if there is a new one. ``before_next``, a
        method whose object is not kept alive by this, is called before the next request is sent:
        until then the memory of the answers stays as it is.

        Raises:
            RankFailedError: a worker has ended.
            RuntimeError: the workers have been ended, or this process was forked from theirs.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{WHAT}: this process ({os.getpid()}) was forked from the one whose workers these "
                f"are ({self._pid}); wrap the module again here"
            )
        if self.is_there:
            self._settle()
        if not self.is_there:
            raise RuntimeError(
                f"{WHAT}: the workers that computed this have been ended since, by close() or "
                "after an error; compute it again"
            )
        dropped = [self.numbers.pop(self.dropped.pop()) for _ in range(len(self.dropped))]
        with self._ending_on_errors():
            for number, (request, arrays) in enumerate(requests):
                places = self._inboxes[number].put(arrays)
                self._workers[number].send((request._replace(places=places), module, dropped))
                self._waiting = number + 1
            if dropped or module is not None:
                for worker in self._workers[self._waiting :]:
                    worker.send((None, module, dropped))
        self._before_next = None if before_next is None else weakref.WeakMethod(before_next)

    def answers(self) -> list[Any]:
        """Return the answers of the workers that were asked; blocks until they are there.

        Raises:
            RankFailedError: a worker has raised, its exception is the cause where it can be sent,
                or has ended.
        """
        with self._ending_on_errors():
            found = [self._workers[number].receive() for number in range(self._waiting)]
        self._waiting = 0
        for worker, (answer, printed) in zip(self._workers, found, strict=False):
            for line in printed.splitlines():
                print(f"[{worker.number}] {line}")
            if isinstance(answer, Raised):
                raise worker.error(answer.failure.what, answer.failure.traceback) from _cause(
                    answer
                )
        return [answer for answer, _ in found]

    def results(self, worker: int, places: Sequence[Place]) -> list[Array]:
        """Return the arrays of an answer of ``worker``: valid until the next request."""
        return self._outboxes[worker].views(places)

    def gradient(self, worker: int, param: int) -> Array:
        """Return what ``worker`` has computed for ``param``: valid until the next request."""
        found = self._grads[worker][param]
        assert found is not None, "only what has a gradient is asked for"
        return found

    def end(self) -> None:
        """End the workers, whatever they do; blocks until they are gone."""
        self._end()

    def _settle(self) -> None:
        """Complete the request before: let its owner take the answers, or drop them."""
        before_next = self._before_next and self._before_next()
        self._before_next = None
        if before_next is not None:
            before_next()
        if self._waiting:
            with suppress(RankFailedError):  # it concerns a result that nobody has waited for
                self.answers()

    def _memory(self) -> Memory:
        self._memories.append(Memory())
        return self._memories[-1]

    def _place(self, model: Memory, count: int) -> tuple[list[Place], list[list[Place | None]]]:
        """Make room for the parameters and every worker's gradients; return the places of both."""
        places, size = lay_out(param.data for param in self._params)
        starts = list(accumulate([size] * (count + 1), initial=0))
        model.reserve(starts[-1])
        floating = [place.dtype.kind == "f" for place in places]
        grads = [
            [
                place._replace(offset=start + place.offset) if learns else None
                for place, learns in zip(places, floating, strict=True)
            ]
            for start in starts[1:-1]
        ]
        return places, grads

    @contextmanager
    def _ending_on_errors(self) -> Iterator[None]:
        """End the workers when an exception leaves: also an interrupt, halfway in a message."""
        try:
            yield
        except BaseException:
            self._end()
            raise


def _end(
    pid: int, workers: list[Worker], memories: list[Memory], limited_threads: list[Any]
) -> None:
    if os.getpid() == pid:  # not in a process that was forked from it
        for worker in workers:
            worker.end()
        blas.restore_each(limited_threads)
    for memory in memories:
        memory.close()


def _is(one: object, other: object) -> bool:
    return one is other


def _cause(answer: Raised) -> BaseException | None:
    """Return the exception itself, if it can be unpickled here."""
    if answer.error is None:
        return None
    try:
        found: BaseException = pickle.loads(answer.error)
    except Exception:  # noqa: BLE001 - runs code of the exception; its traceback is there as text
        return None
    return found
