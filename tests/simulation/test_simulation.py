"""The control plane in virtual time: random faults cause neither a hang nor a wrong name."""

import signal
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from socket import AF_INET, AF_UNIX, IPPROTO_TCP, TCP_USER_TIMEOUT
from subprocess import Popen

import pytest

from flashlight_py import system
from flashlight_py.distributed.rendezvous.stores import TcpStore
from tests.simulation.faults import trial
from tests.simulation.grouping import Grouping
from tests.simulation.launching import Launch, lose
from tests.simulation.network import WINDOW, WINDOW_INSIDE, Socket, divide
from tests.simulation.scenario import PORT, Start, gather
from tests.simulation.world import Process, World, installed, me


@pytest.mark.parametrize(
    "seeds", [range(32), pytest.param(range(32, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_schedules_of_faults_end_correctly(seeds: range) -> None:
    """``make simulate SEED=... RANKS=64`` repeats a failure."""
    results = {seed: trial(seed)[2] for seed in seeds}
    assert {seed: wrong for seed, wrong in results.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "ranks"), [(8636, 64), (227, 128), (5363, 256)])
def test_schedule_that_failed_before_ends_correctly(seed: int, ranks: int) -> None:
    """Seeds that found defects: late ranks waited for rank 0, or named a wrong rank."""
    assert trial(seed, ranks)[2] == []


def test_simulation_repeats_all_messages_for_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the launcher tried to end a child of the test process."""
    sent = list[bytes]()

    def transmit(end: Socket, data: bytes | None) -> None:
        sent.append(f"{end.world.clock()!r} {end.host.name} {data!r}".encode())
        plain(end, data)

    plain = Socket._transmit
    monkeypatch.setattr(Socket, "_transmit", transmit)

    def run() -> str:
        sent.clear()
        launch = Launch(hosts=4, seed=8, per_host=2, min_n=1)
        launch.world.at(3.0, lambda: launch.agents[4].end(-signal.SIGKILL))
        assert launch.run(until=60.0).starts == {8: 8, 6: 6}
        return sha256(b"\n".join(sent)).hexdigest()

    first = run()
    with Popen(["sleep", "60"]) as child:
        monkeypatch.setenv("FLASHLIGHT_TREE_FROM", "2")
        again = run()
        child.kill()
    assert first == again


@pytest.mark.parametrize("tree", ["2", "512"])
def test_rendezvous_names_a_rank_that_dies_between_exchanges_at_once(tree: str) -> None:
    start = Start(64, seed=2, begin=gather, FLASHLIGHT_TREE_FROM=tree)
    start.dies = 5, 3
    start.run()
    assert start.errors.keys() == set(range(64)) - {5}
    assert all("rank 5 of 64" in str(error) for error in start.errors.values())
    assert max(start.ended.values()) < start.died + 1.0


@pytest.mark.parametrize(("tree", "at"), [("2", 0.008), ("512", 0.012)])
def test_rendezvous_reports_a_silent_host_after_host_timeout(tree: str, at: float) -> None:
    start = Start(64, seed=3, begin=gather, FLASHLIGHT_TREE_FROM=tree)
    start.world.at(at, partial(divide, start.world, [start.hosts[2]], 1))
    start.run()
    far = [rank for rank in range(64) if start.host_of(rank) is start.hosts[2]]
    assert all("cannot be reached for 5 s" in str(error) for error in start.errors.values())
    assert all("rank 0" in str(start.errors[rank]) for rank in far)
    assert max(start.ended.values()) < 6.0


@pytest.mark.parametrize(("ranks", "tree"), [(64, "512"), (128, "2")])
def test_start_needs_few_connections(ranks: int, tree: str) -> None:
    """Without a tree, rank 0 connects to all ranks."""
    start = Start(ranks, seed=1, FLASHLIGHT_TREE_FROM=tree).run()
    assert start.up.keys() == set(range(ranks))
    assert max(start.up.values()) < 1.0
    assert tree == "2" or start.processes[0].most_connections >= 63
    assert max(process.most_connections for process in start.processes) <= 64 + 8


def test_rank_0_names_ranks_that_do_not_leave_the_tree() -> None:
    """The rank stops in the middle of the tree, or below it, after all exchanges."""
    for stopped in (8, 12, 32):

        def begin(rank: int, size: int, timeout: float, stopped: int = stopped) -> None:
            store = TcpStore("host1", PORT, rank, size, timeout)
            store.local_rank = rank % 8
            store.exchange(b"")
            if rank == stopped:
                me().world.park()
            store.close()

        start = Start(64, seed=2, begin=begin, timeout=5.0, FLASHLIGHT_TREE_FROM="2")
        start.run(until=20.0)
        assert set(start.up) == set(range(1, 64)) - {stopped}
        assert f"rank {stopped} joined and did not leave" in str(start.errors[0])


def _between_two(
    serve: Callable[[Socket], object], ask: Callable[[Socket], object], inside: bool, stopped: float
) -> World:
    """Run two connected processes; the server is stopped for a while from 1 s on."""
    world, name = World(), "\0name" if inside else ("10.0.0.1", PORT)

    def listen() -> None:
        listener = Socket(AF_UNIX if inside else AF_INET)
        listener.bind(name)
        listener.listen(1)
        listener.wait(None)
        serve(listener.accept()[0])

    def connect() -> None:
        system.sleep(0.5)
        wire = Socket(AF_UNIX if inside else AF_INET)
        wire.connect_ex(name)
        system.sleep(1.0)  # the server is stopped
        ask(wire)

    with installed(world):
        one = world.add_host()
        server = Process(one, listen, {})
        client = Process(one if inside else world.add_host(), connect, {})
        world.at(1.0, server.receive, signal.SIGSTOP)
        world.at(stopped, server.receive, signal.SIGCONT)
        world.run()
    for process in (server, client):
        if process.error is not None:
            raise process.error
    return world


@pytest.mark.parametrize(("inside", "large"), [(True, False), (False, True)])
def test_sender_blocks_if_the_window_is_full(inside: bool, large: bool) -> None:
    window = WINDOW_INSIDE if inside else WINDOW
    sent, taken = bytes(3 * window) if large else bytes(window // 2), list[bytes]()
    count, waited = 1 if large else 3, list[float]()

    def serve(wire: Socket) -> None:
        while data := wire.recv(1 << 30):
            taken.append(data)

    def ask(wire: Socket) -> None:
        wire.settimeout(10.0)
        for _ in range(count):
            wire.sendall(sent)
            waited.append(system.monotonic())
        wire.close()

    _between_two(serve, ask, inside, stopped=4.0)
    assert b"".join(taken) == count * sent
    assert all(when < 1.6 for when in waited[: count - 1])
    assert 4.0 < waited[-1] < 4.1


def test_connection_ends_if_the_window_stays_full() -> None:
    """``TCP_USER_TIMEOUT`` also limits unread data, but only if the window is full."""
    ended = list[float]()

    def serve(wire: Socket) -> None:
        system.sleep(1.0)  # the server is stopped meanwhile
        wire.sendall(b"still here")
        system.sleep(0.1)
        with pytest.raises(ConnectionResetError):
            wire.sendall(b"still here")

    def ask(wire: Socket) -> None:
        wire.setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, 5000)
        wire.sendall(bytes(WINDOW))
        system.sleep(10.0)
        with pytest.raises(TimeoutError, match="Connection timed out"):
            wire.sendall(b"more")
        ended.append(system.monotonic())

    _between_two(serve, ask, inside=False, stopped=30.0)
    assert 16.4 < ended[0] < 16.6


@pytest.mark.parametrize("members", [range(72), range(0, 72, 8), range(8), [70, 3, 31], [5]])
def test_new_group_of_many_ranks_needs_few_connections(members: Sequence[int]) -> None:
    """Seven for each digit of the number of members in base 8, and one to the parent."""
    grouping = Grouping(72, 1, list(members)).run()
    assert grouping.errors == {}
    assert grouping.up.keys() == set(range(72))
    made = grouping.made()
    assert made.seconds < 0.1
    assert made.connections <= 15


def test_new_group_of_many_ranks_raises_if_members_differ() -> None:
    grouping = Grouping(72, 1, list(range(72)))
    grouping.members_of[5] = [*range(70), 71, 70]
    error = str(grouping.run().errors[71])
    assert "rank 5: new_group [0, 1, 2" in error
    assert "of 72 ranks (digest" in error


def test_flrun_ends_all_ranks_of_all_hosts_if_one_dies() -> None:
    launch = Launch(hosts=8, seed=5)
    launch.world.at(5.0, lambda: launch.ranks[61].end(-signal.SIGKILL))
    launch.run()
    assert launch.up.keys() == set(range(64))
    ends = [rank.ended_at for rank in launch.ranks.values()]
    assert 5.0 <= max(ends) < 5.1
    assert launch.launcher.code == 128 + signal.SIGKILL
    assert all(agent.code is not None for agent in launch.agents.values())
    assert b"rank 61 of 64 on host9 was killed by SIGKILL" in b"".join(launch.said)


@pytest.mark.parametrize("fate", ["kill", "cut"])
def test_flrun_restarts_without_lost_hosts(fate: str) -> None:
    """With the maximum number of hosts; the launcher needs four descriptors for each."""
    launch = Launch(hosts=64, seed=7, per_host=1, meets=False, min_n=1)
    for host in (1, 2, 9):
        if fate == "kill":
            launch.world.at(3.0, lambda host=host: launch.agents[host].end(-signal.SIGKILL))
        else:
            launch.world.at(3.0, divide, launch.world, [launch.world.hosts[host]], 1)
    launch.run(60.0, lambda: launch.starts[61] == 61)
    assert launch.starts == {64: 64, 61: 61}


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_flrun_continues_with_the_remaining_hosts(seeds: range) -> None:
    results = {seed: lose(seed) for seed in seeds}
    assert {seed: wrong for seed, wrong in results.items() if wrong} == {}
