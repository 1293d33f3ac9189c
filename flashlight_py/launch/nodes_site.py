"""One launcher on each host: they meet at a path that all see, and tell each other of the end.

Node 0 makes a folder with a fresh name beside that path, and the launchers learn it when they
meet; so nothing that an earlier job has left can be mistaken for a word of this one. In it each
writes, for attempt k,

- ``failing-k-NODE`` as soon as it ends its ranks: the others then end theirs;
- ``interrupted-k-NODE`` before that, if it does so because of a signal: which;
- ``ended-k-NODE`` when they have ended: who failed;
- ``left-0-NODE`` as its last word.

With these in hand every launcher comes to the same decision by itself. One that is dead, or whose
host is, says nothing: each touches a file of its own as long as it lives.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashlight_py.launch.attempt import POLL_SECONDS, STAYING_SECONDS, Attempt, Team
from flashlight_py.launch.board import Board
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.interruption import interruptible
from flashlight_py.launch.local_site import start_here
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options
from flashlight_py.launch.plan import places

__all__ = ["NodesSite"]

# How long launchers wait for each other, in seconds: to meet, to tell of the end, to leave.
MEETING_SECONDS, TELLING_SECONDS, LEAVING_SECONDS = 300.0, 30.0, 5.0
# After so many seconds without a sign of life a launcher counts as dead. Long, because NFS may hide
# a sign for a minute, and a launcher whose terminal is paused shows none.
SILENT_SECONDS = 300.0


class NodesSite:
    """The ranks of all hosts, of which this launcher has those of ``options.node_rank``.

    Raises:
        RendezvousError: a launcher did not come in time, or two have one number.
        Interrupted: by a signal, before all have come.
    """

    def __init__(self, options: Options, stdin: int | None) -> None:
        self._node, self._options, self._stdin = options.node_rank, options, stdin
        with interruptible():
            told = self._meet()
        self.hosts = [each["host"] for each in told]
        self.counts = [each["ranks"] for each in told]
        self._board = Board(Path(told[0]["folder"]), self._node)
        self._counts, self._attempt = self.counts, 0

    def heard(self, counts: Sequence[int]) -> list[int]:
        """Return the ranks that this launcher starts."""
        return [place.rank for place in places(counts) if place.host == self._node]

    def start(self, loop: Loop, attempt: Attempt, counts: Sequence[int], restarts: int) -> Team:
        """Start the ranks of this host."""
        self._counts, self._attempt = list(counts), restarts
        attempt.poll = lambda: self._look_around(attempt)
        meeting = {"FLASHLIGHT_FILE": str(self._board.folder / f"meeting-{restarts}")}
        program, stdin = self._options.program, self._stdin
        return start_here(loop, attempt, program, counts, self._node, restarts, meeting, stdin)

    def conclude(self, loop: Loop, attempt: Attempt) -> None:
        """Report to the others how it ended here, and add to ``attempt`` how it did there."""
        self._tell_ending(attempt)
        self._tell("ended", {str(rank): failure for rank, failure in attempt.failures.items()})
        told = self._hear_all(loop, attempt)
        for number in self._told("interrupted").values():
            attempt.interrupted = attempt.interrupted or number
        for node in set(range(len(self.hosts))) - {self._node}:
            if node in told:
                _add(attempt, told[node])
            elif not attempt.interrupted:
                self._give_up(attempt, node)

    def close(self) -> None:
        """Leave the folder; node 0 removes it when all that live have, or after a few seconds."""
        self._board.tell("left", 0, {})
        if self._node != 0:
            return
        ends = time.monotonic() + LEAVING_SECONDS
        while len(self._lost()) < len(self.hosts) and time.monotonic() < ends:
            time.sleep(POLL_SECONDS / 5)  # a shared folder tells nobody when it changes
        self._board.remove()

    def _meet(self) -> list[dict[str, Any]]:
        from flashlight_py.distributed.rendezvous.file_store import FileStore

        path, name = Path(self._options.rdzv).absolute(), f"job-{secrets.token_hex(8)}"
        folder = path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")
        store = FileStore(path, self._node, self._options.nnodes, MEETING_SECONDS)
        mine = {"host": os.uname().nodename, "ranks": self._options.ranks, "folder": str(folder)}
        try:
            if self._node == 0:
                folder.mkdir(mode=0o700)
            told = store.exchange(json.dumps(mine).encode())
            store.close()
        except BaseException as error:
            if self._node == 0:
                shutil.rmtree(folder, ignore_errors=True)
            store.abort(str(error))
            raise
        return [json.loads(text) for text in told]

    def _look_around(self, attempt: Attempt) -> None:
        self._board.show_life()
        if attempt.is_ending:
            self._tell_ending(attempt)
        elif self._told("failing") or self._board.is_gone() or self._left() & self._working():
            attempt.end(signal.SIGTERM)

    def _hear_all(self, loop: Loop, attempt: Attempt) -> dict[int, Any]:
        """Wait for every node's word; not much longer than its ranks may need, once one fails."""
        ends, tell_at = math.inf, time.monotonic() + STAYING_SECONDS
        while True:
            self._board.show_life()
            self._tell_ending(attempt)
            lost, told = self._lost(), self._told("ended")
            missing = self._working() - told.keys()
            now = time.monotonic()
            if missing <= lost or now >= ends:
                return told
            if lost & missing or self._told("failing"):
                attempt.is_ending = True
                # They may need the grace twice: for the ranks, and for what these have left.
                ends = min(ends, now + 2 * self._options.grace + TELLING_SECONDS)
            if now >= tell_at:
                tell_at = math.inf
                nodes = ", ".join(map(str, sorted(missing)))
                attempt.say(f"waiting for the ranks of node {nodes}; Ctrl-C ends the job")
            loop.once(now + POLL_SECONDS)

    def _lost(self) -> set[int]:
        """Return the nodes of which nothing more will be heard; ask for it before ``_told``."""
        nodes = set(range(len(self.hosts)))
        if self._board.is_gone():  # node 0 has removed it
            return nodes
        longest = SILENT_SECONDS + 2 * self._options.grace
        return self._left() | {node for node in nodes if self._board.silence_of(node) > longest}

    def _working(self) -> set[int]:
        """Return the nodes that have ranks in this attempt."""
        return {node for node, count in enumerate(self._counts) if count}

    def _give_up(self, attempt: Attempt, node: int) -> None:
        """Count the ranks of a node that says nothing as lost."""
        silent = Failure(f"is lost: its launcher (node {node}) says nothing any more", time.time())
        for place in places(self._counts):
            if place.host == node:
                attempt.failures[place.rank] = silent

    def _told(self, kind: str) -> dict[int, Any]:
        return self._board.told(kind, self._attempt)

    def _tell(self, kind: str, value: Any) -> None:
        self._board.tell(kind, self._attempt, value)

    def _tell_ending(self, attempt: Attempt) -> None:
        if attempt.interrupted:
            self._tell("interrupted", attempt.interrupted)
        if attempt.is_ending:
            self._tell("failing", {})

    def _left(self) -> set[int]:
        """Return the nodes that have left, in whichever attempt."""
        return set(self._board.told("left", 0))


def _add(attempt: Attempt, told: dict[str, Any]) -> None:
    for rank, values in told.items():
        attempt.failures.setdefault(int(rank), Failure(*values))
