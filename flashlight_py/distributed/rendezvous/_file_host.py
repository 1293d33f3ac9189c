"""Rank 0 of a file rendezvous: announces the run, publishes each round, removes the files."""

from __future__ import annotations

import time
from collections.abc import Iterator

from flashlight_py.distributed.rendezvous._file_member import Member, decode, encode
from flashlight_py.distributed.rendezvous._peers import Peer, name_ranks
from flashlight_py.distributed.rendezvous._shared_directory import Name, Record, SharedDirectory
from flashlight_py.distributed.rendezvous.waiting import Waiting
from flashlight_py.errors import RendezvousError

__all__ = ["Host"]

# How long the reason of a failure stays where the others can read it, in seconds, at most.
_FAREWELL = 5.0
# How long ranks that have not come yet are told of it too, in seconds.
_LATECOMERS = 2.0


class Host(Member):
    """The rank that all others wait for."""

    def __init__(self, directory: SharedDirectory, rank: int, size: int, timeout: float) -> None:
        super().__init__(directory, rank, size, timeout)
        self._stale: set[str] = set()
        self._died: dict[int, Peer] = {}

    # Gathering --------------------------------------------------------------------------------

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        """Announce a run, wait for one join of every rank and publish the roster."""
        self._stale = {name.run for name in self.directory.names(fresh=True)}
        self.run = self.nonce
        self.directory.write(self.name("run"), self.me.as_record())
        waiting = self._waiting()
        for names in self.poll(deadline):
            self.join_announced(names, b"")
            joins = self._joins(names)
            absent = set(range(1, self.size)) - joins.keys()
            if not absent:
                return self._publish_members(joins, payload)
            waiting.look(absent)
        self.last_look()
        raise self.failure(self._not_joined(absent))

    def _waiting(self) -> Waiting:
        return Waiting(self.rank, f"rendezvous at {self.directory.path}")

    def _not_joined(self, missing: set[int]) -> str:
        died = [
            f"; rank {rank} ({self._died[rank]}) had come and died"
            for rank in sorted(missing & self._died.keys())
        ]
        return self.absent(missing) + "".join(died)

    def _joins(self, names: set[Name]) -> dict[int, Record]:
        """Return the join of each rank; one whose process has died since is not counted."""
        joins: dict[int, Record] = {}
        for name in self.of_run("join", names):
            record = self.directory.read(name)
            if record is None:
                continue
            rank, peer = int(name.rest[0]), Peer.from_record(record)
            self._check_size(rank, peer, record["size"])
            if peer.is_gone():
                self._died[rank] = peer
                continue
            self._check_unclaimed(rank, peer, joins.keys() | {0})
            joins[rank], self.people[rank] = {**record, "nonce": name.rest[1]}, peer
        return joins

    def _check_size(self, rank: int, peer: Peer, size: int) -> None:
        if size != self.size:
            raise self._disagreement(
                f"rank {rank} ({peer}) was started with world size {size}, "
                f"rank 0 ({self.me}) with {self.size}; give every rank the same world size"
            )

    def _check_unclaimed(self, rank: int, peer: Peer, claimed: set[int]) -> None:
        if rank in claimed:
            raise self._disagreement(
                f"two processes claim rank {rank}: {self.people[rank]} and {peer}; "
                "give every process a rank of its own, and every run a FILE_PATH of its own"
            )

    def _publish_members(self, joins: dict[int, Record], payload: bytes) -> list[bytes]:
        payloads = [encode(payload), *(joins[rank]["payload"] for rank in range(1, self.size))]
        people = [self.people[rank].as_record() for rank in range(self.size)]
        self.nonces = [self.nonce, *(joins[rank]["nonce"] for rank in range(1, self.size))]
        record = {"payloads": payloads, "nonces": self.nonces, "people": people}
        self.directory.write(self.name("roster", 0), record)
        return [decode(text) for text in payloads]

    # Later rounds -----------------------------------------------------------------------------

    def take_round(self, payload: bytes, deadline: float) -> list[bytes]:
        """Wait for the gift of every rank and publish them."""
        texts, waiting = {0: encode(payload)}, self._waiting()
        for names in self.poll(deadline):
            self._answer_strangers(names)
            absent = set(range(self.size)) - texts.keys()
            for rank in absent:
                record = self.read_listed(self.gift(rank), names)
                if record is not None:
                    texts[rank] = record["payload"]
            absent -= texts.keys()
            if not absent:
                return self._publish_round([texts[rank] for rank in range(self.size)])
            self.fail_if_dead(absent)
            waiting.look(absent)
        raise self.failure(self.absent(absent))

    def _publish_round(self, payloads: list[str]) -> list[bytes]:
        self.directory.write(self.name("roster", self.round), {"payloads": payloads})
        return [decode(text) for text in payloads]

    def _answer_strangers(self, names: set[Name]) -> None:
        """Deal with joins of processes that the roster does not hold.

        Until the vote is over nobody can know which of two processes is the right one.
        Afterwards the run stands, and a newcomer is told so.
        """
        for name in self.of_run("join", names):
            rank, nonce = int(name.rest[0]), name.rest[1]
            record = self.directory.read(name)
            if record is None or nonce in self.nonces:
                continue
            if not self.has_voted:
                self._check_unclaimed(rank, Peer.from_record(record), set(range(self.size)))
            refusal = self.name("refusal", nonce)
            if refusal not in names:
                self.directory.write(refusal, {"reason": self._under_way()})

    def _under_way(self) -> str:
        return (
            f"a run is under way at this path already (its rank 0: {self.me}); wait for its "
            "end, or give every run a FILE_PATH of its own"
        )

    def watch(self, names: set[Name]) -> None:
        """Fail with what another rank has failed with, or because our files have vanished."""
        reason = self.reported_failure(names)
        if reason is None and not self.has_voted:
            reason = self.refusal(names)
        if reason is None and self.has_vanished(names):
            reason = "somebody removed the files of this run; give every run its own FILE_PATH"
        if reason is not None:
            raise self.failure(reason)

    # The end ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Wait until everybody has left and remove the files."""
        self.withdraw()
        guests = set(self.nonces) - {self.nonce}
        lingering = self._await_departures(guests, self.poll(time.monotonic() + self.timeout))
        self._clean()
        if lingering:
            raise self.error(f"{name_ranks(lingering)} came and did not leave: died or stuck")

    def give_up(self, reason: str) -> None:
        """Publish the reason, leave the others time to read it, and remove the files."""
        if self.run:
            self._tell_failure(reason, set())

    def _disagreement(self, reason: str) -> RendezvousError:
        """Tell everybody that a join contradicts, and return the error to raise.

        Ranks are started together: one that comes a moment later ought not to wait in vain.
        """
        self._tell_failure(reason, set(range(1, self.size)))
        return self.error(reason)

    def _tell_failure(self, reason: str, expected: set[int]) -> None:
        """Tell the ranks that have joined, and those of the ``expected`` who do so soon."""
        deadline = time.monotonic() + min(_FAREWELL, self.timeout)
        guests = self._guests(self.directory.names(fresh=True))
        error = {"reason": reason, "to": sorted(guests)}
        self.directory.write(self.own_name("error", self.run), error)
        for names in self.listings(min(deadline, time.monotonic() + _LATECOMERS)):
            if not expected - set(guests.values()):
                break
            for nonce in self._guests(names).keys() - guests.keys():
                self.directory.write(self.name("refusal", nonce), {"reason": reason})
            guests |= self._guests(names)
        self._await_departures(set(guests), self.listings(deadline))
        self._clean()

    def _guests(self, names: set[Name]) -> dict[str, int]:
        """Return the nonce and rank of every join to this run but a rival rank 0's."""
        ranks = {name.rest[1]: int(name.rest[0]) for name in self.of_run("join", names)}
        return {nonce: rank for nonce, rank in ranks.items() if rank > 0}

    def _await_departures(self, nonces: set[str], listings: Iterator[set[Name]]) -> set[int]:
        """Wait until each joined process of ``nonces`` has left, failed or died.

        Returns the ranks of those that did not leave. One is believed dead at the second look,
        since it may have written its last file after the first listing.
        """
        feared: list[Name] = []
        lingering: list[Name] = []
        for names in listings:
            left = {n.rest[1] for kind in ("done", "error") for n in self.of_run(kind, names)}
            lingering = [n for n in self.of_run("join", names) if n.rest[1] in nonces - left]
            if not lingering or lingering == feared:
                break
            feared = lingering if all(self.joiner(join).is_gone() for join in lingering) else []
        return {int(name.rest[0]) for name in lingering}

    def _clean(self) -> None:
        """Remove the files of this run and of those that were dead before it.

        Whether a run announced on another host lives cannot be known. A living one would have
        answered our join, unless it was between two exchanges; then it will say that its files
        have vanished.
        """
        names = self.directory.names(fresh=True)
        rivals = {name.rest[1] for name in self.of_run("join", names) if name.rest[0] == "0"}
        dead = {run for run in self._stale - rivals if not self._is_elsewhere_alive(run)}
        mine = [name for name in names if name.run in dead | {self.run}]
        # Announcements go first: nobody joins what is about to vanish.
        for name in sorted(mine, key=lambda name: name.kind != "run"):
            self.directory.remove(name)

    def _is_elsewhere_alive(self, run: str) -> bool:
        peer = self.announcer(run)
        is_ours = peer.machine == self.me.machine and peer.pid == self.me.pid
        return peer.is_known_alive() and not is_ours
