"""A launcher on each node: how those of other nodes connect to that of node 0, and lose it."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.rendezvous.file_store import FileStore
from tests.launch.launcher import launch, write
from tests.launch.test_launcher_hosts import ALL_REDUCE, on_each_node, start_node, wait_for


def test_the_connections_of_a_meeting_outlive_it(tmp_path: Path) -> None:
    """Whatever node 0 sends at once is for the other end, and nothing of the meeting is left."""

    def meet(rank: int) -> dict[int, socket.socket]:
        store = FileStore(tmp_path / "run", rank, 3, timeout=20.0)
        store.exchange(b"")
        found = store.node.hand_over()
        for each in found.values() if rank == 0 else ():
            each.sendall(b"first")
        return found

    with ThreadPoolExecutor(3) as threads:
        of_node_0, *others = threads.map(meet, range(3))
    assert sorted(of_node_0) == [1, 2]
    for node, found in enumerate(others, start=1):
        with of_node_0[node] as ours, found[0] as theirs:
            assert theirs.recv(5) == b"first"
            theirs.sendall(b"answer")
            assert ours.recv(6) == b"answer"
    assert not list(tmp_path.glob("run*"))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_launchers_may_meet_at_a_port_of_node_0(tmp_path: Path) -> None:
    place = f"localhost:{free_port()}"
    first, second = on_each_node(place, write(tmp_path, ALL_REDUCE))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == "[0] 0 3 0 \n"
    assert sorted(second.stdout.splitlines()) == ["[1] 1 3 0 ", "[2] 2 3 1 "]


def test_at_a_port_that_other_hosts_reach_a_secret_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = write(tmp_path, "print('hi')")
    for done in on_each_node(f"127.0.0.2:{free_port()}", program):
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("flrun: --rdzv 127.0.0.2:")
        assert "MASTER_SECRET" in done.stderr
    monkeypatch.setenv("MASTER_SECRET", "of the job")
    for done in on_each_node(f"127.0.0.2:{free_port()}", program):
        assert (done.returncode, done.stderr) == (0, "")


INNER = """
import os, socket, subprocess, sys
import flashlight_py as fl

fl.distributed_init()
if len(sys.argv) > 1:  # of the inner launch
    sys.stdout.write(f"inner {fl.get_world_rank()} {fl.all_reduce(1)}\\n")  # at once, whole
elif fl.get_world_rank() == 0:
    with socket.create_server((os.environ["MASTER_ADDR"], 0)) as free:
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "inner"]
    numbers = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [subprocess.Popen(command, env=os.environ | sizes | each) for each in numbers]
    print("codes", [each.wait() for each in ranks])
