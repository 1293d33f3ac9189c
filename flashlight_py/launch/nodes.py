"""One launcher on each host: that of node 0 has the job, and those of the others connect to it.

They meet as ranks do, at a path that all see or at a port of node 0. The connections of that
rendezvous, whose ends have proven to know its secret, are those of the job: the other launchers are
agents of node 0's, which show themselves what their ranks print. So there is one protocol, and the
end of a connection says at once that a launcher is gone. The ranks' own secret is made on each node
of what was exchanged there. Node 0 listens on while the job runs, or one launcher too many would
wait for 300 s for a job that has begun.

Many launchers meet in a tree, which stays that of the job. Then all listen on, and one whose way to
node 0 is lost asks that for another place, and keeps what is below it.
"""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.rendezvous.file_store import FileStore
from flashlight_py.distributed.rendezvous.meeting import MeetingPoint
from flashlight_py.distributed.rendezvous.secret import REMEDY, proof
from flashlight_py.distributed.rendezvous.store import ANY_RANK
from flashlight_py.distributed.rendezvous.tcp_store import TcpStore
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import addresses_of
from flashlight_py.launch.agent import Agent, LauncherConnection
from flashlight_py.launch.branches import TREE_FROM, Branches, keep_little
from flashlight_py.launch.hosts import Hosts
from flashlight_py.launch.job import Job
from flashlight_py.launch.loop import Loop, interruptible
from flashlight_py.launch.options import Options
from flashlight_py.launch.output import RankOutput

# How long launchers wait for each other, in seconds.
MEETING_SECONDS = 300.0
# After so many they say whom they wait for. A launcher that accepts a connection answers in less
# than the latter, as none does anything else meanwhile.
_FIRST_REPORT, _PATIENCE = 4.0, 3.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class NodeAgent(Agent):
    """The agent of a launcher of its own, which has a program and a user before it."""

    def __init__(
        self, loop: Loop, launcher: LauncherConnection, options: Options, key: bytes
    ) -> None:
        super().__init__(loop)
        self.report, self.secret_of = launcher.report, partial(secret_of_ranks, key)
        self._launcher, self._options = launcher, options
        self.output = RankOutput(1)
        self.interrupted: signal.Signals | None = None
        loop.on_signal = self._on_signal

    def task(self, task: Mapping[str, Any]) -> None:
        """Keep what the ranks are, but for the program: it is this launcher's own."""
        self.output = RankOutput(task["size"], self._options.output_dir)
        super().task({**task, "program": self._options.program})

    def _on_signal(self, number: signal.Signals) -> None:
        """Have node 0 end the job; at a second signal, do not wait for it."""
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self.signal(number)
        elif self.interrupted:
            self.grace = 0.0
            self._launcher.end()
        else:
            self.interrupted = number
            self.report("interrupt", number)


@contextmanager
def job_of_nodes(
    loop: Loop, options: Options, store: MeetingPoint, stdin: int | None
) -> Iterator[Job]:
    """Yield the job on all nodes, this one first, when their launchers have met at ``store``.

    Raises:
        RendezvousError: a launcher did not arrive in time, or two have one number.
        Interrupted: by a signal, before all have arrived.
    """
    with ExitStack() as ends:
        file = ""
        if not options.endpoint:
            # For what ranks meet at: a new folder of this user's in or beside the path.
            path = Path(options.rdzv)
            prefix, parent = f"{path.name}.job-", path.parent
            if path.is_dir():
                prefix, parent = "job-", path
            folder = tempfile.TemporaryDirectory(
                prefix=prefix, dir=parent.absolute(), ignore_cleanup_errors=True
            )
            file = f"{ends.enter_context(folder)}/meeting"
        with interruptible():
            key, payloads, connections = _meet(options, store)
        local = Agent(loop, stdin)
        local.reached = [ours[0] for ours, _ in store.ends.values()]
        local.secret_of = partial(secret_of_ranks, key)
        found = [(each["host"], each["ranks"]) for each in map(json.loads, payloads)]
        # Another node may notice later than this one that the way is lost. It ends its ranks first.
        patience = options.lost_after + options.grace + store.node.moving_seconds
        hosts = Hosts(loop, found, options.lost_after, local, patience)
        ends.enter_context(_below(loop, store, hosts.branches, connections))
        yield Job(loop, hosts, options, stdin, file)


