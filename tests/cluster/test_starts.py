"""The ways to start ranks on two hosts, over a real network and a real ssh."""

import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.cluster.hosts import Cluster, Host
from tests.launch.launcher import LAUNCH, write

PROGRAM = """
import os
import numpy as np
import flashlight_py as fl
fl.distributed_init()
print(os.uname().nodename, fl.get_world_rank(), int(fl.all_reduce(np.ones(100_000))[-1]))
"""
EXPECTED = ["[0] h0 0 4", "[1] h0 1 4", "[2] h1 2 4", "[3] h1 3 4"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["4", "6"], ids=["IPv4", "IPv6"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(2, families=request.param) as made:
        for host in made:
            host.sshd()
        write(made.folder, PROGRAM)
        yield made


def run_all(commands: Sequence[tuple[Host, Sequence[object]]], **env: str) -> list[str]:
    """Run a command in each host at the same time; return the lines of all."""
    running = [
        host.popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, command in commands
    ]
    done = [(process.communicate(timeout=60), process.returncode) for process in running]
    assert all(code == 0 for _, code in done), "\n".join(err for (_, err), _ in done)
    return sorted(line for (out, _), _ in done for line in out.splitlines())


def test_one_launcher_over_ssh(cluster: Cluster) -> None:
    command = [*LAUNCH, "--hosts", "h0:2,h1:2", "--ssh", " ".join(cluster.ssh)]
    assert run_all([(cluster[0], [*command, cluster.folder / "program.py"])]) == EXPECTED


def test_variables_set_by_hand(cluster: Cluster) -> None:
    def started(rank: int) -> tuple[Host, list[object]]:
        env = ["env", f"RANK={rank}", "WORLD_SIZE=4", "MASTER_ADDR=h0", "MASTER_PORT=29501"]
        return cluster[rank // 2], [*env, sys.executable, cluster.folder / "program.py"]

    lines = run_all([started(rank) for rank in range(4)], MASTER_SECRET="of this test")
    assert [f"[{rank}] {line}" for rank, line in enumerate(lines)] == EXPECTED
