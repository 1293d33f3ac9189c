"""``flrun --hosts`` in virtual time: the package's launcher and agents; stand-ins for ssh and
ranks.

A rank is a process that starts like other processes (``scenario.meet``) and then waits for its end.
"""

import math
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from flashlight_py.distributed.rendezvous.stores import TcpStore
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.launch.agent import Agent, LauncherConnection
from flashlight_py.launch.hosts import Hosts
from flashlight_py.launch.job import Job
from flashlight_py.launch.loop import LOST_SECONDS, Loop
from flashlight_py.launch.options import Options
from tests.simulation import costs
from tests.simulation.network import Socket, divide
from tests.simulation.scenario import native_stood_in_for
from tests.simulation.world import Process, World, installed, me


class Launch:
    """A job with ``per_host`` ranks on each of ``hosts`` hosts, and its launcher on another host.

    Ranks join a world if ``meets`` is True. With ``min_n`` the remaining ranks start again;
    ``starts`` counts the ranks of each start by its size.
    """

    def __init__(
        self, hosts: int, seed: int, per_host: int = 8, meets: bool = True, min_n: int | None = None
    ) -> None:
        self.world, self._meets, self._hosts = World(seed), meets, hosts
        self.starts: Counter[int] = Counter()
        self.up: dict[int, float] = {}
        self.ranks: dict[int, Process] = {}
        self.agents: dict[int, Process] = {}  # the last agent of each host
        self.said: list[bytes] = []  # output of the launcher
        self.world.program, self.world.ssh = self._program, self._ssh
        self.world.on_output = self.said.append
        self.launcher = Process(self.world.add_host(), self._launcher, {})
        names = tuple((self.world.add_host().name, per_host) for _ in range(hosts))
        plan: Sequence[Any] = (None, min_n, None, None, 5.0, LOST_SECONDS, ("rank",))
        self._options = Options(per_host, names, ("ssh",), (), *plan)

    def _launcher(self) -> int:
        self.world.spend(costs.IMPORT)
        with closing(Loop()) as loop:
            hosts = Hosts(loop, self._options.hosts, None, ("ssh",), LOST_SECONDS)
            return Job(loop, hosts, self._options, None, "").run()

    def _ssh(self, command: Sequence[str]) -> SimpleNamespace:
        """Start an agent on another host, and a local process that ends with it."""
        process, number = me(), int(command[1].removeprefix("host")) - 1

        def connect() -> int:
            with closing(Loop()) as loop:
                work, launcher = Agent(loop), LauncherConnection(loop, *ends, LOST_SECONDS)
                work.report = launcher.report
                launcher.run(work)
            return 0

        agent = Process(self.world.hosts[number], connect, {}, costs.IMPORT)
        ssh = process.child(lambda: self.world.park() or 0, {})
        agent.on_end = lambda: agent.host.side or ssh.end(255 if agent.code else 0)
        down, stdin = Socket.pair(agent, process)
        stdout, up = Socket.pair(process, agent)
        ends = down.descriptor, up.descriptor
        self.agents[number] = agent

        def kill() -> None:
            ssh.end(-signal.SIGKILL)

        return SimpleNamespace(
            pid=ssh.pid, returncode=None, stdin=stdin, stdout=stdout, kill=kill, wait=lambda: None
        )

    def _program(self, process: Process, command: Any) -> Callable[[], int]:
        environ = process.environ
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        self.ranks[rank] = process
        self.starts[size] += 1

        def create() -> TcpStore:
            host, port = environ["MASTER_ADDR"], int(environ["FLASHLIGHT_PORT"].split(":")[0])
            also = environ["FLASHLIGHT_ADDRESSES"].split(",")
            store = TcpStore(host, port, rank, size, 300.0, also=also)
            store.local_rank = int(environ["LOCAL_RANK"])
            return store

        def main() -> int:
            me().world.spend(costs.FIRST)
            if self._meets:
                initialize.create_world(create, Settings(timeout=300.0))
            self.up[rank] = self.world.clock()
            self.world.park()
            return 0

        return main

    def running(self) -> dict[int, int]:
        return {
            process.host.number - 1: int(process.environ["WORLD_SIZE"])
            for process in self.world.processes.values()
            if process.code is None and "RANK" in process.environ
        }

    def run(self, until: float = 1e3, is_done: Callable[[], bool] = lambda: False) -> "Launch":
        with installed(self.world), native_stood_in_for(), costs.charged(self.world.spend):
            self.world.run(until, lambda: is_done() or self.launcher.code is not None)
            if not is_done() and self.world.now < until:
                self.world.run(self.world.now + 30.0)
        if self.launcher.error is not None:
            raise self.launcher.error
        return self


