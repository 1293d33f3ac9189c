"""flrun on every host: production's launcher of node 0, and its agents; ranks are stand-ins.

A rank is a process that starts as others do (``scenario.meet``) and then waits for its end.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from flashlight_py.distributed.rendezvous import places
from flashlight_py.distributed.rendezvous.tcp_store import TcpStore
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.errors import RendezvousError
from flashlight_py.launch.loop import LOST_SECONDS, Loop
from flashlight_py.launch.nodes import job_of_nodes, meeting_of, work_for_node_0
from flashlight_py.launch.options import Options
from tests.simulation import costs
from tests.simulation.network import divide
from tests.simulation.scenario import named_in, native_stood_in_for
from tests.simulation.world import Process, World, installed, me


class Launch:
    """A job of ``nodes`` hosts with ``per_host`` ranks each, started by a launcher on every host.

    Its ranks meet, unless the launchers alone are to be looked at. With ``min_n`` they start again
    with those that are left; ``starts`` has how many ranks each start has had.
    """

    def __init__(
        self,
        nodes: int,
        seed: int,
        per_host: int = 8,
        timeout: float = 300.0,
        meets: bool = True,
        min_n: int | None = None,
        **environ: str,
    ) -> None:
        self.world, self.size, self.timeout = World(seed), nodes * per_host, timeout
        self._meets, self._min_n = meets, min_n
        self.starts: Counter[int] = Counter()
        self.world.program = self._program
        self.up: dict[int, float] = {}
        self.ranks: dict[int, Process] = {}
        self.said: list[bytes] = []  # by launchers, on their terminals
        self.launchers = [
            Process(
                *(self.world.add_host(), self._launcher(node, nodes, per_host)),
                {"FLASHLIGHT_SECRET": "s", **environ},
            )
            for node in range(nodes)
        ]
        self.world.on_output = self.said.append

    def _launcher(self, node: int, nodes: int, per_host: int) -> Callable[[], int]:
        how = (
            (),
            (),
            (),
            nodes,
            node,
            "host1:29511",
            None,
            self._min_n,
            None,
            None,
            5.0,
            LOST_SECONDS,
        )
        options = Options(per_host, *how, ("rank",))

        def main() -> int:
            self.world.spend(costs.IMPORT)
            with closing(Loop()) as loop:
                store = meeting_of(options)
                if store.rank != 0:
                    return work_for_node_0(loop, options, store)
                with job_of_nodes(loop, options, store, None) as job:
                    return job.run()

        return main

    def _program(self, process: Process, command: Any) -> Callable[[], int]:
        environ = process.environ
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        self.ranks[rank] = process
        self.starts[size] += 1

        def create() -> TcpStore:
            host, port = environ["MASTER_ADDR"], int(environ["FLASHLIGHT_PORT"].split(":")[0])
            also = environ["FLASHLIGHT_ADDRESSES"].split(",")
            store = TcpStore(host, port, rank, size, self.timeout, also=also)
            store.local_rank = int(environ["LOCAL_RANK"])
            return store

        def main() -> int:
            me().world.spend(costs.FIRST)
            if self._meets:
                initialize.meet(create, Settings(timeout=self.timeout))
            self.up[rank] = self.world.clock()
            self.world.park()
            return 0

        return main

    def running(self) -> dict[int, int]:
        """Return the nodes on which a rank runs, and how many ranks its start has."""
        return {
            each.host.number - 1: int(each.environ["WORLD_SIZE"])
            for each in self.world.processes.values()
            if each.code is None and each not in self.launchers
        }

    def run(self, until: float = 1e3, is_done: Callable[[], bool] = lambda: False) -> Launch:
        """Let it happen until all launchers have ended, or what is waited for ``is_done``.

        Raises what a launcher has raised, unless it is what its user would be told.
        """
        with installed(self.world), native_stood_in_for(), costs.charged(self.world.spend):
            over = lambda: is_done() or self.launchers[0].code is not None  # noqa: E731
            self.world.run(until, over)
            if not is_done() and self.world.now < until:
                self.world.run(self.world.now + 30.0)
        for each in self.launchers:
            if each.error is not None and not isinstance(each.error, RendezvousError):
                raise each.error
        return self


# Hosts that are silent for 6 s are lost. Two that are away one after the other are not, either.
BRIEF, LONG = (0.1, 2.7), (7.0, 15.0)
# When launchers meet, and when they run ranks, in seconds.
MEETING, RUNNING = (costs.IMPORT, costs.IMPORT + 0.012), (1.0, 1.1)
FAN = 2  # of a tree of 14 hosts that is as deep as one of some hundreds

_STOP_AND_GO = signal.SIGSTOP, signal.SIGCONT


class Loss(NamedTuple):
    """What becomes of the launcher of a node, and for how many seconds."""

    at: float
    what: str
    node: int
    seconds: float


def losses(launch: Launch, most: int, first: tuple[float, float]) -> list[Loss]:
    """Choose what becomes of some launchers, the first within ``first``.

    Without node 0 nobody goes on; it rests for a while.
    """
    world, random = launch.world, launch.world.random
    begin, found = random.uniform(*first), list[Loss]()
    for node in random.sample(range(len(launch.launchers)), random.randint(1, most)):
        process, host = launch.launchers[node], world.hosts[node]
        what, *calls = random.choice(
            (
                ("killed", partial(process.end, -signal.SIGKILL)),
                ("stopped", *(partial(process.receive, each) for each in _STOP_AND_GO)),
                ("cut off", *[partial(divide, world, [host], 1 << node)] * 2),
            )
        )
        at = begin + random.choice((0.0, random.uniform(0, 0.1), random.uniform(0, 8.0)))
        seconds = random.choice((math.inf, random.uniform(*BRIEF), random.uniform(*LONG)))
        if node == 0:
            what, calls = "stopped", [partial(process.receive, each) for each in _STOP_AND_GO]
            seconds = random.uniform(*BRIEF)
        for when, call in zip((at, at + seconds), calls, strict=False):
            world.at(when, call)
        found.append(Loss(at, what, node, seconds if len(calls) > 1 else math.inf))
    return found


def objections(launch: Launch, losses: Sequence[Loss]) -> str:
    """Say if not every node that is not lost has a rank of the same start.

    Or, where one was lost while they met, an error that names such nodes alone.
    """
    running, nodes = launch.running(), range(len(launch.launchers))
    lost = {
        loss.node
        for loss in losses
        if loss.seconds == math.inf or (loss.seconds > BRIEF[1] and loss.node not in running)
    }
    errors = {node: launch.launchers[node].error for node in nodes if node not in lost}
    named = set[int]().union(*(named_in(error) for error in errors.values() if error))
    if lost and not launch.starts and None not in errors.values() and named and named <= lost:
        return ""
    seen = {node: running.get(node, 0) for node in nodes if node not in lost}
    if set(seen.values()) == {len(seen)}:
        return ""
    return f"{losses} end with ranks of {seen}, {Counter(map(str, errors.values()))}"


def lose(seed: int) -> str:
    """Let launchers of a deep tree be lost; return what is wrong in the end.

    Of each third seed the first are while they meet.
    """
    with mock.patch.object(places, "FAN", FAN):
        how = {"per_host": 1, "meets": False, "min_n": 1, "FLASHLIGHT_TREE_FROM": "2"}
        launch = Launch(14, seed, **how)
        launch.world.loss = launch.world.random.choice((0.0, 0.0, 0.01, 0.05))
        happens = losses(launch, 5, RUNNING if seed % 3 else MEETING)
        wrong = "the launcher of node 0 has ended"

        def is_over() -> bool:
            nonlocal wrong, look
            if launch.world.now < look:
                return False
            wrong, look = objections(launch, happens), look + 10.0
            return not wrong or look > (100.0 if launch.starts else 400.0)

        look = max(at for at, *_ in happens) + LONG[1] + 10.0
        launch.run(420.0, is_over)
        return wrong if launch.starts else objections(launch, happens)
