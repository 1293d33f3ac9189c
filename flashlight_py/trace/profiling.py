"""A profile: every call of every rank, from one moment to another, in one file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.failures import incidents
from flashlight_py.distributed.failures.journal import leave_to_python
from flashlight_py.distributed.failures.record import Record
from flashlight_py.distributed.groups.world import current_world
from flashlight_py.distributed.start.exchange import exchange_bytes
from flashlight_py.distributed.start.hosts import host_identity
from flashlight_py.distributed.verbs import RECV, SEND
from flashlight_py.errors import DistributedError
from flashlight_py.trace.records import RankTimeline
from flashlight_py.trace.timeline import chrome_trace

# The quickest of so many exchanges counts: it had the least to wait for.
_ROUNDS = 16
# Users' tags begin at 0, and new groups use -1.
_TAG = -2
_log = logging.getLogger("flashlight_py")


class Profile:
    """Records the communication of all ranks into ``path``; see :func:`flashlight_py.profile`."""

    def __init__(self, path: str | os.PathLike[str] = "trace.json") -> None:
        self.path = Path(path)
        self._records: list[Record] = []
        self._spans: list[tuple[str, int, int]] = []
        self._offset = 0

    def start(self) -> None:
        """Begin to record; collective, blocking.

        Raises:
            RuntimeError: a profile is being taken already.
            DistributedError: as for :func:`flashlight_py.all_reduce`.
        """
        if incidents.listener is not None:
            raise RuntimeError("profile: one is being taken already; stop it first")
        world = current_world().group
        self._records, self._spans = [], []
        self._offset = offset_to_rank_0(world.backend())
        incidents.listener = self._records.append
        leave_to_python(True)

    def stop(self) -> None:
        """End the recording and write the file, on rank 0, for all ranks; collective, blocking.

        Where another rank is lost, each that is left writes its own part, such as
        ``trace.rank1.json``.

        Raises:
            RuntimeError: nothing was started.
            OSError: the file cannot be written.
        """
        timeline = self._end()
        group = current_world().group
        try:
            everyone = group.gather_object(timeline)
        except DistributedError as error:
            self._write_alone(timeline, str(error))
            return
        if everyone is not None:
            self._write(self.path, everyone)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Mark what the body does as ``name`` on this rank's timeline; not collective."""
        started = time.monotonic_ns()
        try:
            yield
        finally:
            self._spans.append((name, started, time.monotonic_ns()))

    def _end(self) -> RankTimeline:
        if incidents.listener != self._records.append:
            raise RuntimeError("profile: nothing was started that could be stopped")
        incidents.listener = None
        leave_to_python(False)
        calls = [record.as_dict() for record in self._records]
        rank, host, now = current_world().group.rank, socket.gethostname(), time.monotonic_ns()
        return RankTimeline(rank, host, os.getpid(), self._offset, now, calls, self._spans)

    def _write(self, path: Path, timelines: list[RankTimeline]) -> None:
        path.write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
        _log.info("the profile of %d rank(s) is in %s", len(timelines), path)

    def _write_alone(self, timeline: RankTimeline, reason: str) -> None:
        path = self.path.with_suffix(f".rank{timeline.rank}{self.path.suffix}")
        self._write(path, [timeline])
        _log.warning("rank %d alone: its profile is in %s (%s)", timeline.rank, path, reason)

    def __enter__(self) -> Profile:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        else:  # the others may be anywhere
            self._write_alone(self._end(), f"{type(error).__name__}: {error}")


def profile(path: str | os.PathLike[str] = "trace.json") -> Profile:
    """Record every call of every verb, from entering the context to leaving it, into one file.

    Collective at both ends, where it blocks; or ``start()`` and ``stop()`` do the same. The file is
    written by rank 0, a Chrome trace with all ranks in it, on rank 0's clock: Perfetto and Chrome
    show it, and ``python -m flashlight_py.trace view trace.json`` makes a page of it. It has of
    each call the verb, bytes, dtype, shape, line of user code, how long the rank waited for others,
    and what ran beside the program. ``span(name)`` marks a part of the program.

    Meanwhile every call takes the way through Python: some 10 us each, in place of one. What
    ran on a GPU is timed by the host, to within half a millisecond.

    Args:
        path: of the file; another one that is there is replaced.

    Example:
        >>> with fl.profile(folder / "trace.json") as taken:
        ...     with taken.span("a step"):
        ...         _ = fl.all_reduce(np.zeros(3))
        >>> (folder / "trace.json").exists()
        True
    """
    return Profile(path)


def offset_to_rank_0(backend: Backend) -> int:
    """Return the nanoseconds to add to this rank's monotonic clock to get rank 0's. Collective.

    0 on rank 0's host, whose ranks have one clock. Else rank 0 is asked for its time, and taken to
    have answered halfway (F. Cristian, Probabilistic clock synchronization, 1989), which is wrong
    by at most half the time of the exchange.
    """
    identities = exchange_bytes(backend, host_identity())
    elsewhere = [rank for rank in range(backend.size) if identities[rank] != identities[0]]
    if backend.rank in elsewhere:
        return _ask(backend)
    if backend.rank == 0:
        for rank in elsewhere:
            _answer(backend, rank)
    return 0


def _ask(backend: Backend) -> int:
    message, measured = np.zeros(1, np.int64), []
    for _ in range(_ROUNDS):
        asked = time.monotonic_ns()
        backend.start(Call(SEND, message, peer=0, tag=_TAG)).wait()
        backend.start(Call(RECV, message, peer=0, tag=_TAG)).wait()
        received = time.monotonic_ns()
        measured.append((received - asked, int(message[0]) - (asked + received) // 2))
    return min(measured)[1]


def _answer(backend: Backend, rank: int) -> None:
    message = np.zeros(1, np.int64)
    for _ in range(_ROUNDS):
        backend.start(Call(RECV, message, peer=rank, tag=_TAG)).wait()
        message[0] = time.monotonic_ns()
        backend.start(Call(SEND, message, peer=rank, tag=_TAG)).wait()
