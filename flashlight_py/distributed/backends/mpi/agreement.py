"""The header of a collective: what every rank calls, compared before an array moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py.distributed.backends.mpi.calls import Header
from flashlight_py.distributed.backends.mpi.failures import mismatch
from flashlight_py.distributed.backends.mpi.progress import Progress, Steps
from flashlight_py.distributed.call import Call

__all__ = ["Agreement"]

# Room for a call in words, when they differ.
_TEXT_BYTES = 512


class Agreement:
    """Compares calls over ``comm``: 16 bytes per rank, and the words only if they differ."""

    def __init__(self, mpi: Any, comm: Any, progress: Progress) -> None:
        self._mpi, self._comm, self._progress = mpi, comm, progress
        self._size = int(comm.Get_size())

    def reach(self, header: Header, where: str, number: int, site: str) -> Steps:
        """Show what is called, at ``site``; returns every rank's fact (``Header``).

        No rank gets past it before every rank has called. Raises ``MismatchError`` on all ranks
        if their calls do not fit.
        """
        mine = np.array([header.digest, header.fact], np.int64)
        table = np.empty((self._size, 2), np.int64)
        yield from self._gather(mine, table, self._mpi.INT64_T)
        keys, facts = table[:, 0].tolist(), table[:, 1].tolist()
        alike = len({value for value in facts if value}) <= 1 or not header.alike
        if keys.count(keys[0]) == self._size and alike:
            return facts
        raise mismatch(where, f"call {number}", (yield from self._words(header.call, site)))

    def _words(self, call: Call, site: str) -> Steps:
        end = f" at {site}".encode()
        text = str(call).encode()[: _TEXT_BYTES - len(end)] + end
        mine = np.frombuffer(text.ljust(_TEXT_BYTES, b"\0"), np.uint8)
        table = np.empty((self._size, _TEXT_BYTES), np.uint8)
        yield from self._gather(mine, table, self._mpi.BYTE)
        texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in table]
        return dict(enumerate(texts))

    def _gather(self, mine: Any, table: Any, kind: Any) -> Steps:
        request = self._comm.Iallgather([mine, mine.size, kind], [table, mine.size, kind])
        yield from self._progress.until([request], moving=False)
