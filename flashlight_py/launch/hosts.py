"""The hosts of a job. Each has an agent, here or elsewhere, that runs its ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from flashlight_py import system
from flashlight_py.launch.agent import Agent
from flashlight_py.launch.branches import FAN, MOST_LINKS, TREE_FROM, Branches
from flashlight_py.launch.channel import message, parsed
from flashlight_py.launch.loop import Loop

_MOVED = "has lost its way to the launcher"


class StartError(Exception):
    """A command cannot be run; says which and why."""


class Hosts:
    """The hosts of a job, by number: ``names``, how many ranks each takes, and ways to the agents.

    ``local`` is the agent of host 0, this one, if there is one. ``here`` are those whose agents are
    there, ``lost`` those that are not any more, and why; ``since`` is when each was last here.
    ``on_message`` is called with what an agent reports, ``on_lost`` with what has become of a host
    that is gone, ``on_cut`` with what has become of the way to some: their ranks have ended, but
    they may come again.

    Those that come by themselves, for which they may take ``patience`` seconds, are launchers: they
    have users before them, to whom they show what the ranks print, and who may send SIGUSR1; and
    make the ranks' secret themselves, so that this need not be sent. ``environ`` is added to what
    ranks inherit on their hosts.
    """

    environ: Mapping[str, str] = {}

    def __init__(
        self,
        loop: Loop,
        named: Sequence[tuple[str, int]],
        lost_after: float,
        local: Agent | None = None,
        patience: float = 0.0,
    ) -> None:
        self.patience, self.are_launchers = patience, patience > 0.0
        self.names = [name for name, _ in named]
        self.slots = [slots for _, slots in named]
        self.here, self.lost = {0} if local else set[int](), dict[int, str]()
        self.since = dict.fromkeys(range(len(named)), system.monotonic())
        self.on_message: Callable[[int, str, list[Any]], None]
        self.on_lost: Callable[[int, str], None]
        self.on_cut: Callable[[Collection[int], str], None]
        self.branches = Branches(loop, lost_after)
        self.branches.on_lines, self.branches.on_lost = self._on_lines, self._gone
        self._local = local
        if local:
            local.report = lambda kind, *values: self.on_message(0, kind, list(values))

    def open(self, numbers: Sequence[int]) -> None:
        """Reach agents that are not here; they will be ``here`` or lost.

        Raises:
            StartError: the command that does it cannot be run.
        """
        for number in numbers:
            if number in self.lost:
                self.on_lost(number, self.lost[number])

    def send(self, number: int, kind: str, *values: Any) -> None:
        """Send a message to an agent: one elsewhere gets it later, the local one acts at once."""
        if number == 0 and self._local:
            getattr(self._local, kind)(*values)
        else:
            self.branches.put(number, message(kind, *values))

    def send_all(self, kind: str, *values: Any) -> None:
        """Send a message to all agents, the local one last."""
        self.branches.broadcast(message(kind, *values))
        if self._local:
            getattr(self._local, kind)(*values)

    def drop(self, numbers: Collection[int], seconds: float) -> None:
        """Talk no more to agents that have not answered for so long."""
        for number in numbers:
            self.send(number, "leave", 1)
            self._gone(number, f"its agent has not answered for {seconds:.3g} s", [number])

    def leave(self, code: int) -> None:
        """End what is left here, and let all agents go."""
        self.branches.is_leaving = True
        self.branches.broadcast(message("leave", code))
        if self._local:
            self._local.finish(self._local.grace)
        self.branches.wait_and_close()

    def _on_lines(self, lines: list[tuple[int, bytes]]) -> None:
        for number, line in lines:
            kind, values = parsed(line)
            if kind == "here":
                if number in self.here:
                    self.on_cut([number], _MOVED)
                self.here.add(number)
                self.lost.pop(number, None)
            if kind == "lost":
                self._gone(*values)
            elif kind == "unreached":
                self._on_unreached(number, *values)
            elif number in self.here:
                self.on_message(number, kind, values)

    def _on_unreached(self, by: int, number: int, how: str) -> None:
        """An agent cannot reach ``number``."""

    def _gone(self, number: int, how: str, gone: Collection[int], has_come: bool = True) -> None:
        """Note that no way leads to hosts any more; ``number``, if it is one of them, is lost."""
        self.here.difference_update(gone)
        self.since.update(dict.fromkeys(gone, system.monotonic()))
        why = _MOVED
        if number in gone:
            self.lost[number] = f"is lost: {how}"
            self.on_lost(number, self.lost[number])
            why = f"cannot be reached: host {self.names[number]}, on the way there, is lost"
        if cut := [each for each in gone if each != number]:
            self.on_cut(cut, why)


class SshHosts(Hosts):
    """Hosts on which agents are started by ``ssh``."""

    def __init__(
        self,
        loop: Loop,
        named: Sequence[tuple[str, int]],
        lost_after: float,
        ssh: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(loop, named, lost_after)
        self._ssh, self.environ, self._why = ssh, environ, ""
        self._under_way: set[int] = set()

    def open(self, numbers: Sequence[int]) -> None:
        new = [number for number in numbers if number not in self._under_way]
        self._under_way.update(new)
        links, most = len(self.branches.links), len(new)
        if links + most > TREE_FROM:
            most = max(1, min(FAN, MOST_LINKS - links))
        hosts = [(number, self.names[number]) for number in new]
        self.branches.reach(hosts, self._ssh, FAN, most)
        if not self.branches.links:
            raise StartError(self._why)

    def _on_lines(self, lines: list[tuple[int, bytes]]) -> None:
        self._under_way.difference_update(number for number, _ in lines)
        super()._on_lines(lines)

    def _gone(self, number: int, how: str, gone: Collection[int], has_come: bool = True) -> None:
        self._under_way.difference_update(gone)
        self._why = how
        super()._gone(number, how, gone)

    def _on_unreached(self, by: int, number: int, how: str) -> None:
        if number in self.here or number in self.branches.links:
            return
        words = f"host {self.names[by]} cannot reach host {self.names[number]} ({how})"
        if len(self.branches.links) < MOST_LINKS:
            self.on_message(by, "warning", [f"{words}; it is reached from here"])
            self.branches.reach([(number, self.names[number])], self._ssh, FAN)
        else:
            most = f"this one has {MOST_LINKS} connections already"
            self._gone(number, f"{words}, and {most}", [number])
