"""A rank in a process of an engine, which lives on after the rank."""

from __future__ import annotations

import ctypes
import os
import pickle
import secrets
import signal
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashlight_py.distributed.internal import is_local
from flashlight_py.interfaces import family_of, listen_everywhere, own_addresses
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.pickling import dumps
from flashlight_py.launch.ranks import ADDRESSES, LISTENER, SECRET, without_place

ENDING_SECONDS = 5.0  # that a rank has to end, before its process is killed
_BACKLOG = 1024


class Meeting(NamedTuple):
    """A meeting of ranks: a port of rank 0, and the addresses of its host, the engine's first."""

    addresses: Sequence[str]
    port: int


@dataclass(frozen=True)
class Start:
    """One attempt, as the engine hands it to every rank; ``key`` is its alone."""

    size: int
    restarts: int = 0
    task: bytes = field(default=b"", repr=False)
    secret: str = field(repr=False, default_factory=lambda: secrets.token_hex(32))
    key: str = field(default_factory=lambda: f"flashlight-{uuid.uuid4().hex}")

    def serve(self, rank: int, meeting: Meeting) -> bytes | Failure:
        """Be ``rank``, which meets the others there, until all have returned.

        Returns the pickled result, or how this rank has failed. Its environment is that of a rank
        while the function runs, and as before afterwards.
        """
        try:
            with _as_the_only_rank(self.key), self._environment(rank, meeting):
                return self._call(rank)
        except BaseException as error:  # noqa: BLE001 - whatever it is, ``run`` raises it
            return Failure.of_exception(error, time.monotonic())

    def _call(self, rank: int) -> bytes:
        import flashlight_py as fl

        fn, args, params = pickle.loads(self.task)
        try:
            with _can_be_ended(self.key), fl.abort_on_exception():
                fl.distributed_init(fl.DistributedInit.ENV, params=params)
                result = fn(rank, *args)
                what = f"the result, of type {type(result).__qualname__}, "
                pickled = dumps(result, main_can_be_imported=False, what=what)
                fl.barrier()  # nobody leaves while others compute
            return pickled
        finally:
            fl.distributed_shutdown()

    def join(self, rank: int, meeting: Meeting, params: Mapping[str, Any]) -> None:
        """Make this process ``rank`` of the world that meets there, and no more."""
        import flashlight_py as fl

        with self._environment(rank, meeting):
            fl.distributed_init(fl.DistributedInit.ENV, params=params)

    @contextmanager
    def _environment(self, rank: int, meeting: Meeting) -> Iterator[None]:
        """Have the environment of a rank, and the listener that was made for it."""
        listener = _listeners.pop(self.key, None) if rank == 0 else None
        before = dict(os.environ)
        addresses, port = meeting
        variables = {
            **without_place(before),
            **{"RANK": str(rank), "WORLD_SIZE": str(self.size), SECRET: self.secret},
            **{"MASTER_ADDR": addresses[0], "MASTER_PORT": str(port)},
            **{ADDRESSES: ",".join(addresses), "FLASHLIGHT_RESTART_COUNT": str(self.restarts)},
            **({LISTENER: str(listener.fileno())} if listener else {}),
        }
        try:
            os.environ.clear()
            os.environ.update(variables)
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            if listener is not None:
                listener.close()


# Where ranks meet ---------------------------------------------------------------------------------

_listeners: dict[str, socket.socket] = {}


def listen(key: str, host: str, hosts: Collection[str] = ()) -> Meeting:
    """Listen at a free port, for the rank 0 of this process that comes with ``key``.

    ``host`` and ``hosts`` are the engine's names of this host and of all hosts. If all ranks are on
    the loopback, it listens there; else at all addresses, as a name may mean 127.0.1.1 here.
    """
    if is_local(host) and {*hosts} <= {host}:
        listener, addresses = socket.create_server((host, 0), family=family_of(host)), [host]
    else:
        listener = listen_everywhere(0, _BACKLOG)
        addresses = list(dict.fromkeys([host, *own_addresses()]))
    _listeners[key] = listener
    return Meeting(addresses, int(listener.getsockname()[1]))


def stop_listening(key: str) -> None:
    """Close what :func:`listen` has made, if no rank 0 has come for it."""
    if listener := _listeners.pop(key, None):
        listener.close()


# The end of a rank --------------------------------------------------------------------------------


class _RunningRank(NamedTuple):
    thread: int
    key: str
    has_ended: threading.Event


_lock = threading.Lock()
_rank: _RunningRank | None = None  # that this process is
_endable: int | None = None  # the thread that can be ended now
_over: set[str] = set()  # attempts that have ended, of which a rank may still begin here


def end_rank(key: str) -> bool:
    """End the rank of the attempt ``key`` in this process: its thread raises SystemExit.

    If it has not ended after ENDING_SECONDS, the process is killed. Returns False if there is no
    such rank; one that begins later ends at once.
    """
    import flashlight_py as fl

    with _lock:
        _over.add(key)
        stop_listening(key)
        if _rank is None or _rank.key != key:
            return False
        if _endable is not None:
            fl.distributed.failures.abort.report(SystemExit("the launcher has ended this rank"))
            _raise_in(_endable, SystemExit)
        threading.Thread(target=_kill_late, args=[_rank], daemon=True).start()
        return True


def _kill_late(rank: _RunningRank) -> None:
    if not rank.has_ended.wait(ENDING_SECONDS):
        signal.raise_signal(signal.SIGKILL)


@contextmanager
def _as_the_only_rank(key: str) -> Iterator[None]:
    global _rank, _endable  # noqa: PLW0603 - a process is one rank
    with _lock:
        _check_not_over(key)
        if _rank is not None:
            raise RuntimeError("this process is a rank already; each rank needs one of its own")
        mine = _rank = _RunningRank(threading.get_ident(), key, threading.Event())
    try:
        yield
    finally:
        with _lock:
            _raise_in(mine.thread, None)  # what end_rank has asked for, and did not happen before
            _rank = _endable = None  # the second too: SystemExit may end whoever resets it
            mine.has_ended.set()


@contextmanager
def _can_be_ended(key: str) -> Iterator[None]:
    """A part in which the thread may raise SystemExit anywhere; leaving the world is none."""
    global _endable  # noqa: PLW0603
    with _lock:
        _check_not_over(key)
        thread = _endable = threading.get_ident()
    try:
        yield
    finally:
        with _lock:
            _raise_in(thread, None)
            _endable = None


def _check_not_over(key: str) -> None:
    if key in _over:
        raise SystemExit("the launcher has ended this rank before it began")


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have ``thread`` raise ``kind`` as soon as it executes Python; None takes that back."""
    exception = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)
