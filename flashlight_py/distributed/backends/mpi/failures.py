"""What ranks say to a user when something between them is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashlight_py.distributed.people import indented_traceback, names, who_that_was
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    PeerLostError,
)

__all__ = ["Farewell", "late", "lost", "mismatch"]

_UNUSABLE = "This group cannot be used again"


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
    groups: dict[str, list[int]] = {}
    for rank, call in calls.items():
        groups.setdefault(call, []).append(rank)
    listed = "; ".join(f"{names(ranks)} called {call}" for call, ranks in groups.items())
    return MismatchError(
        f"{where}: the ranks called different things in {which} of this group: {listed}. "
        "Nothing was changed; make every rank call the same"
    )


def late(
    where: str, ranks: Iterable[int], seconds: float, detail: str, people: Sequence[str] = ()
) -> DistributedError:
    """Say that ``ranks`` did not come within ``seconds``; none: they came, and did not finish."""
    missing = list(ranks)
    who = f"{names(missing)} did not join" if missing else "all ranks joined and did not finish"
    return CollectiveTimeoutError(
        f"{where}: {who} within {seconds:g} seconds ({detail}){who_that_was(missing, people)}. "
        "It is stuck, slow, or called something else; a longer limit is "
        f"params={{'TIMEOUT': seconds}} of distributed_init, or timeout=seconds of new_group. "
        f"{_UNUSABLE}"
    )


def lost(
    where: str, rank: int, sender: int, farewell: Farewell, people: Sequence[str] = ()
) -> DistributedError:
    """Say what ``farewell`` of ``sender`` means to ``rank``, which waits for it."""
    who, process = names(farewell.culprits), who_that_was(farewell.culprits, people)
    if farewell.raised:
        summary, _, traceback = farewell.reason.partition("\n")
        words = f"it raised {summary}. {_UNUSABLE}\n\nThe traceback of {who}:\n{traceback}"
        return PeerLostError(f"{where}: lost {who}{process}: {indented_traceback(words)}")
    if farewell.seconds is None:
        return PeerLostError(
            f"{where}: lost {who} ({farewell.reason}){process}. Look at its own output. {_UNUSABLE}"
        )
    if rank in farewell.culprits:
        return PeerLostError(
            f"{where}: lost rank {sender} (it gave up waiting for this rank after "
            f"{farewell.seconds:g} seconds: {farewell.reason}). {_UNUSABLE}"
        )
    detail = f"rank {sender} found out: {farewell.reason}"
    return late(where, farewell.culprits, farewell.seconds, detail, people)