def work_for_node_0(loop: Loop, options: Options, store: MeetingPoint) -> int:
    """Run the ranks of this node for the launcher of node 0, which is met at ``store``.

    Returns the exit code of the job. Raises what :func:`job_of_nodes` does.
    """
    with interruptible():
        key, _, connections = _meet(options, store)
    tree = store.node
    branches = Branches(loop, options.lost_after, tree.number)
    launcher = LauncherConnection(loop, branches, keeps=True)
    agent, problem = NodeAgent(loop, launcher, options, key), ""
    above = connections.pop(tree.above)
    with _below(loop, store, branches, connections):
        while True:
            with above:
                keep_little(above, options.lost_after)
                launcher.connect(above.fileno(), above.fileno())
                code = launcher.run(agent)
                if code is not None or agent.interrupted or tree.above == 0:
                    break
                launcher.leave_for_another()
            try:
                above = tree.move()
            except RendezvousError as error:
                problem = f", and there is no other way to node 0: {error}"
                branches.leave(1)
                break
        branches.close()
    if code is not None:
        return code
    if agent.interrupted:
        agent.say(f"interrupted by {agent.interrupted.name}; the ranks of this node were ended")
        return 128 + agent.interrupted
    who = f"the launcher of node {tree.above}"
    how = f"the connection to {who} has ended"
    if launcher.silence:
        how = f"nothing has come from {who} {launcher.silence}"
    agent.say(f"{how}{problem}; its ranks here were ended")
    return 1


@contextmanager
def _below(
    loop: Loop, store: MeetingPoint, branches: Branches, connections: Mapping[int, system.Socket]
) -> Iterator[None]:
    """Have ``branches`` for nodes that are right below, and for those that come later."""
    for node, connection in connections.items():
        branches.adopt(node, connection)
    if not (store.is_tree or (store.rank == 0 and not store.moves)):
        yield
        return

    def adopt() -> None:
        for node, connection in store.node.take_in().items():
            branches.adopt(node, connection)

    loop.watch(descriptor := store.node.selector.fileno(), adopt)
    try:
        yield
    finally:
        loop.forget(descriptor)
        store.node.close()


def meeting_of(options: Options) -> MeetingPoint:
    """Return where the launchers meet. ``rank`` there is 0 for the one that has the job.

    Without a --node-rank, at HOST:PORT that is the one on the host that HOST means, and the others
    are numbered as they arrive. A RendezvousError: this is node 0 and cannot listen there.
    """
    if options.endpoint is None:
        path = Path(options.rdzv).absolute()
        return FileStore(path, options.node_rank or 0, options.nnodes, MEETING_SECONDS)
    host, port = options.endpoint
    one_host = host in _LOOPBACK
    at = partial(TcpStore, host, port, size=options.nnodes, timeout=MEETING_SECONDS)
    if options.node_rank is not None:
        with _said_of_launchers():
            return at(rank=options.node_rank, one_host=one_host, is_strict=True)
    at = partial(at, one_host=one_host, unnumbered=True)
    if not addresses_of(host):
        return at(rank=ANY_RANK)
    try:
        with _said_of_launchers():
            return at(rank=0, is_strict=not one_host)
    except RendezvousError:
        if not one_host:
            raise
        return at(rank=ANY_RANK)  # another launcher of this host was first


def _meet(
    options: Options, store: MeetingPoint
) -> tuple[bytes, Sequence[bytes], dict[int, system.Socket]]:
    """Return a key that all launchers know now, what each reports of itself, and connections.

    Those are of this node to the one above it, and to those right below.
    """
    mine = {
        "host": system.gethostname(),
        "ranks": options.ranks,
        "nonce": system.random_bytes(32).hex(),
    }
    store.first_report, store.patience, store.tree_from = _FIRST_REPORT, _PATIENCE, TREE_FROM
    store.lost_after = max(options.lost_after, store.node.moving_seconds)  # when it does no more
    try:
        with _said_of_launchers():
            payloads = store.exchange(json.dumps(mine).encode())
        if not store.secret:
            raise RendezvousError(
                f"--rdzv {options.rdzv}: any process that reaches that port could join; {REMEDY}"
            )
        connections = store.node.hand_over()
    except BaseException as error:
        store.abort(str(error))
        raise
    return proof(store.secret, *payloads), payloads, connections


@contextmanager
def _said_of_launchers() -> Iterator[None]:
    """Have errors of the rendezvous say what its words mean where launchers meet."""
    try:
        yield
    except RendezvousError as error:
        raise RendezvousError(
            f"{error} (of launchers, one on each host: the rank is --node-rank, the world size "
            "--nnodes, and --rdzv has MASTER_ADDR:MASTER_PORT or FILE_PATH)"
        ) from error


def secret_of_ranks(key: bytes, restarts: int) -> str:
    """Return what the ranks of an attempt prove to know; each launcher makes it of ``key``."""
    return proof(key, b"ranks", str(restarts).encode()).hex()
