"""One launcher on each host: that of node 0 has the job, and those of the others connect to it.

They find each other as ranks do, at a path that all see or at a port of node 0. There node 0 says
where it listens, and the others connect as agents, which show themselves what their ranks print.
Both ends of such a connection prove to know a key, which never travels by itself.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flashlight_py.distributed.rendezvous import Store
from flashlight_py.distributed.rendezvous.file_store import FileStore
from flashlight_py.distributed.rendezvous.secret import REMEDY, proof
from flashlight_py.distributed.rendezvous.tcp_store import TcpStore
from flashlight_py.errors import RendezvousError
from flashlight_py.launch.agent import Agent, Server, address_of_host, listener_at
from flashlight_py.launch.hosts import ConnectedHost, LocalHost, Team
from flashlight_py.launch.loop import Loop, interruptible
from flashlight_py.launch.options import Options
from flashlight_py.launch.output import Output
from flashlight_py.launch.ranks import SECRET

# How long launchers wait for each other, in seconds: to meet, and then to connect.
MEETING_SECONDS = 300.0
# How long an address of node 0 may take to answer, in seconds, before the other one is tried.
CONNECTING_SECONDS = 30.0
# After so many seconds without an answer of the kernel of its host a launcher counts as lost.
SILENT_SECONDS = 300
PROOF_BYTES = 32
_MOST_UNKNOWN = 256  # connections without a proof yet that are kept at a time
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class NodeHost(ConnectedHost):
    """The host of another node, whose launcher has connected to this one."""

    is_launcher = True

    def __init__(self, loop: Loop, name: str, slots: int, node: int) -> None:
        super().__init__(loop, name, slots)
        self.node = node

    def connect(self, connection: socket.socket) -> None:
        """Take the connection of its launcher, which is closed in the end."""
        _prepare(connection)
        self._socket = connection
        self._connect(connection.fileno(), connection.fileno())

    def open(self) -> None:
        """A launcher that is gone does not connect again."""
        if not self.is_open:
            self._on_end()

    def close(self) -> None:
        """Close the connection; its ranks end by it."""
        if self.is_open:
            super().close()
            self._socket.close()

    def _on_end(self) -> None:
        self.close()
        self.on_lost(f"is lost: the connection to its launcher (node {self.node}) has ended")


class NodeAgent(Agent):
    """The agent of a launcher of its own, which has a program and a user before it."""

    def __init__(self, loop: Loop, server: Server, options: Options, key: bytes) -> None:
        super().__init__(loop, server.report)
        self._server, self._options, self._key = server, options, key
        self.output = Output(1)
        self.interrupted: signal.Signals | None = None
        loop.on_signal = self._on_signal

    def start(self, task: Mapping[str, Any]) -> None:
        """Start ranks of this launcher's own program."""
        self.output = Output(task["size"], self._options.output_dir)
        meeting = task["meeting"]
        if "MASTER_PORT" in meeting:
            meeting = {**meeting, SECRET: secret_of_ranks(self._key, task["restarts"])}
        super().start({**task, "program": self._options.program, "meeting": meeting})

    def _on_signal(self, number: signal.Signals) -> None:
        """Have node 0 end the job; at a second signal, do not wait for it."""
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self.signal(number)
        elif self.interrupted:
            self.grace = 0.0
            self._server.end()
        else:
            self.interrupted = number
            self._report("interrupt", number)


# Node 0 --------------------------------------------------------------------------------------


@contextmanager
def team_of_nodes(loop: Loop, options: Options, stdin: int | None) -> Iterator[Team]:
    """Yield the hosts of all nodes, this one first, when their launchers have connected.

    Raises:
        RendezvousError: a launcher did not arrive in time, or two have one number.
        Interrupted: by a signal, before all have arrived.
    """
    with ExitStack() as ends:
        address, file = address_of_host(), ""
        if options.endpoint:
            address, _ = options.endpoint
        else:
            file = f"{ends.enter_context(_folder_at(Path(options.rdzv)))}/meeting"
        # Nobody knows yet by which of its addresses the others reach this host.
        with (
            listener_at(address if address in _LOOPBACK else "", _MOST_UNKNOWN) as listener,
            interruptible(),
        ):
            port = listener.getsockname()[1]
            key, (_, *found) = _meet(options, [(address, port), (os.uname().nodename, port)])
            others = [
                NodeHost(loop, each["host"], each["ranks"], node)
                for node, each in enumerate(found, start=1)
            ]
            _admit(listener, key, others)
        hosts = [LocalHost(loop, options.ranks, stdin), *others]
        yield Team(loop, hosts, options, stdin, file, partial(secret_of_ranks, key))


