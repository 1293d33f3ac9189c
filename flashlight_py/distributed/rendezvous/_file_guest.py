"""A rank other than 0 in a file rendezvous: joins what is announced, follows what answers."""

from __future__ import annotations

from flashlight_py.distributed.rendezvous._file_member import Member, decode, encode
from flashlight_py.distributed.rendezvous._peers import Peer
from flashlight_py.distributed.rendezvous._shared_directory import Name, Record

__all__ = ["Guest"]


class Guest(Member):
    """A rank that waits for rank 0."""

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        """Join every announcement and follow the first roster that counts this process."""
        for names in self.poll(deadline):
            self.join_announced(names, payload)
            for run in sorted(self.joined):
                record = self.read_listed(Name("roster", run, ("0",)), names)
                if record is not None and self.nonce in record.get("nonces", []):
                    return self._follow(run, record)
        # Whoever ended in order wrote so before: so first who has ended, then what is written.
        ended = {name for name in names if name.kind == "join" and self.joiner(name).is_gone()}
        raise self.failure(self._nobody(self.last_look(), ended))

    def _follow(self, run: str, record: Record) -> list[bytes]:
        self.run, self.nonces = run, record["nonces"]
        self.people = {rank: Peer.from_record(peer) for rank, peer in enumerate(record["people"])}
        return [decode(text) for text in record["payloads"]]

    def _nobody(self, names: set[Name], ended: set[Name]) -> str:
        """Say who is missing, as far as a rank can tell that no roster has reached."""
        hosts = [self.announcer(run) for run in sorted(self.joined)]
        who = "; ".join(str(host) for host in hosts if not host.is_gone())
        if not who:
            return self.absent({0})
        missing = set(range(1, self.size)) - {self.rank} - self._come(names, ended)
        if missing:
            return self.absent(missing)
        return f"rank 0 ({who}) announced a run and has not answered within {self.timeout:g} s"

    def _come(self, names: set[Name], ended: set[Name]) -> set[int]:
        """Return the ranks that have joined and did not die; to give up in order is not to die."""
        parted = {name.rest[1] for name in names if name.kind in ("error", "done")}
        joins = {name for name in names if name.kind == "join" and name.run in self.joined}
        return {int(join.rest[0]) for join in joins if join.rest[1] in parted or join not in ended}

    def take_round(self, payload: bytes, deadline: float) -> list[bytes]:
        """Give ``payload`` and wait for what rank 0 publishes."""
        self.directory.write(self.gift(self.rank), {"payload": encode(payload)})
        for names in self.poll(deadline):
            record = self.read_listed(self.name("roster", self.round), names)
            if record is not None:
                return [decode(text) for text in record["payloads"]]
            absent = {rank for rank in range(1, self.size) if self.gift(rank) not in names}
            self.fail_if_dead(absent | {0})
        raise self.failure(self.absent(absent or {0}))

    def watch(self, names: set[Name]) -> None:
        """Raise what another rank has failed with, or because rank 0 has given up."""
        reason = self._run_failure(names) if self.run else self._announced_failure(names)
        if reason is not None:
            # Passed on, since another run that we have joined would take our end for a death.
            raise self.failure(reason)

    def _run_failure(self, names: set[Name]) -> str | None:
        reason = self.reported_failure(names)
        if reason is None and self.has_vanished(names):
            return "rank 0 has given up this run, or somebody removed its files"
        return reason

    def _announced_failure(self, names: set[Name]) -> str | None:
        """Return what a rank 0 whose run we joined has to tell this very process."""
        for name in sorted(names):
            if name.kind == "error" and name.run in self.joined and name.rest[0] == "0":
                record = self.directory.read(name)
                if record is not None and self.nonce in record["to"]:
                    return str(record["reason"])
        return self.refusal(names)

    def leave(self) -> None:
        """Tell rank 0 that this rank needs the files no longer."""
        self.withdraw()
        self.directory.write(self.own_name("done", self.run), {})

    def give_up(self, reason: str) -> None:
        """Tell the ranks of every run that may wait for us; nobody reads it in a dead one."""
        if not self.run:
            self.joined |= {name.run for name in self.directory.names(True) if name.kind == "run"}
        for run in sorted(self.joined):
            if self.announcer(run).is_gone():
                self.directory.remove(self.own_name("join", run))
            elif self.directory.exists(Name("run", run)):
                error = {"reason": reason, "to": []}
                self.directory.write(self.own_name("error", run), error)
