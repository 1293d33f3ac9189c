"""Many hosts: agents in a tree, over ssh or of launchers that meet. All hosts are this one.

Trees begin with few hosts here, and each process has two below it. The fixture of this folder looks
for processes that are left.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launcher import LAUNCH_TREE, write
from tests.launch.test_launcher_hosts import wait_for
from tests.launch.test_launcher_nodes import free_port

# Many processes take a while on few cores.
SECONDS = 120.0
# HOSTS in the order of the ranks. h0 and h4 are right below the launcher, then h1, h2, h5 and h6.
HOSTS = ",".join(f"h{i}" for i in range(8))
BEHIND = {"": {"h0", "h4"}, "h0": {"h1", "h2"}, "h2": {"h3"}, "h4": {"h5", "h6"}, "h6": {"h7"}}
SUM = """
import os, sys
import numpy as np
import flashlight_py as fl
fl.distributed_init()
print(fl.get_world_rank(), int(fl.all_reduce(np.ones(1))[0]), sys.stdin.readline().strip())
"""
# The first time all stay until something happens to them; then they leave.
STAYING = """
import os, pathlib, signal, subprocess, sys
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
if os.environ["FLASHLIGHT_RESTART_COUNT"] == "0":
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    (folder / f"ready-{rank}").write_text(str(os.getpid()))
    signal.pause()
