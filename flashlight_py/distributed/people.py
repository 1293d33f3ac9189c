"""Who the ranks of a group are to a person who looks for them: a process on a host."""

from __future__ import annotations

import json
import os
import socket
import textwrap
from collections.abc import Iterable, Sequence

from flashlight_py.distributed.memory_file import process_space
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import UnavailableEverywhereError

__all__ = ["indented_traceback", "introduce", "names", "who_that_was"]


def introduce(store: Store, checks: bool) -> None:
    """Let the ranks of ``store`` know each other's host and process. Collective, blocking.

    Raises:
        UnavailableEverywhereError: ranks differ in ``checks``, whether to compare their calls.
    """
    mine = [f"process {os.getpid()} on {socket.gethostname()}", process_space(), checks]
    cards = [json.loads(card) for card in store.exchange(json.dumps(mine).encode())]
    without = [rank for rank, (_, _, checked) in enumerate(cards) if not checked]
    if 0 < len(without) < store.size:
        raise UnavailableEverywhereError(
            f"rank {store.rank} of {store.size}: FLASHLIGHT_CHECKS is 0 on {names(without)}, and "
            "not on the others; set it on all ranks, or on none"
        )
    store.people = [str(who) for who, _, _ in cards]
    store.spaces = [str(space) for _, space, _ in cards]


def names(ranks: Iterable[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    texts = [str(rank) for rank in ranks]
    return f"rank{'s' if len(texts) > 1 else ''} {', '.join(texts)}"


def who_that_was(ranks: Sequence[int], people: Sequence[str]) -> str:
    """Complete a sentence about ``ranks``: which processes they were, if that is known.

    Example:
        >>> who_that_was([1], ["process 7 on a", "process 8 on a"])
        ', which is process 8 on a'
    """
    known = [people[rank] for rank in ranks if rank < len(people)]
    return f", which {'are' if len(known) > 1 else 'is'} {', '.join(known)}" if known else ""


def indented_traceback(words: str) -> str:
    """Return ``words`` with the traceback of another rank, if one is in them, indented.

    Whoever reads what this process prints, as the launcher does, takes it for no error of this one.
    """
    before, mark, rest = words.partition("\n\nThe traceback of ")
    who, newline, lines = rest.partition("\n")
    return f"{before}{mark}{who}{newline}{textwrap.indent(textwrap.dedent(lines), '  ')}"
