"""Messages between the launcher and the agents that it starts over ssh: a line of JSON each.

To an agent: ``start`` the ranks, send them a ``signal``, ``input`` for rank 0, ``leave``. Its end
of the connection means leave, too: a launcher that was killed leaves no ranks behind.
From an agent: ``hello``, ``output`` of a rank, ``end`` of a rank, ``more`` input can be taken,
``stuck`` processes when it leaves. Bytes travel as text of Latin-1, which has one sign for each.

An agent waits until the launcher has taken what it says; meanwhile its ranks wait to print. The
launcher waits for no agent, or each of the two might wait for the other.
"""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["Reader", "message"]

_CHUNK = 1 << 16


def message(kind: str, *values: Any) -> bytes:
    """Return the line that says so."""
    return json.dumps([kind, *values]).encode() + b"\n"


class Reader:
    """Reads messages from ``descriptor``, which is made not to block."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._rest = b""
        self.has_ended = False

    def read(self) -> list[tuple[str, list[Any]]]:
        """Return (kind, values) of the messages that are here; sets ``has_ended`` at the end."""
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return []
        self.has_ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [(kind, values) for kind, *values in map(json.loads, lines)]
