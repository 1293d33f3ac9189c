"""flrun on every host: production's launcher of node 0, and its agents; ranks are stand-ins.

A rank is a process that starts as others do (``scenario.meet``) and then waits for its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

from flashlight_py.distributed.rendezvous.tcp_store import TcpStore
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.errors import RendezvousError
from flashlight_py.launch.loop import LOST_SECONDS, Loop
from flashlight_py.launch.nodes import job_of_nodes, meeting_of, work_for_node_0
from flashlight_py.launch.options import Options
from tests.simulation import costs
from tests.simulation.scenario import native_stood_in_for
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
    ) -> None:
        self.world, self.size, self.timeout = World(seed), nodes * per_host, timeout
        self._meets, self._min_n = meets, min_n
        self.starts: Counter[int] = Counter()
        self.world.program = self._program
        self.up: dict[int, float] = {}
        self.ranks: dict[int, Process] = {}
        self.said: list[bytes] = []  # by launchers, on their terminals
        self.launchers = [
            Process(self.world.add_host(), self._launcher(node, nodes, per_host), _ENVIRON)
            for node in range(nodes)
        ]
        self.world.on_output = self.said.append

    def _launcher(self, node: int, nodes: int, per_host: int) -> Callable[[], int]:
        how = ((), (), (), nodes, node, "host1:29511", None, self._min_n, None, 5.0, LOST_SECONDS)
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
            host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
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

    def run(self, until: float = 1e3, are_up: bool = False) -> Launch:
        """Let it happen until all launchers have ended, or all ranks ``are_up``.

        Raises what a launcher has raised, unless it is what its user would be told.
        """
        is_done = lambda: are_up and len(self.up) == self.size  # noqa: E731
        with installed(self.world), native_stood_in_for(), costs.charged(self.world.spend):
            over = lambda: is_done() or self.launchers[0].code is not None  # noqa: E731
            self.world.run(until, over)
            if not is_done():
                self.world.run(self.world.now + 30.0)
        for each in self.launchers:
            if each.error is not None and not isinstance(each.error, RendezvousError):
                raise each.error
        return self


_ENVIRON = {"FLASHLIGHT_SECRET": "s"}
