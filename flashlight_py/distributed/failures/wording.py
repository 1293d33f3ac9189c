"""Texts of errors about ranks: their calls, their processes, lost ranks, and advice."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from flashlight_py.distributed.calls.call import SHUTDOWN
from flashlight_py.distributed.rendezvous.store import MOST_RANKS, name_ranks
from flashlight_py.errors import PeerLostError

names = name_ranks
UNUSABLE = "This group cannot be used again"
NOTHING_CHANGED = "No array has changed"
EARLIER_ADVICE = (
    "A rank had returned before the other ranks called, so the error is raised in this call, which "
    "had no effect. Set FLASHLIGHT_CHECKS=sync to make each call wait for all ranks"
)
PEER_ADVICE = "It died, exited or closed its connection. Read the output of that rank"
END_ADVICE = (
    "Make the same number of calls on every rank: pass drop_last=True to DistributedSampler, or "
    "use fl.join() if the numbers must differ"
)
LEAVING_ADVICE = "Send the message before that rank shuts down, or do not wait for it"
HOST_ADVICE = (
    "Check that host and the network. If hosts may be silent for longer, for example in a "
    "debugger, pass params={'HOST_TIMEOUT': seconds} to distributed_init (0: no limit)"
)

HAS_LEFT = "it ended normally or closed this group"
IS_LEAVING = "it waits in distributed_shutdown() and has not begun this message"


def process_list(ranks: Sequence[int], processes: Sequence[str]) -> str:
    """Return a clause such as ", which is process 12 on host a", or "" if no process is known."""
    texts = [processes[rank] for rank in ranks if rank < len(processes)]
    listed, more = ", ".join(texts[:MOST_RANKS]), len(texts) - MOST_RANKS
    listed += f" and {more} more" if more > 0 else ""
    return f", which {'are' if len(texts) > 1 else 'is'} {listed}" if texts else ""


def ended_after(made: int, number: int) -> str:
    """Return that a rank left a group after ``made`` calls; this rank makes call ``number``."""
    return f"{HAS_LEFT} after {made} calls of it, {number - made} fewer than this rank"


def peer_lost(
    group: Any, where: str, ranks: Sequence[int], reason: str, advice: str
) -> PeerLostError:
    """Return the error for the lost ``ranks`` of the backend ``group``."""
    who = names(group.numbers[rank] for rank in ranks) if ranks else "another rank"
    processes = process_list(ranks, group.processes)
    return PeerLostError(f"{where}: lost {who} ({reason}){processes}. {advice}. {UNUSABLE}")


def different_calls(
    where: str, calls: Iterable[tuple[int, str]], number: int, ago: int = 0, which: str = ""
) -> str:
    """Return the text of a MismatchError. ``calls`` are pairs of rank and call.

    ``number`` is the number of this rank's current call. If ``ago`` is not 0, the ranks differed in
    the earlier call ``number - ago``. ``which`` describes that call (default: by its number).
    """
    outcome, made = EARLIER_ADVICE if ago else NOTHING_CHANGED, number - ago - 1
    earlier = f"an earlier call of this group, {ago} before this one"
    which = which or (earlier if ago else f"call {number} of this group")
    fewer = number - made - where.startswith("[distributed_shutdown]")
    ended = f" after {made} calls" + f", {fewer} fewer than this rank" * bool(fewer)
    agreed: dict[str, list[int]] = {}
    for rank, call in calls:
        agreed.setdefault(call + ended * call.startswith(SHUTDOWN), []).append(rank)
    called = "; ".join(f"{names(ranks)} called {call}" for call, ranks in agreed.items())
    return (
        f"{where}: the ranks made different calls in {which}: {called}. {outcome}. Make the same "
        "call on every rank"
    )


def did_not_join(where: str, who: str, limit: str, detail: str, which: str, last: str = "") -> str:
    """Return the text of a CollectiveTimeoutError. ``who`` is like "rank 1 did not join"."""
    return (
        f"{where}: {who} within {limit} ({detail}){which}. {last}It is stuck, slow, or made "
        "another call. If the timeout is too short, pass params={'TIMEOUT': seconds} to "
        f"distributed_init or timeout=seconds to new_group. {UNUSABLE}"
    )


def peer_raised(who: str, which: str, traceback: str) -> str:
    summary, _, lines = traceback.partition("\n")
    return f"lost {who}{which}: it raised {summary}. {UNUSABLE}\n\nThe traceback of {who}:\n{lines}"


def indented_traceback(words: str) -> str:
    """Indent another rank's traceback: launchers must not show it as a traceback of this rank."""
    before, mark, rest = words.partition("\n\nThe traceback of ")
    who, newline, lines = rest.partition("\n")
    return f"{before}{mark}{who}{newline}{textwrap.indent(textwrap.dedent(lines), '  ')}"
