"""Messages between the ranks of several hosts: through memory inside a host, else between hosts."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.hierarchical_search import AnyRank, Searches
from flashlight_py.distributed.backends.hierarchical_work import GuardedWork
from flashlight_py.distributed.work import Done, Then, Work
from flashlight_py.errors import DistributedError

__all__ = ["HierarchicalMessages"]


class HierarchicalMessages(Backend):
    """The messages of a backend over several hosts."""

    _hosts: list[list[int]]  # the ranks of each
    _host_of: dict[int, int]
    _inside: Backend
    _flat: Backend
    _callers: Callers
    _searches: Searches
    timeout: float

    @abc.abstractmethod
    def end(self, error: DistributedError) -> None:
        """End all backends because of ``error`` of one of them."""

    def send(self, array: Array, dst: int, tag: int, blocking: bool = False) -> Work:
        """Send through memory inside the host, else between hosts; see ``Backend``."""
        backend, peer = self._way_to("send", dst)
        return GuardedWork(backend.send(array, peer, tag, blocking), self)

    def recv(self, array: Array, src: int, tag: int, blocking: bool = False) -> Work:
        """Receive by the way that ``send`` takes; see ``Backend``."""
        backend, peer = self._way_to("recv", src)
        return GuardedWork(backend.recv(array, peer, tag, blocking), self)

    def recv_matched(
        self,
        array: Array,
        src: int | None,
        tag: int,
        partial: bool,
        blocking: bool = False,
        patience: float = -1.0,
    ) -> Work:
        """Receive by the way that ``send`` takes; from any rank, by looking at both in turn."""
        if src is not None:
            backend, peer = self._way_to("recv", src)
            work = backend.recv_matched(array, peer, tag, partial, blocking, patience)
            return Then(GuardedWork(work, self), lambda found: found and found._replace(source=src))
        self._callers.check("recv")
        search = AnyRank(self, self._ways(), array, tag, partial)
        return Done(search.run(patience)) if blocking else self._searches.start(tag, search.run)

    def _ways(self) -> list[tuple[Backend, Sequence[int]]]:
        """Return what carries messages to this rank, and whom it knows as which rank."""
        host = self._hosts[self._host_of[self.rank]]
        ways = (self._inside, host), (self._flat, range(self.size))
        return [way for way in ways if way[0].size > 1]

    def _way_to(self, verb: str, rank: int) -> tuple[Backend, int]:
        self._callers.check(verb)
        host = self._hosts[self._host_of[self.rank]]
        return (self._inside, host.index(rank)) if rank in host else (self._flat, rank)

    def refuse_message(self, call: str, peer: int, tag: int, sends: bool) -> None:
        """Have the peer raise, by the way of messages to it; see ``Backend``."""
        backend, there = self._way_to("refuse", peer)
        backend.refuse_message(call, there, tag, sends)
