"""What every rank of a file rendezvous does: watch the directory, join, vote, fail aloud."""

from __future__ import annotations

import abc
import base64
import time
from collections.abc import Iterable, Iterator

from flashlight_py.distributed.rendezvous._peers import (
    Peer,
    have_not_come,
    this_process,
)
from flashlight_py.distributed.rendezvous._shared_directory import Name, Record, SharedDirectory
from flashlight_py.errors import RendezvousError

__all__ = ["Member", "decode", "encode"]

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.1
# From this pause on a listing is made fresh; earlier that would cost more than the pause.
_FRESH_PAUSE = 0.01
_VOTE = 1


class Member(abc.ABC):
    """One rank's part in the protocol that ``file_store`` describes.

    ``run`` is empty until a rank knows which run it follows. ``round`` is 0 while the ranks
    gather, 1 during the vote, and counts the exchanges after that. ``nonces`` is empty until the
    roster is known.
    """

    def __init__(self, directory: SharedDirectory, rank: int, size: int, timeout: float) -> None:
        self.directory, self.rank, self.size, self.timeout = directory, rank, size, timeout
        self.nonce = directory.nonce
        self.me = this_process()
        self.run = ""
        self.round = 0
        self.people: dict[int, Peer] = {rank: self.me}
        self.nonces: list[str] = []
        self.joined: set[str] = set()
        self._feared_dead: set[int] = set()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Take part in one exchange, before the first one in the gathering and the vote."""
        deadline = time.monotonic() + self.timeout
        if self.round > 0:
            return self._next_round(payload, deadline)
        payloads = self.gather(payload, deadline)
        self.round = _VOTE
        self._next_round(b"", deadline)
        return payloads

    @property
    def has_voted(self) -> bool:
        return self.round > _VOTE

    @abc.abstractmethod
    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        """Find the others and return everybody's payload."""

    @abc.abstractmethod
    def take_round(self, payload: bytes, deadline: float) -> list[bytes]:
        """Return everybody's payload of the current round."""

    @abc.abstractmethod
    def leave(self) -> None:
        """End well."""

    @abc.abstractmethod
    def give_up(self, reason: str) -> None:
        """Tell everybody who can be told that this rank fails because of ``reason``."""

    @abc.abstractmethod
    def watch(self, names: set[Name]) -> None:
        """Look for what ends or disturbs the wait, at every listing."""

    def _next_round(self, payload: bytes, deadline: float) -> list[bytes]:
        payloads = self.take_round(payload, deadline)
        self.round += 1
        return payloads

    # Files ------------------------------------------------------------------------------------

    def name(self, kind: str, *rest: object) -> Name:
        """Return the name of a file of this run."""
        return Name(kind, self.run, tuple(map(str, rest)))

    def own_name(self, kind: str, run: str) -> Name:
        return Name(kind, run, (str(self.rank), self.nonce))

    def gift(self, rank: int) -> Name:
        return self.name("gift", self.round, rank)

    def of_run(self, kind: str, names: Iterable[Name]) -> list[Name]:
        """Return the names of ``kind`` and of this run, sorted."""
        return sorted(name for name in names if name.kind == kind and name.run == self.run)

    def read_listed(self, name: Name, names: set[Name]) -> Record | None:
        return self.directory.read(name) if name in names else None

    def announcer(self, run: str) -> Peer:
        """Return who announced ``run``; a peer of unknown fate where its file cannot tell."""
        return Peer.from_record(self.directory.read(Name("run", run)) or {})

    def joiner(self, join: Name) -> Peer:
        """Return whose join this is; a peer of unknown fate where the file cannot tell."""
        return Peer.from_record(self.directory.read(join) or {})

    # Waiting ----------------------------------------------------------------------------------

    def listings(self, deadline: float) -> Iterator[set[Name]]:
        """Yield what is in the directory, again and again until the deadline and once at it.

        The pause grows from 2 ms to 100 ms, so that ranks started together meet at once and a
        long wait costs a file server ten requests a second.
        """
        pause = _FIRST_PAUSE
        while True:
            yield self.directory.names(fresh=pause > _FRESH_PAUSE)
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def poll(self, deadline: float) -> Iterator[set[Name]]:
        """Yield listings, each after a look at what might end the wait."""
        for names in self.listings(deadline):
            self.watch(names)
            yield names

    def last_look(self) -> set[Name]:
        """Return a listing made after the deadline.

        A rank whose time was up a moment before ours has said why before it ended.
        """
        names = self.directory.names(fresh=True)
        self.watch(names)
        return names

    def fail_if_dead(self, awaited: Iterable[int]) -> None:
        """Raise if a rank that we wait for is known to have died.

        It may have written its file between our listing and its end, so the first sight of a
        dead process only makes us list once more.
        """
        dead = {rank for rank in awaited if rank in self.people and self.people[rank].is_gone()}
        for rank in sorted(dead & self._feared_dead):
            raise self.failure(f"rank {rank} of {self.size} ({self.people[rank]}) has died")
        self._feared_dead = dead

    # Joining ----------------------------------------------------------------------------------

    def join_announced(self, names: set[Name], payload: bytes) -> None:
        """Join every announced run that is not our own and not known to be dead."""
        runs = {name.run for name in names if name.kind == "run"} - self.joined - {self.run}
        for run in sorted(run for run in runs if not self.announcer(run).is_gone()):
            self._remove_dead_predecessors(run, names)
            record = {**self.me.as_record(), "size": self.size, "payload": encode(payload)}
            self.directory.write(self.own_name("join", run), record)
            self.joined.add(run)

    def _remove_dead_predecessors(self, run: str, names: set[Name]) -> None:
        """Clear the way for a rank that died while it waited and was started again."""
        for name in names:
            is_of_rank = name.kind == "join" and name.run == run and name.rest[0] == str(self.rank)
            if is_of_rank and self.joiner(name).is_gone():
                self.directory.remove(name)

    def refusal(self, names: set[Name]) -> str | None:
        """Return why a complete run turns this process away, if one does."""
        for run in sorted(self.joined):
            record = self.read_listed(Name("refusal", run, (self.nonce,)), names)
            if record is not None:
                return str(record["reason"])
        return None

    def withdraw(self) -> None:
        """Take our joins back from the runs that we do not follow."""
        for run in self.joined - {self.run}:
            self.directory.remove(self.own_name("join", run))

    # Failing ----------------------------------------------------------------------------------

    def absent(self, ranks: Iterable[int]) -> str:
        """Return the sentence that ``ranks`` are missing, with what may explain it."""
        sentence = have_not_come(ranks, self.size, self.timeout)
        if self.directory.ignored:
            passed_over = "; ".join(f"{n} {why}" for n, why in self.directory.ignored.items())
            sentence += f" (files passed over: {passed_over})"
        return f"{sentence}; start every rank with the same FILE_PATH and world size"

    def failure(self, reason: str) -> RendezvousError:
        """Notify the others and return the error to raise."""
        self.give_up(reason)
        return self.error(reason)

    def reported_failure(self, names: set[Name]) -> str | None:
        """Return what a rank of this run has failed with, if one has.

        Once the members are known, a stranger who claimed a taken rank no longer counts.
        """
        for name in self.of_run("error", names):
            record = self.directory.read(name)
            is_member = not self.nonces or name.rest[1] in self.nonces
            if record is not None and is_member:
                return str(record["reason"])
        return None

    def has_vanished(self, names: set[Name]) -> bool:
        """Return whether the announcement of our run was removed."""
        announcement = self.name("run")
        return announcement not in names and not self.directory.exists(announcement)

    def error(self, reason: str) -> RendezvousError:
        where = f"rendezvous at {self.directory.path}, rank {self.rank} of {self.size}"
        return RendezvousError(f"{where}: {reason}")


def encode(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def decode(text: str) -> bytes:
    return base64.b64decode(text)
