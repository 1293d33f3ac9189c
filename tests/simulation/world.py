"""Virtual time: hosts, processes, and threads that are fibers of this process.

Events are a heap of (when, number, call). A fiber runs until it waits. Its computations advance its
own clock, which may be ahead of the world's clock. The result of a wait is visible no earlier than
the fiber's clock. So a busy rank needs no events, and one thread runs 100,000 ranks. The seed of
``random`` determines all random choices.
"""

import gc
import heapq
import math
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from errno import ESRCH
from itertools import count
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from flashlight_py import system
from tests.simulation.costs import FORK, IMPORT, RUNNING

_DEADLY = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL}


class Fiber(greenlet):
    def __init__(self, process: "Process", call: Callable[[], Any], at: float) -> None:
        super().__init__(self._work, process.world.hub)
        self.process, self.call = process, call
        self.clock, self.deadline, self.timer = at, math.inf, math.inf
        self.is_parked, self.is_woken = False, True  # its start is scheduled
        process.fibers.add(self)

    def _work(self, _: bool) -> None:
        try:
            self.call()
        except GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001 - ends the process
            self.process.error = error
        finally:
            self.process.fibers.discard(self)
            self.is_parked = False


class Host:
    """A machine with one network card; ``speed`` divides the time of its computations."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        self.name, self.rack = f"host{number}", number // world.rack
        self.address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        self.sent_until = self.received_until = 0.0  # times at which its card is free
        self.listeners: dict[int, Any] = {}
        self.ports = count(32768)
        self.slowness = 1.0
        self.processes: dict[int, Process] = {}
        self.cores: list[float] | None = None  # time at which each is free; None: unlimited cores
        self.side = 0  # hosts of other sides are unreachable, see ``network.divide``


class Process:
    """A process of a host; ``main`` is its program, which returns its exit code."""

    def __init__(
        self,
        host: Host,
        main: Callable[[], int | None],
        environ: Mapping[str, str],
        after: float = 0.0,
    ) -> None:
        self.host, self.world, self.environ = host, host.world, dict(environ)
        self.pid = next(host.world.pids)
        self.parent: Process | None = None
        self.fibers: set[Fiber] = set()
        self.descriptors: set[int] = set()
        self.children: dict[int, Process] = {}
        self.handlers: dict[int, Any] = {}
        self.wakeup, self.interval = -1, 0.0
        self.code: int | None = None
        self.error: BaseException | None = None
        self.is_stopped, self.held = False, list[Fiber]()
        self.connections = self.most_connections = self.messages = 0
        self.computed = 0.0  # seconds
        self.bytes_sent = self.bytes_received = self.memory = self.most_memory = 0
        self.ended_at = math.nan
        self.on_exchange: Callable[[], None] = lambda: None
        self.on_end: Callable[[], object] = lambda: None
        self.on_roster: Callable[[bytes], object] = lambda body: None
        self.local_rank: int | None = None
        host.processes[self.pid] = host.world.processes[self.pid] = self
        self.main = main
        self.world.at(self.world.clock() + after, self._start)

    def _start(self) -> None:
        if self.code is None:
            self.spawn(self._run)

    def _run(self) -> None:
        code: int | None = 1
        try:
            code = self.main() or 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        finally:
            if self.code is None:
                self.end(code or 0)

    def spawn(self, call: Callable[[], Any]) -> Fiber:
        """Start a thread."""
        at = self.world.clock()
        fiber = Fiber(self, call, at)
        self.world.at(at, self.world.resume, fiber, True)
        return fiber

    def child(self, main: Callable[[], int | None], environ: Mapping[str, str]) -> "Process":
        child = Process(self.host, main, environ, IMPORT)
        child.parent, self.children[child.pid] = self, child
        return child

    def end(self, code: int) -> None:
        """End it like a kernel: close its descriptors and notify its parent."""
        if self.code is not None:
            return
        self.code, self.ended_at = code, self.world.clock()
        for descriptor in sorted(self.descriptors):
            self.world.files[descriptor].shut(self, descriptor)
        self.descriptors.clear()
        self.host.processes.pop(self.pid, None)
        for child in self.children.values():
            child.parent = None
            child.receive(signal.SIGKILL)  # PR_SET_PDEATHSIG, which flrun requests
        if self.parent is not None:
            self.parent.receive(signal.SIGCHLD)
        self.on_end()
        self.world.at(self.world.clock(), self._reap)

    def _reap(self) -> None:
        for fiber in list(self.fibers):
            self.world.unwind(fiber)

    def receive(self, number: int) -> None:
        handler = self.handlers.get(number, signal.SIG_DFL)
        if self.code is not None:
            return
        if number == signal.SIGSTOP:
            self.is_stopped = True
        elif number == signal.SIGCONT:
            self.is_stopped, held, self.held = False, self.held, []
            for fiber in held:
                self.world.at(self.world.clock(), self.world.resume, fiber, True)
        elif number == signal.SIGKILL or (handler is signal.SIG_DFL and number in _DEADLY):
            self.end(-number)
        elif callable(handler):
            self.spawn(lambda: self._handle(number, handler))

    def _handle(self, number: int, handler: Callable[..., Any]) -> None:
        if self.wakeup >= 0:
            self.world.files[self.wakeup].put(bytes([number]))
        handler(number, None)

    def tick(self, interval: float) -> None:
        """Run the timer once, and again after ``interval`` while it is active."""
        if self.code is None and self.interval == interval:
            self.receive(signal.SIGALRM)
            self.world.at(self.world.now + interval, self.tick, interval)


class World:
    """All hosts. ``rack`` is the number of hosts in a rack, ``cores`` the cores of each; None:
    unlimited."""

    def __init__(self, seed: int = 0, rack: int = 32, cores: int | None = None) -> None:
        self.random, self.rack, self.cores = random.Random(seed), rack, cores
        self.now, self.hub = 0.0, getcurrent()
        self.pids, self.numbers = count(1000), count(1000)
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._order = count()
        self._ready: deque[Fiber] = deque()  # fibers that run next
        self.hosts: list[Host] = []
        self.by_address: dict[str, Host] = {}
        self.by_name: dict[str, Host] = {}
        self.processes: dict[int, Process] = {}
        self.files: dict[int, Any] = {}  # by descriptor, which is unique in the world
        self.messages = 0
        self.loss = 0.0  # fraction of messages between hosts that are sent twice
        self.program: Callable[[Process, Any], Callable[[], int | None]] | None = None
        self.ssh: Callable[[Any], SimpleNamespace] | None = None
        self.stalled: dict[Any, None] = {}  # ends of connections that packets do not reach
        self.on_output: Callable[[bytes], object] = lambda data: None  # output on terminals

    def add_host(self) -> Host:
        host = Host(self, len(self.hosts) + 1)
        if self.cores is not None:
            host.cores = [0.0] * self.cores
        self.hosts.append(host)
        self.by_address[host.address] = self.by_name[host.name] = host
        return host

    def at(self, when: float, call: Callable[..., Any], *values: Any) -> None:
        """Schedule a call at a time, not before now."""
        when = when if when > self.now else self.now
        heapq.heappush(self._events, (when, next(self._order), call, values))

    def clock(self) -> float:
        """Return the clock of the running fiber, otherwise the clock of the world."""
        fiber = getcurrent()
        return self.now if fiber is self.hub else float(fiber.clock)

    def run(self, until: float = math.inf, is_done: Callable[[], bool] = lambda: False) -> None:
        events, ready, pop = self._events, self._ready, heapq.heappop
        usual = gc.get_threshold()
        gc.set_threshold(100_000, 100, 1000)  # full collections are slow
        try:
            while True:
                while ready:
                    self.resume(ready.popleft(), True)
                if not events or events[0][0] > until or is_done():
                    return
                self.now, _, call, values = pop(events)
                call(*values)
        finally:
            gc.set_threshold(*usual)

    def resume(self, fiber: Fiber, is_woken: bool) -> None:
        process = fiber.process
        if fiber.dead:
            return
        if process.is_stopped:
            process.held.append(fiber)
            return
        if process.code is not None:
            self.unwind(fiber)
            return
        fiber.is_parked = False
        fiber.switch(is_woken)

    def unwind(self, fiber: Fiber) -> None:
        """End a fiber whose process has ended; its requests meanwhile are rejected."""
        if fiber is getcurrent() or fiber.dead:
            return
        if fiber.gr_frame is None:  # it has not started
            fiber.process.fibers.discard(fiber)
            fiber.is_woken = True
            return
        fiber.is_parked = False
        fiber.throw(GreenletExit)

    def park(self, until: float = math.inf) -> bool:
        """Wait until the calling fiber is woken (return True) or a time passes (False)."""
        fiber: Fiber = getcurrent()
        process = fiber.process
        if process.code is not None:
            raise GreenletExit
        until = until if until > fiber.clock else fiber.clock
        fiber.deadline, fiber.is_parked, fiber.is_woken = until, True, False
        if until < fiber.timer:
            fiber.timer = until
            self.at(until, self._time_is_up, fiber, until)
        is_woken: bool = self.hub.switch()
        fiber.clock = max(fiber.clock, self.now)
        return is_woken

    def _time_is_up(self, fiber: Fiber, when: float) -> None:
        if fiber.timer != when:
            return
        fiber.timer = math.inf
        if fiber.is_parked and not fiber.is_woken:
            if fiber.deadline <= self.now:
                fiber.is_woken = True
                self.resume(fiber, False)
            elif fiber.deadline < math.inf:
                fiber.timer = fiber.deadline
                self.at(fiber.deadline, self._time_is_up, fiber, fiber.deadline)

    def sleep(self, seconds: float) -> None:
        """Let the calling fiber wait."""
        self.park(self.clock() + seconds)

    def wake(self, fiber: Fiber) -> None:
        """Wake a waiting fiber, at its own time."""
        if fiber.is_parked and not fiber.is_woken:
            fiber.is_woken = True
            if fiber.clock > self.now:
                self.at(fiber.clock, self.resume, fiber, True)
            else:
                self._ready.append(fiber)

    def spend(self, seconds: float) -> None:
        fiber: Fiber = getcurrent()
        if fiber is self.hub:
            return
        process = fiber.process
        if process.code is not None:
            raise GreenletExit
        seconds *= process.host.slowness
        process.computed += seconds
        cores = process.host.cores
        if cores is None:
            fiber.clock += seconds
        else:
            if fiber.clock > self.now:  # cores are assigned in the order of time
                self.park(fiber.clock)
            free = min(range(len(cores)), key=cores.__getitem__)
            fiber.clock = cores[free] = max(fiber.clock, cores[free]) + seconds

    def close(self) -> None:
        for process in list(self.processes.values()):
            process.end(-signal.SIGKILL)
        for process in list(self.processes.values()):
            process._reap()


def me() -> Process:
    """Return the running process; raise if it has ended."""
    process: Process = getcurrent().process
    if process.code is not None:
        raise GreenletExit
    return process


class _Environ(Mapping[str, str]):
    """The environment of the running process."""

    def __getitem__(self, name: str) -> str:
        return me().environ[name]

    def __iter__(self) -> Iterator[str]:
        return iter(me().environ)

    def __len__(self) -> int:
        return len(me().environ)


def _system(world: World) -> dict[str, Any]:  # noqa: PLR0915 - a table of small functions
    """Return time, processes and signals of ``world``."""

    def monotonic() -> float:
        fiber = getcurrent()
        fiber.clock += RUNNING  # a loop that only reads the clock ends as well
        return float(fiber.clock)

    def read_text(path: str) -> str:
        if path.endswith("boot_id"):
            return f"{me().host.name:0>36}\n"
        pid = path.split("/")[2]
        process = world.processes.get(int(pid)) if pid.isdecimal() else None
        if process is None or process.host is not me().host or process.code is not None:
            raise FileNotFoundError(path)
        return f"{pid} (rank) R {' 0' * 18} {pid} 0"

    def readlink(path: str) -> str:
        return f"{path.rpartition('/')[2]}:[4026531836]"

    def popen(
        command: Any, env: Mapping[str, str] | None = None, **options: Any
    ) -> SimpleNamespace:
        parent, files = me(), world.files
        world.spend(FORK)
        if env is None:
            assert world.ssh is not None
            return world.ssh(command)
        assert world.program is not None
        child = parent.child(lambda: 0, env)
        child.main = world.program(child, command)
        passed = (options.get("stdout"), options.get("stderr"), *options.get("pass_fds", ()))
        for number in (item for item in passed if item in files):
            copied = str(files[number].copy(child))
            for name, value in child.environ.items():
                if value == str(number):  # it names an inherited descriptor
                    child.environ[name] = copied
        return SimpleNamespace(pid=child.pid, returncode=None, stdin=None)

    def waitid(_: int, __: int, options: int) -> SimpleNamespace | None:
        children = me().children
        for pid, child in children.items():
            if child.code is not None:
                if not options & os.WNOWAIT:
                    del children[pid]
                reason = os.CLD_EXITED if child.code >= 0 else os.CLD_KILLED
                return SimpleNamespace(si_pid=pid, si_status=abs(child.code), si_code=reason)
        if not children:
            raise ChildProcessError
        return None

    def kill(pid: int, number: int) -> None:
        process = me().children.get(pid) or me().host.processes.get(pid)
        if process is None:
            raise ProcessLookupError(ESRCH, "no such process")
        world.at(world.clock(), process.receive, number)

    def handle(number: int, handler: Any) -> Any:
        before = me().handlers.get(number, signal.SIG_DFL)
        me().handlers[number] = handler
        return before

    def setitimer(_: int, seconds: float, interval: float = 0.0) -> None:
        process = me()
        process.interval = interval
        if seconds:
            world.at(world.clock() + seconds, process.tick, interval)

    def set_wakeup_fd(descriptor: int, warn_on_full_buffer: bool = True) -> None:
        me().wakeup = descriptor

    def thread(target: Callable[..., Any], args: tuple[Any, ...] = (), **_: Any) -> SimpleNamespace:
        process, fibers = me(), list[Fiber]()
        start = lambda: fibers.append(process.spawn(lambda: target(*args)))  # noqa: E731

        def join(timeout: float = math.inf) -> None:
            while not fibers[0].dead and timeout > 0:
                world.sleep(0.001)
                timeout -= 0.001

        return SimpleNamespace(start=start, join=join, is_alive=lambda: not fibers[0].dead)

    return {
        "monotonic": monotonic,
        "wall_clock": monotonic,
        "sleep": world.sleep,
        "read_text": read_text,
        "readlink": readlink,
        "environ": _Environ(),
        "getpid": lambda: me().pid,
        "children": lambda: list(me().children),
        "gethostname": lambda: me().host.name,
        "random_bytes": world.random.randbytes,
        "addresses": lambda: [("lo", "127.0.0.1", True), ("eth0", me().host.address, True)],
        "if_nameindex": lambda: [(1, "lo"), (2, "eth0")],
        "isatty": lambda _: False,
        "Popen": popen,
        "waitid": waitid,
        "kill": kill,
        "killpg": kill,
        "signal": handle,
        "getsignal": lambda number: me().handlers.get(number, signal.SIG_DFL),
        "setitimer": setitimer,
        "getitimer": lambda _: (0.0, me().interval),
        "set_wakeup_fd": set_wakeup_fd,
        "Thread": thread,
    }


@contextmanager
def installed(world: World) -> Iterator[World]:
    """Let the package use ``world`` in place of the operating system."""
    from tests.simulation.network import network_of

    replacements = {**_system(world), **network_of(world)}
    before = {name: getattr(system, name) for name in replacements}
    for name, value in replacements.items():
        setattr(system, name, value)
    try:
        yield world
    finally:
        world.close()
        for name, value in before.items():
            setattr(system, name, value)
