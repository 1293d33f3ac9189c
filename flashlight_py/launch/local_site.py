"""Ranks of this host, as one site of a job: all of them, or those of one of several launchers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from flashlight_py.launch.attempt import Attempt, Team
from flashlight_py.launch.environs import environ_of
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.plan import places
from flashlight_py.launch.ranks import Ranks

__all__ = ["LocalSite", "start_here"]


def start_here(
    loop: Loop,
    attempt: Attempt,
    program: Sequence[str],
    counts: Sequence[int],
    here: int,
    restarts: int,
    meeting: Mapping[str, str],
    stdin: int | None,
) -> Ranks:
    """Start the ranks of host number ``here``, where ``counts`` are those of all hosts.

    ``stdin`` is the standard input of rank 0.

    Raises:
        OSError: the program cannot be started.
    """
    ranks = Ranks(loop, attempt.hear_output, attempt.hear_end)
    for place in places(counts):
        if place.host == here:
            environ = environ_of(os.environ, place, sum(counts), restarts, meeting)
            ranks.start(place.rank, program, environ, stdin if place.rank == 0 else None)
    return ranks


class LocalSite:
    """All ranks of a job are on this host; they meet at a path in ``folder``."""

    def __init__(self, program: Sequence[str], ranks: int, folder: str, stdin: int | None) -> None:
        self.hosts = [os.uname().nodename]
        self.counts = [ranks]
        self._program, self._folder, self._stdin = program, folder, stdin

    def heard(self, counts: Sequence[int]) -> range:
        """Return the ranks whose ends are heard here: all."""
        return range(sum(counts))

    def start(self, loop: Loop, attempt: Attempt, counts: Sequence[int], restarts: int) -> Team:
        """Start all ranks."""
        meeting = {"FLASHLIGHT_FILE": os.path.join(self._folder, f"meeting-{restarts}")}
        return start_here(loop, attempt, self._program, counts, 0, restarts, meeting, self._stdin)

    def conclude(self, loop: Loop, attempt: Attempt) -> None:
        """Nobody else has anything to tell."""

    def close(self) -> None:
        """There is nothing to let go of."""
