"""The workers of one module: the memory that they share with this process, requests and answers.

A team may be collected anywhere, where a signal handler may raise and what it raises would be lost:
its workers are set aside then, without any Python code. The next use of a team ends them.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.cores import thread_variables
from flashlight_py.device import Array
from flashlight_py.distributed.start import blas
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.spawning import Worker
from flashlight_py.parallel.workers.serving import Request, ShareResult, serve
from flashlight_py.parallel.workers.shared_values import WorkerMemory, lay_out

WHAT = "DataParallel"


@dataclass
class _Held:
    """The parts of a team that have to be ended."""

    pid: int = field(default_factory=os.getpid)
    is_there: bool = True
    workers: list[Worker] = field(default_factory=list)
    memories: list[WorkerMemory] = field(default_factory=list)
    limited: list[Any] = field(default_factory=list)


_watched: dict[weakref.ref[Team], _Held] = {}
_dropped: deque[weakref.ref[Team]] = deque()


def end_dropped() -> None:
    """End the workers of teams that were collected, each on one thread."""
    with suppress(IndexError):  # another thread has the last one
        while _dropped:
            _end(_dropped.popleft())


@atexit.register
def _end_all() -> None:
    for team in list(_watched):
        _end(team)


def _end(team: weakref.ref[Team]) -> None:
    """End what it holds; where that was interrupted, what is left."""
    held = _watched.get(team)
    if held is None:
        return
    held.is_there = False
    if os.getpid() == held.pid:  # not in a process that was forked from it
        for worker in held.workers:
            worker.end()
        blas.restore(held.limited)
    while held.memories:
        held.memories.pop().close()
    _watched.pop(team, None)


# A message that was cut in the middle cannot be completed, so whatever interrupts one ends all
# workers; the next call starts others, and nothing is lost: parameters, modes and random numbers
# are this process's.
class Team:
    """``count`` workers, which share ``cores`` with this process, and map the arrays of ``params``.

    One request at a time: :meth:`ask`, then :meth:`answers`. Any error in between ends the workers.
    They end with this process, and by the next use of a team when nothing refers to this one any
    more.
    """

    def __init__(self, count: int, params: Sequence[Variable], cores: int) -> None:
        self.numbers: dict[weakref.ref[Any], int] = {}  # of graphs, until the workers forget them
        # What each worker has computed for each parameter: valid until the next request.
        self.grads: list[list[Array]] = []
        self._params = list(params)
        self._module: bytes | None = None  # the form that they have
        self._waiting = 0  # workers whose answer has not been received
        self._asker: weakref.ref[Any] | None = None
        end_dropped()
        self._held = held = _watched[weakref.ref(self, _dropped.append)] = _Held()
        self._workers = held.workers
        with self._ending_on_errors():
            self._start(count, cores)

    def _start(self, count: int, cores: int) -> None:
        memories = self._held.memories  # where one fails, has those before
        memories.extend(WorkerMemory() for _ in range(2 * count + 1))
        model, *boxes = memories
        self._boxes = [*zip(boxes[::2], boxes[1::2], strict=True)]  # to each worker, and from it
        places, size = lay_out([param.data for param in self._params])
        model.reserve(size * (count + 1))
        self._views = model.views(places)
        self.holds(self._params)
        # In a notebook; what processes print themselves goes past the object in its place.
        takes_output = sys.stdout is not sys.__stdout__
        variables = thread_variables(os.environ, count + 1, cores)
        for number in range(1, count + 1):  # gradients lie as the parameters do
            grads = [place._replace(offset=number * size + place.offset) for place in places]
            self.grads.append(model.views(grads))
            fds = (model.fd, *(box.fd for box in self._boxes[number - 1]))
            args = (fds, places, grads, takes_output)
            self._workers.append(Worker((WHAT, number, count + 1), serve, args, fds, variables))
        for worker in self._workers:
            worker.wait_for_start()
        self._held.limited += blas.limit_each(max(1, cores // (count + 1)))

    def holds(self, params: Sequence[Variable]) -> bool:
        """Return whether workers map these parameters; arrays like those of before are moved."""
        if not self._held.is_there or [*map(id, params)] != [*map(id, self._params)]:
            return False
        for param, view in zip(self._params, self._views, strict=True):
            if param.data is not view:
                if (param.data.shape, param.data.dtype) != (view.shape, view.dtype):
                    return False
                view[...] = param.data
                param.data = view
        return True

    def ask(
        self,
        requests: Sequence[tuple[Request, Sequence[Array]]],
        asker: Any = None,
        module: bytes | None = None,
    ) -> None:
        """Send the first workers a request each, with arrays that are put into their inboxes.

        All workers receive the form of the ``module`` where it has changed. ``asker``, which is not
        kept alive by this, is told to ``save()`` what it needs of the answers before the next
        request is sent: until then their memory stays as it is.
        """
        end_dropped()
        if os.getpid() != self._held.pid:
            raise RuntimeError(
                f"{WHAT}: this process ({os.getpid()}) was forked from the one whose workers these "
                f"are ({self._held.pid}); wrap the module again here"
            )
        if self._held.is_there:  # complete the request before: its owner takes the answers, or not
            before = None if self._asker is None else self._asker()
            self._asker = None
            if before is not None:
                before.save()
            if self._waiting:
                with suppress(RankFailedError):  # of a result that nobody has waited for
                    self.answers()
        if not self._held.is_there:
            raise RuntimeError(
                f"{WHAT}: the workers that computed this have been ended since, by close() or "
                "after an error; compute it again"
            )
        # Those that nobody can differentiate any more.
        gone = [graph for graph in list(self.numbers) if graph() is None]
        dropped = [self.numbers.pop(graph) for graph in gone]
        changed = None if module == self._module else module
        with self._ending_on_errors():
            for number, (request, arrays) in enumerate(requests):
                places = self._boxes[number][0].put(arrays)
                self._workers[number].send((request, places, changed, dropped))
                self._waiting = number + 1
            if dropped or changed is not None:
                for worker in self._workers[self._waiting :]:
                    worker.send((None, None, changed, dropped))
        self._module = changed or self._module
        self._asker = None if asker is None else weakref.ref(asker)

    def answers(self) -> list[ShareResult]:
        """Return leaves and arrays of each worker that was asked; blocks until they are there.

        The arrays are valid until the next request. A worker's exception is an error's cause.
        """
        with self._ending_on_errors():
            found = [self._workers[number].receive() for number in range(self._waiting)]
        self._waiting = 0
        for worker, ((leaves, rest), printed) in zip(self._workers, found, strict=False):
            for line in printed.splitlines():
                print(f"[{worker.number}] {line}")
            if isinstance(leaves, Failure):
                cause: BaseException | None = None
                with suppress(Exception):  # runs its code, and its traceback is there as text
                    cause = pickle.loads(rest)
                raise worker.error(leaves.what, leaves.traceback) from cause
        boxes = zip(found, self._boxes, strict=False)
        return [(leaves, box.views(places)) for ((leaves, places), _), (_, box) in boxes]

    def end(self) -> None:
        """End the workers, whatever they do; blocks until they are gone."""
        _end(weakref.ref(self))

    @contextmanager
    def _ending_on_errors(self) -> Iterator[None]:
        """End the workers when an exception leaves: also an interrupt, halfway in a message."""
        try:
            yield
        except BaseException:
            self.end()
            raise