def _folder_at(path: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder of this user's in or beside ``path``, for what ranks meet at."""
    prefix, parent = ("job-", path) if path.is_dir() else (f"{path.name}.job-", path.parent)
    return tempfile.TemporaryDirectory("", prefix, parent.absolute(), ignore_cleanup_errors=True)


def _admit(listener: socket.socket, key: bytes, hosts: Iterable[NodeHost]) -> None:
    """Wait until the launchers of ``hosts`` have connected; drop whoever does not know ``key``."""
    missing = {_proof_of(key, host.node): host for host in hosts}
    unknown: list[socket.socket] = []
    ends = time.monotonic() + MEETING_SECONDS
    while missing and (seconds := ends - time.monotonic()) > 0:
        for each in select.select([listener, *unknown], [], [], seconds)[0]:
            if each is listener:
                unknown.append(listener.accept()[0])
                unknown[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PROOF_BYTES)
                continue
            unknown.remove(each)
            proven = _received(each)
            known = [wanted for wanted in missing if hmac.compare_digest(wanted, proven)]
            if not known:
                each.close()
            for wanted in known:
                host = missing.pop(wanted)
                each.sendall(_answer_to(key, host.node))
                host.connect(each)
        while len(unknown) > (0 if not missing else _MOST_UNKNOWN):
            unknown.pop(0).close()
    if missing:
        late = ", ".join(str(host.node) for host in missing.values())
        address, port = listener.getsockname()[:2]
        raise RendezvousError(
            f"the launcher of node {late} did not connect to that of node 0, at {address}:{port}, "
            f"within {MEETING_SECONDS:g} s; a firewall may be between them"
        )


# The other nodes -----------------------------------------------------------------------------


def work_for_node_0(loop: Loop, options: Options) -> int:
    """Run the ranks of this node for the launcher of node 0; return the exit code of the job.

    Raises:
        RendezvousError: a launcher did not arrive in time, or two have one number, or that of node
            0 cannot be connected to.
        Interrupted: by a signal, before all have arrived.
    """
    with interruptible():
        key, found = _meet(options, [])
        connection = _connect(found[0], key, options.node_rank)
    with connection:
        server = Server(loop, connection.fileno(), connection.fileno())
        agent = NodeAgent(loop, server, options, key)
        code = server.run(agent)
    if code is not None:
        return code
    if agent.interrupted:
        agent.say(f"interrupted by {agent.interrupted.name}; the ranks of this node were ended")
        return 128 + agent.interrupted
    agent.say("the connection to the launcher of node 0 has ended; its ranks here were ended")
    return 1


def _connect(first: Mapping[str, Any], key: bytes, node: int) -> socket.socket:
    where, other = first["addresses"]
    try:
        connection = _connected_to(where) or socket.create_connection(other, CONNECTING_SECONDS)
        connection.settimeout(MEETING_SECONDS)
        connection.sendall(_proof_of(key, node))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PROOF_BYTES)
        answer = connection.recv(PROOF_BYTES)
    except OSError as error:
        raise RendezvousError(
            f"cannot connect to the launcher of node 0 at {where[0]}:{where[1]}, nor at "
            f"{other[0]}: {error}"
        ) from error
    if not hmac.compare_digest(answer, _answer_to(key, node)):
        connection.close()
        raise RendezvousError(f"who answers at {where[0]}:{where[1]} is not node 0's launcher")
    _prepare(connection)
    return connection


def _connected_to(address: tuple[str, int]) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_connection(address, CONNECTING_SECONDS)
    return None


# All nodes -----------------------------------------------------------------------------------


def _meet(
    options: Options, addresses: Sequence[tuple[str, int]]
) -> tuple[bytes, list[dict[str, Any]]]:
    """Return a key that all launchers of the job know now, and what each has said of itself.

    This one listens at ``addresses``.
    """
    node, size = options.node_rank, options.nnodes
    store: Store
    if options.endpoint:
        host, port = options.endpoint
        store = TcpStore(host, port, node, size, MEETING_SECONDS, host in _LOOPBACK)
    else:
        store = FileStore(Path(options.rdzv).absolute(), node, size, MEETING_SECONDS)
    mine = {
        "host": os.uname().nodename,
        "ranks": options.ranks,
        "addresses": addresses,
        "nonce": secrets.token_hex(32),
    }
    try:
        payloads = store.exchange(json.dumps(mine).encode())
        store.close()
    except BaseException as error:
        store.abort(str(error))
        raise
    if options.endpoint and not store.secret:
        raise RendezvousError(
            f"--rdzv {options.rdzv}: whoever reaches that port could join; {REMEDY}"
        )
    # At a path, the nonces are in files of this user; at a port, the store has a secret.
    return proof(store.secret, *payloads), list(map(json.loads, payloads))


def _received(connection: socket.socket) -> bytes:
    """Return what has arrived: a proof, or less at the end of the connection."""
    try:
        return connection.recv(PROOF_BYTES)
    except ConnectionError:
        return b""


def _proof_of(key: bytes, node: int) -> bytes:
    return proof(key, b"node", str(node).encode())


def _answer_to(key: bytes, node: int) -> bytes:
    return proof(key, b"launcher", str(node).encode())


def secret_of_ranks(key: bytes, restarts: int) -> str:
    """Return what the ranks of an attempt prove to know; each launcher makes it of ``key``."""
    return proof(key, b"ranks", str(restarts).encode()).hex()


def _prepare(connection: socket.socket) -> None:
    """Have the kernels notice within ``SILENT_SECONDS`` when the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
