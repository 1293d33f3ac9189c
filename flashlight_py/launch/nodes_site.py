"""One launcher on each host: they meet at a path that all see, and tell each other of the end.

Node 0 makes a folder with a fresh name beside that path, and the launchers learn it when they
meet; so nothing that an earlier job has left can be mistaken for a word of this one. In it each
writes, for attempt k,

- ``failing-k-NODE`` as soon as it ends its ranks: the others then end theirs;
- ``ended-k-NODE`` when they have ended: who failed, and whether somebody has interrupted.

With all of these in hand every launcher comes to the same decision by itself.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashlight_py.launch.attempt import POLL_SECONDS, Attempt, Team
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.local_site import start_here
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options
from flashlight_py.launch.plan import places

__all__ = ["NodesSite"]

# How long launchers wait for each other, in seconds: to meet, to tell of the end, to leave.
MEETING_SECONDS, TELLING_SECONDS, LEAVING_SECONDS = 300.0, 30.0, 5.0


class NodesSite:
    """The ranks of all hosts, of which this launcher has those of ``options.node_rank``.

    Raises:
        RendezvousError: a launcher did not come in time, or two have one number.
    """

    def __init__(self, options: Options, stdin: int | None) -> None:
        self._node, self._options, self._stdin = options.node_rank, options, stdin
        told = self._meet()
        self.hosts = [each["host"] for each in told]
        self.counts = [each["ranks"] for each in told]
        self._folder = Path(told[0]["folder"])
        self._counts, self._attempt = self.counts, 0

    def heard(self, counts: Sequence[int]) -> list[int]:
        """Return the ranks that this launcher starts."""
        return [place.rank for place in places(counts) if place.host == self._node]

    def start(self, loop: Loop, attempt: Attempt, counts: Sequence[int], restarts: int) -> Team:
        """Start the ranks of this host."""
        self._counts, self._attempt = list(counts), restarts
        attempt.poll = lambda: self._look_around(attempt)
        meeting = {"FLASHLIGHT_FILE": str(self._folder / f"meeting-{restarts}")}
        program, stdin = self._options.program, self._stdin
        return start_here(loop, attempt, program, counts, self._node, restarts, meeting, stdin)

    def conclude(self, loop: Loop, attempt: Attempt) -> None:
        """Tell the others how it ended here, and add to ``attempt`` how it did there."""
        failures = {str(rank): failure for rank, failure in attempt.failures.items()}
        self._tell("ended", {"failures": failures, "interrupted": attempt.interrupted})
        if attempt.is_ending:
            self._tell("failing", {})
        told = self._hear_all(loop, attempt)
        for node in range(len(self.hosts)):
            if node in told:
                _add(attempt, told[node])
            elif not attempt.interrupted:
                self._give_up(attempt, node)

    def close(self) -> None:
        """Leave the folder; node 0 removes it when all have, or after a few seconds."""
        self._tell("left", {})
        ends = time.monotonic() + LEAVING_SECONDS
        while self._node == 0 and time.monotonic() < ends:
            if len(list(self._folder.glob(f"left-{self._attempt}-*"))) == len(self.hosts):
                break
            time.sleep(POLL_SECONDS / 5)  # a shared folder tells nobody when it changes
        if self._node == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _meet(self) -> list[dict[str, Any]]:
        from flashlight_py.distributed.rendezvous.file_store import FileStore

        path, name = Path(self._options.rdzv).absolute(), f"job-{secrets.token_hex(8)}"
        folder = path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")
        store = FileStore(path, self._node, self._options.nnodes, MEETING_SECONDS)
        if self._node == 0:
            folder.mkdir(mode=0o700)
        mine = {"host": os.uname().nodename, "ranks": self._options.ranks, "folder": str(folder)}
        told = store.exchange(json.dumps(mine).encode())
        store.close()
        return [json.loads(text) for text in told]

    def _look_around(self, attempt: Attempt) -> None:
        if attempt.is_ending:
            self._tell("failing", {})
        elif self._others_are_failing():
            attempt.end(signal.SIGTERM)

    def _others_are_failing(self) -> bool:
        return any(self._folder.glob(f"failing-{self._attempt}-*"))

    def _hear_all(self, loop: Loop, attempt: Attempt) -> dict[int, Any]:
        """Wait for every node's word; not much longer than its ranks may need, once one fails."""
        told: dict[int, Any] = {}
        ends = float("inf")
        while True:
            for node in set(range(len(self.hosts))) - told.keys():
                file = self._file("ended", node)
                if file.exists():
                    told[node] = json.loads(file.read_text())
            now = time.monotonic()
            if len(told) == len(self.hosts) or now >= ends:
                return told
            if ends == float("inf") and (self._others_are_failing() or attempt.interrupted):
                self._tell("failing", {})
                ends = now + self._options.grace + TELLING_SECONDS
            loop.once(now + POLL_SECONDS)

    def _give_up(self, attempt: Attempt, node: int) -> None:
        """Count the ranks of a node that says nothing as lost."""
        silent = Failure(f"is lost: its launcher (node {node}) says nothing any more", time.time())
        for place in places(self._counts):
            if place.host == node:
                attempt.failures[place.rank] = silent

    def _file(self, kind: str, node: int) -> Path:
        return self._folder / f"{kind}-{self._attempt}-{node}"

    def _tell(self, kind: str, value: Any) -> None:
        file = self._file(kind, self._node)
        if not file.exists() and self._folder.is_dir():
            hidden = file.with_name(f".{file.name}")
            hidden.write_text(json.dumps(value))
            hidden.rename(file)  # it appears whole


def _add(attempt: Attempt, told: dict[str, Any]) -> None:
    attempt.interrupted = attempt.interrupted or told["interrupted"]
    for rank, values in told["failures"].items():
        attempt.failures.setdefault(int(rank), Failure(*values))
