"""Execution times of the package's own code, so virtual time contains them.

A system call costs a constant per call and per byte, including the Python code around it. Code
whose time grows with
the number of ranks is charged by the rows of ``_growing`` to each rank that runs it. If all ranks
compute the same
from the same roster, the simulation computes it once and shares the result.
The constants were measured on two cores of an AMD EPYC with Python 3.11, by the script that
``git show 5db13cf9:tests/simulation/measure.py`` prints. ``benchmarks/simulated_start.py --real``
compares a real start with a simulated start.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from flashlight_py.distributed.memory import topology
from flashlight_py.distributed.rendezvous import store, tree

# Seconds per call, and per byte of a message at one end.
CONNECT, ACCEPT, SEND, RECEIVE, SELECT = 86e-6, 30e-6, 16e-6, 16e-6, 5e-6
BYTE = 1e-9
RUNNING = 0.1e-6  # between two reads of the clock
FORK, IMPORT = 0.35e-3, 0.4  # to start a process, and to import the package
FIRST = 11e-3  # additional time of a process's first start: libraries, pages
ADMITTED = 70e-6  # per admitted rank: both proofs, and the greeting
# Bytes of a connection in its owner's memory and in the kernel.
CONNECTION_BYTES = 6000

# Seconds per rank to read an entry, to pack an entry, to process a card and to choose an address;
# and seconds per byte that is parsed or that a proof covers.
TAKE, PACK, DERIVE, CHOOSE = 1.5e-6, 0.2e-6, 3e-6, 10e-6
LOAD_BYTE, PROVE_BYTE = 10e-9, 2e-9

# Seconds of the stand-ins for native code: to map memory, to start a network, to connect a rank
# with its proof, to read another rank's file. Then the number of ranks that are connected to all
# others.
MAP, JOINED, NATIVE_CONNECT, PROVEN, OPEN, DIRECT = 0.8e-3, 1.25e-3, 0.1e-3, 2e-6, 10e-6, 8


class Growing(NamedTuple):
    """A function of ``module``, and its seconds as a function of its result and arguments."""

    module: Any
    name: str
    seconds: Callable[..., float]


def _derived(_: Any, roster: store.Roster, make: Callable[..., Any], *__: Any) -> float:
    if "key" in make.__name__:
        return PROVE_BYTE * len(roster.body) + PACK * len(roster)
    seconds = DERIVE + (CHOOSE if make is topology._addresses_of_ranks else 0.0)
    return seconds * len(roster) + LOAD_BYTE * len(roster.body)


_growing = (
    Growing(store.Roster, "of", lambda made, *_: PACK * len(made)),
    Growing(store.Roster, "derived", _derived),
    Growing(tree.TreeRecord, "add_entries", lambda _, __, body: TAKE * (1 + len(body) // 600)),
    Growing(tree.TreeNode, "_admit", lambda *_: ADMITTED),
)


@contextmanager
def charged(spend: Callable[[float], None]) -> Iterator[None]:
    """Charge the package's computations by ``spend``, and share equal rosters."""
    with ExitStack() as ends:
        for module, name, seconds in _growing:
            stand_in = _charging(getattr(module, name), seconds, spend)
            if isinstance(vars(module)[name], classmethod):
                stand_in = staticmethod(stand_in)
            ends.enter_context(mock.patch.object(module, name, stand_in))
        stand_in = SimpleNamespace(**{**vars(store), "Roster": Rosters()})
        ends.enter_context(mock.patch.object(tree, "store", stand_in))
        yield


class Rosters:
    """Stand-in for the class: shares equal rosters among the last ones."""

    def __init__(self, last: int = 1) -> None:
        self._last = deque[store.Roster](maxlen=last)

    def __call__(self, body: bytes) -> store.Roster:
        for entry in self._last:
            if entry.body is body or entry.body == body:
                return entry
        self._last.append(store.Roster(body))
        return self._last[-1]

    def of(self, payloads: Sequence[bytes]) -> store.Roster:
        """Pack ``payloads`` like the class."""
        return store.Roster.of(payloads)


def _charging(
    function: Callable[..., Any], seconds: Callable[..., float], spend: Callable[[float], None]
) -> Any:
    def charging(*values: Any) -> Any:
        made = function(*values)
        spend(seconds(made, *values))
        return made

    return charging
