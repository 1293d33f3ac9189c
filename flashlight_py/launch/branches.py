"""The tree of hosts: connections to the agents right below, and which of them leads to whom.

The launcher has one, and so has every agent. Few hosts are all right below the launcher. Of many it
reaches some, which reach others, so that no process has more than some dozens of connections.
A message to or from another agent than the neighbour has that one's number before it, or, on its
way down, ``*``: for who gets it and all below. So it is passed on without being read. The ways are
learned from ``here``, which comes up first, and says how many places an agent has had, and each
above it: the greater of two lists is the newer way. Messages that still come by the other one are
dropped, and nobody is lost who has another one.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from socket import IPPROTO_TCP, TCP_USER_TIMEOUT
from subprocess import PIPE

from flashlight_py import system
from flashlight_py.launch.channel import Outgoing, Reader, addressed, message, parsed
from flashlight_py.launch.failures import describe_exit
from flashlight_py.launch.loop import BEAT_SECONDS, Loop, Pulse

# From so many hosts on a tree takes over, in which ssh starts at most so many agents from one host.
TREE_FROM, FAN = 48, 16
# A process has at most so many connections to agents.
MOST_LINKS = 64
# So long agents may take to leave, in seconds.
LEAVING_SECONDS = 10.0
# In place of the number of an agent that is not lost, but looks for another place.
MOVING = -1
_HERE, _LOST, _MOVES = b'["here",', b'["lost",', b'["moves"'


class Link:
    """A connection to the agent of host ``node``, right below.

    It is lost once nothing has come from there for as long as ``branches`` allow.
    """

    part: Sequence[tuple[int, str]] = ()  # hosts that are to be reached from there
    moves = False  # it looks for another place, or may do so

    def __init__(self, branches: Branches, node: int) -> None:
        self.node, self.has_heard = node, False
        self._branches, self._is_open = branches, False

    def put(self, line: bytes) -> None:
        """Send ``line``; does not block, nothing happens if nobody is there any more."""
        self._outgoing.put(line)

    def close(self) -> None:
        """Close the connection; processes that are still there end by it. May be called again."""
        if self._is_open:
            self._is_open = False
            self.pulse.stop()
            self._outgoing.close()
            self._branches.loop.forget(self._reading)

    def _connect(self, reading: int, writing: int, is_there: bool) -> None:
        self._is_open, loop = True, self._branches.loop
        self._reading, self._reader = reading, Reader(reading, self._heard)
        self._outgoing = Outgoing(loop, writing)
        loop.watch(reading, self._read)
        beat = partial(self._outgoing.put_if_idle, message("pulse"))
        self.pulse = Pulse(loop, self._branches.lost_after, beat, self._on_silence, is_there)

    def _read(self) -> None:
        self._branches.take(self, self._reader.lines())
        if self._reader.has_ended and self._is_open:
            self._branches.loop.forget(self._reading)
            self._on_end()

    def _heard(self) -> None:
        self.has_heard, self.moves = True, False
        self.pulse.heard()

    def _on_end(self) -> None:
        """Nothing more arrives from the agent."""

    def _on_silence(self, since: str) -> None:
        """Nothing has arrived for too long; give the host up."""
        raise NotImplementedError


class NodeLink(Link):
    """The connection to the launcher of another node, which has connected."""

    def __init__(self, branches: Branches, node: int, connection: system.Socket) -> None:
        super().__init__(branches, node)
        self._socket = connection
        keep_little(connection, branches.lost_after)
        self._connect(connection.fileno(), connection.fileno(), is_there=True)

    def close(self) -> None:
        super().close()
        self._socket.close()

    def _on_end(self) -> None:
        self._branches.lose(self, f"the connection to its launcher (node {self.node}) has ended")

    def _on_silence(self, since: str) -> None:
        why = f"nothing has come from its launcher (node {self.node}) {since}"
        self._branches.lose(self, why)


class SshLink(Link):
    """An agent that is started by ``ssh``, a command that takes a host and a line.

    It reaches the hosts of ``part``, all but the first, which is its own. On each the same folder
    and the same Python are used as here.

    Raises:
        OSError: the command cannot be run.
    """

    def __init__(
        self, branches: Branches, part: Sequence[tuple[int, str]], ssh: Sequence[str], fan: int
    ) -> None:
        (node, self._name), *self.part = part
        super().__init__(branches, node)
        self.ssh, self.fan, self._silence = ssh, fan, ""
        folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
        agent = f"exec {python} -m flashlight_py.launch.agent {branches.lost_after:g}"
        command = [*ssh, self._name, f"cd {folder} && {agent}"]
        self._process = system.Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        assert self._process.stdin
        assert self._process.stdout
        with self._process.stdin as stdin:
            self._connect(self._process.stdout.fileno(), stdin.fileno(), is_there=False)
        branches.loop.child(self._process, self._on_exit, is_ours=True)
        if self.part:
            self.put(message("reach", self.part, ssh, fan))

    def close(self) -> None:
        super().close()
        assert self._process.stdout
        self._process.stdout.close()
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()

    def _on_exit(self, code: int) -> None:
        before = -1
        while self._reader.received > before:  # there may be more than one reading holds
            before = self._reader.received
            self._branches.take(self, self._reader.lines())
        self._branches.lose(self, self._silence or f"ssh to {self._name} {describe_exit(code)}")

    def _on_silence(self, since: str) -> None:
        self._silence = f"nothing has come from host {self._name} {since}"
        self._process.kill()


class Branches:
    """The agents below this process, by the numbers of their hosts; ``own`` is this one's, if any.

    ``on_lines`` is called with messages that have come, each with the number whose it is.
    ``on_lost`` is called when a connection has ended: with the number of the host, what has become
    of it, to whom there is no way any more, and whether anything had ever come from there. The
    number is ``MOVING`` where the host looks for another place.
    """

    def __init__(self, loop: Loop, lost_after: float, own: int | None = None) -> None:
        self.loop, self.lost_after, self._own = loop, lost_after, own
        self.links: dict[int, Link] = {}
        self.is_leaving = False
        self.on_lines: Callable[[list[tuple[int, bytes]]], None]
        self.on_lost: Callable[[int, str, list[int], bool], None]
        self._ways: dict[int, Link] = {}
        self.places = 0  # that this process has had in the tree
        self._places: dict[int, list[int]] = {}  # of who is or was here, and of those between

    def put(self, node: int, line: bytes) -> None:
        """Send a message to one agent; nothing happens where no way to it is known."""
        if (link := self._ways.get(node)) is not None:
            link.put(line if node == link.node else b"%d %s" % (node, line))

    def broadcast(self, line: bytes) -> None:
        """Send a message to all, once on each connection."""
        for link in self.links.values():
            link.put(b"* " + line)

    def take(self, link: Link, lines: list[bytes]) -> None:
        """Take what has come on ``link``, but for what is of a way that an agent had before."""
        found = []
        for line in lines:
            number, rest = addressed(line)
            node, kind = int(number or link.node), rest[:8]
            if kind == _HERE:
                places = parsed(rest)[1]
                if node == self._own or places < self._places.get(node, []):
                    continue
                self._places[node], self._ways[node] = places, link
                rest = message("here", *places, self.places)
            elif kind == _MOVES:
                link.moves = True
                continue
            elif self._ways.get(node) is not link:
                continue
            elif kind == _LOST:
                lost, how, gone = parsed(rest)[1]
                if not (gone := self._forget(link, gone)):
                    continue
                rest = message("lost", lost, how, gone)
            found.append((node, rest))
        if found:
            self.on_lines(found)

    def here(self) -> list[tuple[int, bytes]]:
        """Return what those who are here have said of that, as this process has another place."""
        before = self._places
        for link in self.links.values():  # it may have been out of reach itself
            link.moves |= link.pulse.silent > BEAT_SECONDS
        there = [node for node in self._ways if node in before]
        return [(node, message("here", *before[node], self.places)) for node in there]

    def adopt(self, node: int, connection: system.Socket) -> None:
        """Talk to the launcher of ``node`` on a connection that it has made."""
        if (old := self.links.get(node)) is not None:
            old.moves = True
            self.lose(old, "its launcher has come again")
        self.links[node] = self._ways[node] = NodeLink(self, node, connection)

    def reach(
        self, hosts: Sequence[tuple[int, str]], ssh: Sequence[str], fan: int, first: int = 0
    ) -> None:
        """Start agents on ``hosts``: ``first`` of them from here, or ``fan``, and more from these.

        Calls ``on_lost`` where the command cannot be run.
        """
        count = min(first or fan, len(hosts))
        for i in range(count):
            part = hosts[i * len(hosts) // count : (i + 1) * len(hosts) // count]
            node = part[0][0]
            for each, _ in part:  # new agents, which count anew
                self._places.pop(each, None)
            try:
                self.links[node] = self._ways[node] = SshLink(self, part, ssh, fan)
            except OSError as error:
                for node, _ in part:
                    self.on_lost(node, f"{ssh[0]}: {error}", [node], False)

    def lose(self, link: Link, how: str) -> None:
        """Close ``link``, which has ended. Those who were to be reached by it, are from here."""
        link.close()
        self.links = {node: each for node, each in self.links.items() if each is not link}
        behind = {node for node, way in self._ways.items() if way is link}
        gone = self._forget(link, sorted(behind | {node for node, _ in link.part}))
        if isinstance(link, SshLink) and link.part and not (link.has_heard or self.is_leaving):
            gone = [link.node]
            self.reach(link.part, link.ssh, link.fan, 1)
        if gone:
            self.on_lost(MOVING if link.moves else link.node, how, gone, link.has_heard)

    def _forget(self, link: Link, nodes: Sequence[int]) -> list[int]:
        """Forget that ``nodes`` are reached by ``link``; returns those that have no other way.

        Not this one: it was below somebody who is below it now, and has not noticed that.
        """
        ways = self._ways
        gone = [node for node in nodes if node != self._own and ways.get(node, link) is link]
        for node in gone:
            self._ways.pop(node, None)
        return gone

    def leave(self, code: int) -> None:
        """Have all exit with ``code``, and wait for that."""
        self.is_leaving = True
        self.broadcast(message("leave", code))
        self.wait_and_close()

    def wait_and_close(self) -> None:
        """Wait until all have left, and close what is left after some seconds."""
        ends = system.monotonic() + LEAVING_SECONDS
        while self.links and system.monotonic() < ends:
            self.loop.once(ends)
        self.close()

    def close(self) -> None:
        """Close all connections; agents below end by it, or look for another place."""
        self.is_leaving = True
        for link in self.links.values():
            link.close()
        self.links.clear()
        self._ways.clear()


def keep_little(connection: system.Socket, lost_after: float) -> None:
    """Have the kernel keep what it could not deliver no longer than need be: see ``Pulse``."""
    milliseconds = int(2000 * lost_after)
    connection.setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, milliseconds)
