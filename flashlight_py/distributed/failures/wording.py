"""How errors speak of ranks: which they are, what they called, whom nobody can reach any more."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from flashlight_py.distributed.calls.call import SHUTDOWN
from flashlight_py.distributed.rendezvous.store import MOST_RANKS, name_ranks

names = name_ranks
UNUSABLE = "This group cannot be used again"
NOTHING_CHANGED = "Nothing was changed"
EARLIER_ADVICE = (
    "A rank had returned from it before the others called, so that it is told now, and this call "
    "did nothing (with FLASHLIGHT_CHECKS=sync each call waits for all ranks)"
)
PEER_ADVICE = "It died, exited or closed its connection: look at its own output"
END_ADVICE = (
    "Let all ranks make as many calls: drop_last=True of DistributedSampler gives them equally "
    "many batches, and with fl.join() the numbers may differ"
)
LEAVING_ADVICE = "Let it begin the message before it shuts down, or do not wait for it"
HOST_ADVICE = (
    "Look at that host and at the network; hosts that may be silent for longer, as one in a "
    "debugger, get params={'HOST_TIMEOUT': seconds} of distributed_init (0: no limit)"
)


def who_that_was(ranks: Sequence[int], processes: Sequence[str]) -> str:
    """Complete a sentence about ``ranks`` with their processes, as far as these are known."""
    known = [processes[rank] for rank in ranks if rank < len(processes)]
    named, more = ", ".join(known[:MOST_RANKS]), len(known) - MOST_RANKS
    named += f" and {more} more" if more > 0 else ""
    return f", which {'are' if len(known) > 1 else 'is'} {named}" if known else ""


def different_calls(
    where: str, calls: Iterable[tuple[int, str]], number: int, ago: int = 0, which: str = ""
) -> str:
    """Say what the ranks called in ``which``, ``ago`` calls before call ``number`` of a group."""
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
        f"{where}: the ranks called different things in {which}: {called}. {outcome}; make every "
        "rank call the same"
    )


def did_not_join(where: str, who: str, limit: str, detail: str, those: str, last: str = "") -> str:
    """Say that ``who`` did not join within ``limit``; ``those``: which processes they are."""
    return (
        f"{where}: {who} within {limit} ({detail}){those}. {last}It is stuck, slow, or called "
        "something else; a longer timeout is params={'TIMEOUT': seconds} of distributed_init, or "
        f"timeout=seconds of new_group. {UNUSABLE}"
    )


def raised(who: str, those: str, traceback: str) -> str:
    """Say that the program of ``who`` has raised: the first line of ``traceback`` is what."""
    summary, _, lines = traceback.partition("\n")
    return f"lost {who}{those}: it raised {summary}. {UNUSABLE}\n\nThe traceback of {who}:\n{lines}"


def indented_traceback(words: str) -> str:
    """Return ``words`` with another rank's traceback indented, so that launchers ignore it."""
    before, mark, rest = words.partition("\n\nThe traceback of ")
    who, newline, lines = rest.partition("\n")
    return f"{before}{mark}{who}{newline}{textwrap.indent(textwrap.dedent(lines), '  ')}"
