"""Ranks that an ``mpirun`` started meet through MPI."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

import numpy as np

from flashlight_py.distributed.rendezvous.environment import LaunchEnvironment, detect
from flashlight_py.distributed.rendezvous.store import Store, Waiting, not_arrived
from flashlight_py.errors import BackendUnavailableError, RendezvousError

_PAYLOAD, _NOTICE = 1, 2
_PAUSE = 0.0005


def load_mpi() -> Any:
    """Import and return ``mpi4py.MPI``, which initialises MPI; finalised when this process exits.

    Raises:
        BackendUnavailableError: mpi4py or the MPI library that it loads is missing, MPI was not
            initialised, or it has ended already.
    """
    finalizes = False
    try:
        import mpi4py

        # Where the program has imported it before, or has chosen, mpi4py keeps to that.
        finalizes = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None
        if finalizes:
            mpi4py.rc.finalize = False  # it would do so in forked children as well
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError without a libmpi
        raise BackendUnavailableError(
            f"starting by MPI needs mpi4py and an MPI library, and they cannot be loaded: {error}; "
            "install both with: pip install 'flashlight-py[mpi]'"
        ) from error
    if finalizes:
        atexit.register(_finalize, MPI, os.getpid())
    if not MPI.Is_initialized():
        raise BackendUnavailableError(
            "MPI is not initialised: mpi4py.rc.initialize is False; leave it True, or call "
            "MPI.Init_thread() before distributed_init"
        )
    if MPI.Is_finalized():
        raise BackendUnavailableError(
            "MPI has been finalised in this process, which cannot be undone; leave MPI.Finalize() "
            "to mpi4py, which calls it at exit"
        )
    return MPI


def _finalize(mpi: Any, pid: int) -> None:
    """At exit: end MPI, unless this is a child that was forked, whose parent goes on with it."""
    if os.getpid() == pid and not mpi.Is_finalized():
        mpi.Finalize()


def check_world(declared: LaunchEnvironment | None, size: int) -> None:
    """Refuse a world of one that was started as one of several.

    Raises:
        RendezvousError: ``declared``, what the environment says, has more than one rank, and MPI
            itself knows only this one: each rank would train alone.
    """
    if declared is None or declared.size == 1 or size > 1:
        return
    raise RendezvousError(
        f"the environment says rank {declared.rank} of {declared.size} ({declared.said_by}), MPI "
        "says 1: this process was started by one MPI and mpi4py has loaded another; use the mpirun "
        "that belongs to mpi4py's library (python -m mpi4py --mpi-lib-version shows it), or "
        "build mpi4py for the MPI at hand: pip install --no-binary=mpi4py mpi4py"
    )


class MpiStore(Store):
    """A store over ``MPI.COMM_WORLD``, which knows rank and size; initialises MPI.

    Messages go through a communicator of our own, so they cannot meet an application's.
    ``timeout`` is in seconds for each exchange.

    Raises:
        BackendUnavailableError: mpi4py or an MPI library is missing.
        RendezvousError: the environment says that there are several ranks, MPI says one.
        ValueError: the launcher's variables contradict each other.
    """

    def __init__(self, timeout: float) -> None:
        self._mpi = load_mpi()
        world = self._mpi.COMM_WORLD
        self.rank, self.size = int(world.Get_rank()), int(world.Get_size())
        check_world(detect(), self.size)
        self._timeout = timeout
        self._wire: Any = world.Dup()
        self._failed = ""
        self._leaves = False  # the others may have freed the communicator
        self._notices: list[Any] = []

    def exchange(self, payload: bytes) -> list[bytes]:
        """Pass ``payload`` and return every rank's, in rank order; see ``Store``.

        Every rank sends to every other one, rather than all in one collective: so the ranks
        that have not arrived can be named, and the notice of one that aborts is received.
        """
        if self._wire is None or self._failed:
            raise self._error(self._failed or "this store was closed")
        got = {self.rank: bytes(payload)}
        sends = self._send(payload, _PAYLOAD)
        deadline = time.monotonic() + self._timeout
        waiting = Waiting(self.rank == 0, "rendezvous by MPI")
        while len(got) < self.size or not self._mpi.Request.Testall(sends):
            if not self._receive(got):
                self._check_notices()
                missing = set(range(self.size)) - got.keys()
                if time.monotonic() >= deadline:
                    late = not_arrived(missing, self.size, self._timeout) if missing else ""
                    what = f"{late or 'sends are stuck'}; see whether a rank has raised"
                    self._failed = f"{what} or still computes"
                    raise self._error(self._failed)
                waiting.look(missing)
                # MPI offers nothing to wait for "a message of any of two kinds" with a timeout.
                time.sleep(_PAUSE)
        return [got[rank] for rank in range(self.size)]

    def _send(self, payload: bytes, tag: int) -> list[Any]:
        buffer = np.frombuffer(payload, np.uint8)
        others = (rank for rank in range(self.size) if rank != self.rank)
        return [self._wire.Isend([buffer, self._mpi.BYTE], rank, tag) for rank in others]

    def _receive(self, got: dict[int, bytes]) -> bool:
        """Take the next message of each rank that is still missing; return whether one arrived.

        MPI keeps the order between two ranks, so a message of a rank that is ahead of us, for
        the next exchange, stays where it is.
        """
        before = len(got)
        for rank in set(range(self.size)) - got.keys():
            status = self._mpi.Status()
            if self._wire.Iprobe(rank, _PAYLOAD, status):
                got[rank] = self._take(rank, _PAYLOAD, status)
        return len(got) > before

    def _take(self, rank: int, tag: int, status: Any) -> bytes:
        buffer = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._wire.Recv([buffer, self._mpi.BYTE], rank, tag)
        return buffer.tobytes()

    def _check_notices(self) -> None:
        status = self._mpi.Status()
        if self._wire.Iprobe(self._mpi.ANY_SOURCE, _NOTICE, status):
            rank = status.Get_source()
            reason = self._take(rank, _NOTICE, status).decode(errors="replace")
            self._failed = f"rank {rank} aborted: {reason}"
            raise self._error(self._failed)

    def close(self) -> None:
        """Leave; see ``Store``. Frees the communicator; MPI itself ends with the process."""
        if self._wire is None or self._failed:
            return
        self._leaves = True
        # Else the notice of a rank that aborted would be received in the next communicator.
        self.exchange(b"")
        self._wire.Free()
        self._wire = None

    def abort(self, reason: str) -> None:
        """Notify the others that this rank aborts; they raise in their next or current exchange.

        Does not wait. The communicator stays: all ranks would have to take part in freeing it.
        """
        if self._wire is not None and not self._failed and not self._leaves:
            self._failed = f"rank {self.rank} aborted: {reason}"
            # A message this short is sent at once; nobody may be there to complete a longer one.
            self._notices = self._send(reason.encode()[:1024], _NOTICE)

    def _error(self, reason: str) -> RendezvousError:
        return RendezvousError(f"rendezvous by MPI, rank {self.rank} of {self.size}: {reason}")
