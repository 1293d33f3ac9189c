"""Messages between the ranks of several hosts: through memory inside a host, else between hosts."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.hierarchical_search import AnyRank, Searches
from flashlight_py.distributed.backends.hierarchical_work import GuardedWork
from flashlight_py.distributed.call import ANY_RANK, Call
from flashlight_py.distributed.work import Done, Then, Work
from flashlight_py.errors import DistributedError


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

    def message(self, call: Call) -> Work:
        """Start a message: through memory inside the host, else between hosts; see ``Backend``."""
        self._callers.check("refuse" if call.refusal else call.name)
        if call.peer == ANY_RANK:
            search = AnyRank(self, self._ways(), call)
            patience = call.patience
            return (
                Done(search.run(patience))
                if call.blocking
                else self._searches.start(call.tag, search.run)
            )
        backend, peer = self._way_to(call.peer)
        work = GuardedWork(backend.start(replace(call, peer=peer)), self)
        if not call.is_open:
            return work
        return Then(work, lambda found: found and found._replace(source=call.peer))

    def _ways(self) -> list[tuple[Backend, Sequence[int]]]:
        """Return what carries messages to this rank, and whom it knows as which rank."""
        host = self._hosts[self._host_of[self.rank]]
        ways = (self._inside, host), (self._flat, range(self.size))
        return [way for way in ways if way[0].size > 1]

    def _way_to(self, rank: int) -> tuple[Backend, int]:
        host = self._hosts[self._host_of[self.rank]]
        return (self._inside, host.index(rank)) if rank in host else (self._flat, rank)