fl.barrier()
"""


def test_a_launcher_in_a_rank_chooses_another_port_of_the_host(tmp_path: Path) -> None:
    """By MASTER_PORT alone: the rest its ranks inherit."""
    first, second = on_each_node(f"localhost:{free_port()}", write(tmp_path, INNER))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    *inner, last = first.stdout.splitlines()
    assert sorted(inner) == ["[0] inner 0 2", "[0] inner 1 2"]
    assert last == "[0] codes [0, 0]"


WAITING = """
import os, pathlib, signal, subprocess, sys
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path(sys.argv[1], "ready-" + os.environ["RANK"]).touch()
signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "node"),
    [
        (signal.SIGINT, 1),
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_launcher_ends_all(
    tmp_path: Path, node: int, number: signal.Signals
) -> None:
    """The fixture of this folder looks for processes and files that are left."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    program = write(tmp_path, WAITING)
    nodes = [start_node(each, meeting, "--grace", 1, program, tmp_path) for each in range(2)]
    for rank in range(3):
        wait_for(tmp_path, f"ready-{rank}")
    nodes[node].send_signal(number)
    errors = [each.communicate(timeout=20)[1] for each in nodes]
    name = "SIGTERM" if number == signal.SIGKILL else number.name
    for each in errors:
        assert each.endswith(f"flrun: interrupted by {name}; all ranks were ended\n")
    codes = [128 + signal.Signals[name]] * 2
    if number == signal.SIGKILL:
        codes[node] = -number
    assert [each.returncode for each in nodes] == codes
    assert list(meeting.iterdir()) == []


def test_node_0_is_killed(tmp_path: Path) -> None:
    """The process that has the ranks, at once and for good."""
    program = write(tmp_path, WAITING)
    nodes = [start_node(each, tmp_path / "run", program, tmp_path) for each in range(2)]
    for rank in range(3):
        wait_for(tmp_path, f"ready-{rank}")
    children = Path(f"/proc/{nodes[0].pid}/task/{nodes[0].pid}/children").read_text()
    os.kill(int(children), signal.SIGKILL)
    errors = [each.communicate(timeout=20)[1] for each in nodes]
    assert [each.returncode for each in nodes] == [137, 1]
    last = "flrun: the connection to the launcher of node 0 has ended; its ranks here were ended"
    assert errors[1].splitlines()[-1] == last


def test_a_program_that_cannot_be_run_on_one_node(tmp_path: Path) -> None:
    there, absent = ["--no-python", "sleep", "60"], ["--no-python", "/no/such/program"]
    nodes = [start_node(0, tmp_path / "run", *there), start_node(1, tmp_path / "run", *absent)]
    errors = [each.communicate(timeout=20)[1] for each in nodes]
    assert [each.returncode for each in nodes] == [127, 127]
    for each in errors:
        assert "flrun: cannot run /no/such/program: " in each


def test_output_that_cannot_be_written_on_one_node_ends_all(tmp_path: Path) -> None:
    program = write(tmp_path, "import signal\nprint('hi')\nsignal.pause()\n")
    node = start_node(0, tmp_path / "run", program)
    with open("/dev/full", "w") as full:
        other = start_node(1, tmp_path / "run", program, stdout=full)
    errors = [each.communicate(timeout=20)[1] for each in (node, other)]
    assert [node.returncode, other.returncode] == [141, 141]
    assert "flrun: standard output cannot be written: No space left on device" in errors[1]
    for each in errors:
        assert "flrun: the output of the ranks is lost; all ranks were ended" in each


NOTIFIED = """
import os, pathlib, signal, sys
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def end(*_):
    sys.exit(0 if (folder / f"expects-{rank}").exists() else 3)
signal.signal(signal.SIGUSR1, end)
(folder / f"ready-{rank}").touch()
while True:
    signal.pause()
"""


def test_a_signal_that_ends_nothing_reaches_the_ranks_of_its_launcher(tmp_path: Path) -> None:
    program = write(tmp_path, NOTIFIED)
    nodes = [start_node(each, tmp_path / "run", program, tmp_path) for each in range(2)]
    for rank in range(3):
        wait_for(tmp_path, f"ready-{rank}")
    for node, ranks in ((0, [0]), (1, [1, 2])):
        for rank in ranks:
            (tmp_path / f"expects-{rank}").touch()
        nodes[node].send_signal(signal.SIGUSR1)
    errors = [each.communicate(timeout=20)[1] for each in nodes]
    assert ([each.returncode for each in nodes], errors) == ([0, 0], ["", ""])


OTHER_LIBRARY = """
import os, socket, sys, time
import numpy as np
import flashlight_py as fl
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, restarts = int(os.environ["RANK"]), os.environ["FLASHLIGHT_RESTART_COUNT"]
any_port = [socket.create_server(("", 0)) for _ in range(20)]
assert port not in [each.getsockname()[1] for each in any_port]
if rank == 0:
    with socket.create_server(("", port)) as server:
        met = [server.accept()[0] for _ in range(1, int(os.environ["WORLD_SIZE"]))]
else:
    while (connection := socket.socket()).connect_ex((host, port)):
        connection.close()
        time.sleep(0.01)
fl.distributed_init()
fl.barrier()
print("met", port, flush=True)
fl.barrier()
sys.exit(int(rank > 0) if restarts == "0" else 0)
"""


@pytest.mark.parametrize("way", ["one host", "ssh", "a path", "a port"])
def test_another_library_has_a_port_to_meet_at(tmp_path: Path, way: str) -> None:
    """Of each start another one, which ours does not use, and nobody else is given."""
    program = write(tmp_path, OTHER_LIBRARY)
    stand_in = write(tmp_path, 'exec sh -c "$2"\n', "ssh")
    if way in ("one host", "ssh"):
        hosts = ("--hosts", "a,b", "--ssh", f"sh {stand_in}") if way == "ssh" else ("-n", 2)
        outputs = [launch("--max-restarts", 1, *hosts, program)]
    else:
        place = tmp_path / "meet" if way == "a path" else f"localhost:{free_port()}"
        outputs = on_each_node(place, "--max-restarts", 1, program)
    assert all(done.returncode == 0 for done in outputs), outputs
    ports = Counter(re.findall(r"met (\d+)", "".join(done.stdout for done in outputs)))
    assert list(ports.values()) == ([2, 2] if len(outputs) == 1 else [3, 3])


def other_library(rank: int) -> tuple[str, int]:
    """Return where ranks of another library meet, where nobody listens yet."""
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        socket.create_server(("", port)).close()
    assert fl.all_reduce(np.ones(1)) == 2
    return os.environ["MASTER_ADDR"], port


def test_so_have_the_ranks_of_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    first, second = (set(fl.spawn(other_library, nprocs=2)) for _ in range(2))
    assert len(first) == len(second) == 1
    assert first != second
    assert {address for address, _ in first | second} == {"127.0.0.1"}
