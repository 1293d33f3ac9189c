"""How long production's own code takes, so that virtual time contains it.

What asks the system costs a constant for each call and each byte, with the Python around it. What
grows with the number of ranks is charged by the rows of ``_GROWING``; as all ranks compute the same
of the same bytes, it is done once in the simulation, and the result is shared. ``python -m
tests.simulation.costs`` measures the constants on the machine at hand; these are of two cores of an
Intel Xeon at 2.1 GHz, with Python 3.11.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from flashlight_py.distributed.memory import topology
from flashlight_py.distributed.rendezvous import meeting
from flashlight_py.distributed.start import initialize

# Seconds for a call, and for each byte of a message at one end.
CONNECT, ACCEPT, SEND, RECEIVE, SELECT = 86e-6, 30e-6, 16e-6, 16e-6, 5e-6
BYTE = 1e-9
RUNNING = 0.1e-6  # between two looks at the clock
FORK, IMPORT = 2e-3, 0.25  # to start a process, and until its program has imported the package
FIRST = 12e-3  # what a process computes once, when it joins for the first time: libraries, pages
# Bytes of a connection in its owner's memory and in its kernel.
CONNECTION_BYTES = 6000


class Growing(NamedTuple):
    """A function of ``module`` whose time grows; ``seconds`` are of its values and its result.

    ``key``, if any, makes of its values what its result depends on.
    """

    module: Any
    name: str
    seconds: Callable[..., float]
    key: Callable[..., Any] | None = None


def _cards(cards: Any) -> tuple[Any, ...]:
    return tuple((id(card.own), id(card.ends)) for card in cards)


# Each of so many seconds for each rank, payload or pair of ranks.
SPLIT, JOIN, ABSENT, ADMIT = 0.4e-6, 0.2e-6, 0.2e-6, 0.1e-6
LOAD, LOAD_BYTE = 2e-6, 10e-9
APART, CHOOSE, CHOOSE_PAIR, FIND = 0.04e-6, 10e-6, 0.06e-6, 0.011e-6
ADMITTED = 200e-6  # of rank 0 for each: both proofs, and the greeting
# Of the stand-ins for native code: to map memory, to prove a connection, to connect one, to look at
# another rank's file; how many are all joined with each other.
MAP, PROVEN, NATIVE_CONNECT, OPEN, DIRECT = 200e-6, 2e-6, 150e-6, 6e-6, 8

_GROWING = (
    Growing(meeting, "split_payloads", lambda made, body: SPLIT * len(made), lambda body: body),
    Growing(meeting, "join_payloads", lambda made, payloads: JOIN * len(payloads)),
    Growing(meeting.Server, "_absent", lambda _, server, *__: ABSENT * len(server.members)),
    Growing(
        meeting.Server, "_admit", lambda _, server, *__: ADMITTED + ADMIT * len(server.members)
    ),
    Growing(
        *(initialize, "check_apart", lambda _, rank, peers: APART * len(peers) ** 2),
        lambda rank, peers: tuple(peers),
    ),
    Growing(
        *(topology, "ranks_by_memory"),
        lambda made, store: FIND * store.size * (store.size + len(made[0])),
    ),
    Growing(
        *(topology, "choose"),
        lambda _, cards: CHOOSE * len(cards) + CHOOSE_PAIR * len(cards) ** 2,
        _cards,
    ),
)


@contextmanager
def charged(spend: Callable[[float], None]) -> Iterator[None]:
    """Charge what production computes, by ``spend``."""
    with ExitStack() as ends:
        for row in _GROWING:
            function = getattr(row.module, row.name, None)
            if function is not None:
                stand_in = _charging(row, function, spend)
                ends.enter_context(mock.patch.object(row.module, row.name, stand_in))
        texts: dict[bytes, Any] = {}

        def loads(text: bytes) -> Any:
            spend(LOAD + LOAD_BYTE * len(text))
            if text not in texts:
                texts[text] = json.loads(text)
            return texts[text]

        reader = SimpleNamespace(loads=loads, dumps=json.dumps)
        for module in (initialize, topology):
            ends.enter_context(mock.patch.object(module, "json", reader))
        yield


def _charging(row: Growing, function: Callable[..., Any], spend: Callable[[float], None]) -> Any:
    last: list[Any] = [None, None]

    def charging(*values: Any) -> Any:
        if row.key is None:
            made = function(*values)
        else:
            key = row.key(*values)
            if last[0] != key:
                last[:] = key, function(*values)
            made = last[1]
        spend(row.seconds(made, *values))
        return made

    return charging