# Hosts are lost after 6 s of silence. Two consecutive shorter silences do not count.
BRIEF, LONG = (0.1, 2.7), (7.0, 15.0)

# Time of the first loss in seconds: agents have just reported, or their ranks run.
RUNNING = (2 * costs.IMPORT + 0.01, 4 * costs.IMPORT)


class Loss(NamedTuple):
    """Fault of the agent of a host, and its duration in seconds."""

    at: float
    kind: str
    host: int
    seconds: float


def losses(launch: Launch, most: int) -> list[Loss]:
    """Choose faults of some agents while they start ranks, run them, or start them again.

    All agents have sent a message before; until then ssh itself detects a silent host.
    """
    world, random = launch.world, launch.world.random
    begin, result = random.uniform(*RUNNING), list[Loss]()
    for host in random.sample(range(1, 1 + launch._hosts), random.randint(1, most)):

        def receive(number: int, host: int = host) -> None:
            if host in launch.agents:
                launch.agents[host].receive(number)

        kind, *calls = random.choice(
            (
                ("killed", partial(receive, signal.SIGKILL)),
                ("stopped", partial(receive, signal.SIGSTOP), partial(receive, signal.SIGCONT)),
                ("cut off", *[partial(divide, world, [world.hosts[host]], 1 << host)] * 2),
            )
        )
        at = begin + random.choice((0.0, random.uniform(0, 0.1), random.uniform(0, 8.0)))
        seconds = random.choice((math.inf, random.uniform(*BRIEF), random.uniform(*LONG)))
        for when, call in zip((at, at + seconds), calls, strict=False):
            world.at(when, call)
        result.append(Loss(at, kind, host, seconds if len(calls) > 1 else math.inf))
    return result


def objections(launch: Launch, losses: Sequence[Loss]) -> str:
    """Return an error unless all remaining hosts have a rank of the same start."""
    lost = {loss.host for loss in losses if loss.seconds > BRIEF[1]}
    # The launcher cannot end ranks on hosts whose agents are stopped or dead.
    unheard = {loss.host for loss in losses if loss.kind == "stopped" and loss.seconds == math.inf}
    seen = {host: size for host, size in launch.running().items() if host not in unheard}
    is_right = set(range(1, 15)) - lost <= seen.keys() and set(seen.values()) == {len(seen)}
    return "" if is_right else f"{losses} end with ranks of {seen}"


def lose(seed: int) -> str:
    """Lose the agents of some of 14 hosts, and return the error at the end, or ""."""
    launch = Launch(14, seed, per_host=1, meets=False, min_n=1)
    launch.world.loss = launch.world.random.choice((0.0, 0.0, 0.01, 0.05))
    happens = losses(launch, 5)
    look, wrong = max(at for at, *_ in happens) + LONG[1] + 10.0, "the launcher has ended"

    def is_over() -> bool:
        nonlocal wrong, look
        if launch.world.now < look:
            return False
        wrong, look = objections(launch, happens), look + 10.0
        return not wrong or look > 80.0

    launch.run(100.0, is_over)
    return wrong
