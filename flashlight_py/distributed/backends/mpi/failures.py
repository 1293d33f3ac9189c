"""What ranks say to a user when something between them is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashlight_py.distributed.control.wording import (
    UNUSABLE,
    did_not_join,
    different_calls,
    indented_traceback,
    names,
    raised,
    who_that_was,
)
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    PeerLostError,
)

__all__ = ["Farewell", "late", "lost", "mismatch"]


@dataclass(frozen=True)
class Farewell:
    """What a rank tells the others when it leaves a group or can no longer use it.

    ``completed`` collectives have ended for it, so these will end for the others too. ``culprits``
    are the ranks at fault; ``seconds`` is set if it gave up waiting for them after that long. If a
    culprit's program ``raised``, ``reason`` is the exception in a line, then the traceback.
    """

    completed: int
    culprits: tuple[int, ...]
    reason: str
    seconds: float | None = None
    raised: bool = False


def mismatch(where: str, which: str, calls: Mapping[int, str]) -> MismatchError:
    """List what the ranks called, ranks that agree together; ``which`` call it was."""
    return MismatchError(different_calls(where, f"{which} of this group", calls.items()))


def late(
    where: str, ranks: Iterable[int], seconds: float, detail: str, processes: Sequence[str] = ()
) -> DistributedError:
    """Say that ``ranks`` did not come within ``seconds``; none: they came, and did not finish."""
    missing = list(ranks)
    who = f"{names(missing)} did not join" if missing else "all ranks joined and did not finish"
    limit, processes = f"{seconds:g} seconds", who_that_was(missing, processes)
    return CollectiveTimeoutError(did_not_join(where, who, limit, detail, processes))


def lost(
    where: str, rank: int, sender: int, farewell: Farewell, processes: Sequence[str] = ()
) -> DistributedError:
    """Say what ``farewell`` of ``sender`` means to ``rank``, which waits for it."""
    who, process = names(farewell.culprits), who_that_was(farewell.culprits, processes)
    if farewell.raised:
        words = indented_traceback(raised(who, process, farewell.reason))
        return PeerLostError(f"{where}: {words}")
    if farewell.seconds is None:
        return PeerLostError(
            f"{where}: lost {who} ({farewell.reason}){process}. Look at its own output. {UNUSABLE}"
        )
    if rank in farewell.culprits:
        return PeerLostError(
            f"{where}: lost rank {sender} (it gave up waiting for this rank after "
            f"{farewell.seconds:g} seconds: {farewell.reason}). {UNUSABLE}"
        )
    detail = f"rank {sender} found out: {farewell.reason}"
    return late(where, farewell.culprits, farewell.seconds, detail, processes)
