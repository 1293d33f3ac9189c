"""A rank in a process of an engine. The process continues after the rank has ended."""

import ctypes
import os
import pickle
import secrets
import signal
import socket
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashlight_py.distributed.internal import is_local
from flashlight_py.interfaces import family_of, listen_everywhere, own_addresses
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.pickling import dumps
from flashlight_py.launch.ranks import ADDRESSES, LISTENER, SECRET, unranked

ENDING_SECONDS = 5.0  # seconds from the request to end a rank to the kill of its process
_BACKLOG = 1024


class RendezvousAddress(NamedTuple):
    """Port of rank 0 and addresses of its host. The address that the engine uses comes first."""

    addresses: Sequence[str]
    port: int


@dataclass(frozen=True)
class Start:
    """One attempt to run all ranks, as sent to each rank. Every attempt has a different ``key``."""

    size: int
    restarts: int = 0
    task: bytes = field(default=b"", repr=False)
    secret: str = field(repr=False, default_factory=lambda: secrets.token_hex(32))
    key: str = field(default_factory=lambda: f"flashlight-{uuid.uuid4().hex}")

    def serve(self, rank: int, rendezvous: RendezvousAddress) -> bytes | Failure:
        """Run the task as ``rank`` and wait until all ranks have returned.

        Returns the pickled result, or a ``Failure`` if this rank failed. The environment variables
        of a rank are set while the function runs and restored afterwards.
        """
        try:
            with _registered_rank(self.key), self._environment(rank, rendezvous):
                return self._call(rank)
        except BaseException as error:  # noqa: BLE001 - ``run`` raises it in the calling program
            return Failure.of_exception(error)

    def _call(self, rank: int) -> bytes:
        import flashlight_py as fl

        fn, args, params = pickle.loads(self.task)
        try:
            with _interruptible(self.key), fl.abort_on_exception():
                fl.distributed_init(fl.DistributedInit.ENV, params=params)
                result = fn(rank, *args)
                subject = f"the result, of type {type(result).__qualname__}, "
                pickled = dumps(result, main_can_be_imported=False, name=subject)
                fl.barrier()  # no rank leaves the world while another rank computes
            return pickled
        finally:
            fl.distributed_shutdown()

    def join(self, rank: int, rendezvous: RendezvousAddress, params: Mapping[str, Any]) -> None:
        """Make this process ``rank`` of the world that connects at ``rendezvous``."""
        import flashlight_py as fl

        with self._environment(rank, rendezvous):
            fl.distributed_init(fl.DistributedInit.ENV, params=params)

    @contextmanager
    def _environment(self, rank: int, rendezvous: RendezvousAddress) -> Iterator[None]:
        """Set the environment variables of a rank within the block, and restore them afterwards."""
        listener = _listeners.pop(self.key, None) if rank == 0 else None
        environ = dict(os.environ)
        addresses, port = rendezvous
        variables = {
            **unranked(environ),
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
            os.environ.update(environ)
            if listener is not None:
                listener.close()


_listeners: dict[str, socket.socket] = {}  # by key of the attempt: listener for its ranks


def listen_for_ranks(key: str, host: str, hosts: Collection[str] = ()) -> RendezvousAddress:
    """Open a listener at a free port for rank 0 of the attempt ``key``, which runs in this process.

    ``host`` is this host and ``hosts`` are all hosts, as the engine names them. If ``host`` is a
    loopback name and no other name is in ``hosts``, the socket listens at ``host``. Otherwise it
    listens on all addresses, because ``host`` may resolve to 127.0.1.1 here.
    """
    if is_local(host) and {*hosts} <= {host}:
        listener, addresses = socket.create_server((host, 0), family=family_of(host)), [host]
    else:
        listener = listen_everywhere(0, _BACKLOG)
        addresses = list(dict.fromkeys([host, *own_addresses()]))
    _listeners[key] = listener
    return RendezvousAddress(addresses, int(listener.getsockname()[1]))


def stop_listening(key: str) -> None:
    """Close the listener of the attempt ``key``, unless rank 0 has already taken it over."""
    if listener := _listeners.pop(key, None):
        listener.close()


class _RunningRank(NamedTuple):
    thread: int
    key: str
    has_ended: threading.Event


_lock = threading.Lock()
_rank: _RunningRank | None = None  # the rank that runs in this process, or None
_interruptible_thread: int | None = None  # the thread in which end_rank may raise SystemExit now
_ended_attempts: set[str] = set()  # keys of ended attempts, whose ranks may start late


def end_rank(key: str) -> bool:
    """End the rank of the attempt ``key`` in this process: raise SystemExit in its thread.

    If the rank has not ended after ENDING_SECONDS, the process is killed. Returns whether the rank
    was running. A rank of ``key`` that starts later ends immediately.
    """
    import flashlight_py as fl

    with _lock:
        _ended_attempts.add(key)
        stop_listening(key)
        if _rank is None or _rank.key != key:
            return False
        if _interruptible_thread is not None:
            fl.distributed.failures.abort.report(SystemExit("the launcher ended this rank"))
            _raise_in(_interruptible_thread, SystemExit)
        threading.Thread(target=_kill_late, args=[_rank], daemon=True).start()
        return True


def _kill_late(rank: _RunningRank) -> None:
    if not rank.has_ended.wait(ENDING_SECONDS):
        signal.raise_signal(signal.SIGKILL)


@contextmanager
def _registered_rank(key: str) -> Iterator[None]:
    global _rank, _interruptible_thread  # noqa: PLW0603 - a process is one rank
    with _lock:
        _raise_if_ended(key)
        if _rank is not None:
            raise RuntimeError("this process is already a rank. Use one process per rank")
        this_rank = _rank = _RunningRank(threading.get_ident(), key, threading.Event())
    try:
        yield
    finally:
        with _lock:
            _raise_in(this_rank.thread, None)  # cancel a pending SystemExit
            _rank = _interruptible_thread = None  # SystemExit may have interrupted _interruptible
            this_rank.has_ended.set()


@contextmanager
def _interruptible(key: str) -> Iterator[None]:
    """Allow ``end_rank`` to raise SystemExit in this thread within the block."""
    global _interruptible_thread  # noqa: PLW0603
    with _lock:
        _raise_if_ended(key)
        thread = _interruptible_thread = threading.get_ident()
    try:
        yield
    finally:
        with _lock:
            _raise_in(thread, None)
            _interruptible_thread = None


def _raise_if_ended(key: str) -> None:
    if key in _ended_attempts:
        raise SystemExit("the launcher ended this rank before it started")


def _raise_in(thread: int, exception_type: type[BaseException] | None) -> None:
    """Make ``thread`` raise ``exception_type`` soon. None cancels an exception that is pending."""
    exception = None if exception_type is None else ctypes.py_object(exception_type)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)