print("again", rank, os.environ["WORLD_SIZE"])
"""


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """``ssh HOST COMMAND``: notes in a log who reaches whom, and where the agent is.

    A file down-HOST, or down-HOST-from-HOST, keeps a host from being reached.
    """
    stand_in = f"""
    echo "$1 from $AT" >> {tmp_path}/log
    [ -e {tmp_path}/down-$1 ] || [ -e {tmp_path}/down-$1-from-$AT ] && exit 255
    echo $$ > {tmp_path}/pid-$1
    AT=$1; export AT
    exec sh -c "$2"
    """
    return f"sh {write(tmp_path, stand_in, 'ssh')}"


def start(*arguments: object, stdin: int = subprocess.DEVNULL) -> Any:
    return subprocess.Popen(
        [*LAUNCH_TREE, *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def edges(folder: Path) -> list[tuple[str, str]]:
    """Who was reached, and from where."""
    lines = (folder / "log").read_text().splitlines()
    return [(line.split(" from")[0], line.split(" from")[1].strip()) for line in lines]


def wait_for_ranks(folder: Path, count: int) -> None:
    for rank in range(count):
        wait_for(folder, f"ready-{rank}", SECONDS)


def copy_of(front: int) -> int:
    """The process that works for a launcher, or an agent."""
    return int(Path(f"/proc/{front}/task/{front}/children").read_text().split()[0])


def test_agents_reach_others(tmp_path: Path, ssh: str) -> None:
    program = write(tmp_path, SUM)
    process = start("--hosts", HOSTS, "--ssh", ssh, program, stdin=subprocess.PIPE)
    output, errors = process.communicate("typed\n", timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    expected = ["[0] 0 8 typed", *(f"[{rank}] {rank} 8 " for rank in range(1, 8))]
    assert sorted(output.splitlines()) == expected
    found = edges(tmp_path)
    assert {(name, above) for above, names in BEHIND.items() for name in names} == set(found)
    assert len(found) == 8


@pytest.mark.slow
def test_all_that_is_printed_far_down_arrives(tmp_path: Path, ssh: str) -> None:
    text = "import os\nfor i in range(3000): print(os.environ['RANK'] * 500, i)\n"
    process = start("--hosts", HOSTS, "--ssh", ssh, write(tmp_path, text))
    output, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    for rank in range(8):
        found = [line for line in output.splitlines() if line.startswith(f"[{rank}]")]
        assert found == [f"[{rank}] {str(rank) * 500} {i}" for i in range(3000)]


def test_a_rank_that_fails_far_down_is_named(tmp_path: Path, ssh: str) -> None:
    program = write(
        tmp_path,
        """
        import os, signal, sys
        if os.environ["RANK"] == "7":
            sys.exit(7)
        signal.pause()
        """,
    )
    process = start("--hosts", HOSTS, "--ssh", ssh, program)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 7
    assert errors == "flrun: rank 7 of 8 on h7 exited with code 7; the other ranks were ended\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_reach_all(tmp_path: Path, ssh: str, number: signal.Signals) -> None:
    process = start("--hosts", HOSTS, "--ssh", ssh, write(tmp_path, STAYING), tmp_path)
    wait_for_ranks(tmp_path, 8)
    process.send_signal(number)
    _, errors = process.communicate(timeout=SECONDS)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "flrun: interrupted by SIGINT; all ranks were ended" in errors


@pytest.mark.parametrize("name", ["h0", "h2"])
def test_an_agent_in_between_is_killed(tmp_path: Path, ssh: str, name: str) -> None:
    """Its host is lost; those behind it are reached from elsewhere."""
    program = write(tmp_path, STAYING)
    process = start("--hosts", HOSTS, "--ssh", ssh, "--min-n", 1, program, tmp_path)
    wait_for_ranks(tmp_path, 8)
    os.kill(copy_of(int((tmp_path / f"pid-{name}").read_text())), signal.SIGKILL)
    output, errors = process.communicate(timeout=SECONDS)
    lines = [line for line in errors.splitlines() if line.startswith("flrun: rank")]
    assert lines[0].startswith(f"flrun: rank {name[1:]} of 8 on {name} is lost: ssh to {name} ")
    assert process.returncode == 0, errors
    assert "flrun: starting again with 7 rank(s), for the 1st time" in errors
    assert sorted(output.splitlines()) == [f"[{rank}] again {rank} 7" for rank in range(7)]


@pytest.mark.slow
def test_a_job_whose_agent_in_between_is_killed_ends(tmp_path: Path, ssh: str) -> None:
    process = start("--hosts", HOSTS, "--ssh", ssh, write(tmp_path, STAYING), tmp_path)
    wait_for_ranks(tmp_path, 8)
    os.kill(copy_of(int((tmp_path / "pid-h4").read_text())), signal.SIGKILL)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "flrun: rank 4 of 8 on h4 is lost: ssh to h4 " in errors


def test_a_host_that_an_agent_cannot_reach(tmp_path: Path, ssh: str) -> None:
    """It is reached from the launcher; who was to be reached by it, from who was to reach it."""
    (tmp_path / "down-h2-from-h0").touch()
    process = start("--hosts", HOSTS, "--ssh", ssh, write(tmp_path, SUM))
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert output.count("\n") == 8
    words = "flrun: warning: host h0 cannot reach host h2 (ssh to h2 exited with code 255); it is "
    assert f"{words}reached from here" in errors
    found = edges(tmp_path)
    assert ("h2", "") in found
    assert ("h3", "h0") in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h0", "h2"])
def test_a_host_that_is_down(tmp_path: Path, ssh: str, name: str) -> None:
    (tmp_path / f"down-{name}").touch()
    process = start("--hosts", HOSTS, "--ssh", ssh, "--min-n", 1, write(tmp_path, SUM))
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert f"on {name} is lost: ssh to {name} exited with code 255" in errors
    assert errors.count("flrun: starting again") == 1
    assert output.count("\n") == 7


# Launchers that meet --------------------------------------------------------------------------


def start_nodes(rdzv: object, *arguments: object) -> list[Any]:
    """Start seven: two are right below node 0, and four below these."""
    command = ("-n1", "--nnodes=7", f"--rdzv={rdzv}")
    return [start(*command, f"--node-rank={node}", *arguments) for node in range(7)]


def ends_of(nodes: list[Any]) -> list[Any]:
    """The code, output and errors of each."""
    return [(*each.communicate(timeout=SECONDS), each.returncode) for each in nodes]


def parents(nodes: list[Any]) -> dict[int, int]:
    """The node above each, by their connections, both ends of which are here."""
    owners: dict[str, int] = {}
    for node, each in enumerate(nodes):
        for file in Path(f"/proc/{copy_of(each.pid)}/fd").iterdir():
            owners[os.readlink(file)] = node
    ends: dict[tuple[str, str], int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "01" and f"socket:[{words[9]}]" in owners:  # established
            ends[words[1], words[2]] = owners[f"socket:[{words[9]}]"]
    joined = {(node, ends[there, here]) for (here, there), node in ends.items()}
    above: dict[int, int] = {}
    level = {0}
    while level:
        new = {below: at for at, below in joined if at in level and below and below not in above}
        above |= new
        level = set(new)
    return above


def place_of(tmp_path: Path, way: str) -> object:
    return tmp_path / "run" if way == "path" else f"localhost:{free_port()}"


@pytest.mark.parametrize("way", [pytest.param("path", marks=pytest.mark.slow), "port"])
def test_launchers_in_a_tree(tmp_path: Path, way: str) -> None:
    done = ends_of(start_nodes(place_of(tmp_path, way), write(tmp_path, SUM)))
    assert [(code, errors) for _, errors, code in done] == [(0, "")] * 7
    assert sorted(output for output, _, _ in done) == [f"[{rank}] {rank} 7 \n" for rank in range(7)]
    assert not list(tmp_path.glob("run*"))


@pytest.mark.slow
def test_launchers_in_a_tree_number_themselves(tmp_path: Path) -> None:
    rdzv, program = f"localhost:{free_port()}", write(tmp_path, SUM)
    nodes = [start("-n1", "--nnodes=7", "--rdzv", rdzv, program) for _ in range(7)]
    done = ends_of(nodes)
    assert [(code, errors) for _, errors, code in done] == [(0, "")] * 7
    assert sorted(output for output, _, _ in done) == [f"[{rank}] {rank} 7 \n" for rank in range(7)]


@pytest.mark.parametrize("way", ["path", pytest.param("port", marks=pytest.mark.slow)])
def test_a_launcher_in_between_is_killed(tmp_path: Path, way: str) -> None:
    program, rdzv = write(tmp_path, STAYING), place_of(tmp_path, way)
    nodes = start_nodes(rdzv, "--min-n", 1, program, tmp_path)
    wait_for_ranks(tmp_path, 7)
    above = parents(nodes)
    assert sorted(above) == list(range(1, 7))
    assert sorted(map(list(above.values()).count, range(7)))[-3:] == [2, 2, 2]
    victim = next(node for node in above.values() if node)
    os.kill(copy_of(nodes[victim].pid), signal.SIGKILL)
    done = ends_of(nodes)
    errors = done[0][1]
    assert f"rank {victim} of 7 " in errors
    assert f"is lost: the connection to its launcher (node {victim}) has ended" in errors
    assert "flrun: starting again with 6 rank(s), for the 1st time" in errors
    assert [code for _, _, code in done] == [137 if i == victim else 0 for i in range(7)], done
    lines = sorted(line.partition("] ")[2] for output, _, _ in done for line in output.splitlines())
    assert lines == [f"again {rank} 6" for rank in range(6)]


@pytest.mark.slow
def test_node_0_of_a_tree_is_killed(tmp_path: Path) -> None:
    nodes = start_nodes(tmp_path / "run", write(tmp_path, STAYING), tmp_path)
    wait_for_ranks(tmp_path, 7)
    os.kill(copy_of(nodes[0].pid), signal.SIGKILL)
    done = ends_of(nodes)
    assert [code for _, _, code in done] == [137, *[1] * 6]


@pytest.mark.slow
def test_a_signal_to_a_launcher_far_down_ends_all(tmp_path: Path) -> None:
    nodes = start_nodes(tmp_path / "run", write(tmp_path, STAYING), tmp_path)
    wait_for_ranks(tmp_path, 7)
    above = parents(nodes)
    leaf = next(node for node in above if node not in above.values())
    nodes[leaf].send_signal(signal.SIGINT)
    done = ends_of(nodes)
    assert [code for _, _, code in done] == [130] * 7
    for _, errors, _ in done:
        assert errors.endswith("flrun: interrupted by SIGINT; all ranks were ended\n")
