"""Ranks that see one file system meet at a path.

The protocol, and why the leftovers of a dead run cannot disturb it:

1. Rank 0 announces a run under a fresh random nonce: ``run-<run>``.
2. Every other rank joins *every* announcement that it sees: ``join-<run>-<rank>-<nonce>``. Only
   a process that lives after rank 0 started can know ``<run>``, so no join to it is stale.
   Rank 0 joins the announcements of others as well: two living ranks 0 notice each other, a
   dead one stays silent.
3. With one join of each rank, rank 0 publishes ``roster-<run>-0``: all nonces and payloads. A
   rank follows the first roster that holds its own nonce, and no other one ever.
4. A round without payload follows (``gift-<run>-1-<rank>``, then ``roster-<run>-1``). It is a
   vote: a process has one, so of two runs at one path only one can become complete. It also
   finds a rank that died after it joined. Later exchanges are rounds of the same form.
5. At the end each rank writes ``done-<run>-<rank>-<nonce>``; rank 0 waits for all, then removes
   the files of this run and of those that were dead before it.

Whoever fails writes ``error-<run>-<rank>-<nonce>``, and every rank of the run raises what it
says. A late process that claims a rank of a complete run gets ``refusal-<run>-<nonce>``. Where
/proc tells that a process of this machine is dead, nobody waits for it. No file's time is
looked at, so clocks may differ.
"""

from __future__ import annotations

import os

from flashlight_py.distributed.rendezvous._file_guest import Guest
from flashlight_py.distributed.rendezvous._file_host import Host
from flashlight_py.distributed.rendezvous._peers import check_member
from flashlight_py.distributed.rendezvous._shared_directory import SharedDirectory
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import RendezvousError

__all__ = ["FileStore"]


class FileStore(Store):
    """A store in files at ``path``, which every rank must see; ``timeout`` seconds per exchange.

    ``path`` may be an existing directory or a new name in one. Nothing needs to be prepared or
    removed by hand, also after a run that was killed. Files have mode 0600, and files of other
    users are not believed.

    Raises:
        ValueError: ``rank``, ``size`` or ``timeout`` make no sense.
        RendezvousError: the directory of ``path`` is missing or nothing can be created in it.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, size: int, timeout: float) -> None:
        check_member(rank, size, timeout)
        self.rank, self.size = rank, size
        role = Host if rank == 0 else Guest
        self._member = role(SharedDirectory(path), rank, size, timeout)
        self._has_ended = False

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` and return every rank's, in rank order. Collective, blocking.

        Raises:
            RendezvousError: a rank did not come within the timeout or died (named), two
                processes claim one rank, a rank has another world size, another rank failed, or
                this store has ended. The store cannot be used again.
        """
        if self._has_ended:
            raise self._member.error("this store was closed or has failed; make a new one")
        if self.size == 1:
            return [bytes(payload)]
        try:
            return self._member.exchange(bytes(payload))
        except RendezvousError:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Leave; collective. Rank 0 blocks until all have left, then removes every file.

        Raises:
            RendezvousError: on rank 0, when a rank has not left within the timeout or has died
                (named); the files are removed all the same.
        """
        is_known_to_others = self._member.round > 0
        if not self._has_ended and is_known_to_others:
            self._has_ended = True
            self._member.leave()

    def abort(self, reason: str) -> None:
        """Tell the ranks that wait in this store, or come to it, that this one gives up.

        Rank 0 blocks until the others have noticed, at most 5 s, and removes the files.
        """
        if not self._has_ended:
            self._has_ended = True
            self._member.give_up(f"rank {self.rank} gave up: {reason}")
