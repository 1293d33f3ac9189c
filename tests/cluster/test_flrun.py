"""``flrun`` on real networks: cut cables, missing hosts, one port."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster, Host
from tests.launch.launcher import LAUNCH, write

PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
}
# Ranks call until an event; the ranks of a second start call once.
CALLING = """
import os, sys, time
import numpy as np
import flashlight_py as fl
fl.distributed_init()
print("begun", fl.get_world_size(), flush=True)
while os.environ["FLASHLIGHT_RESTART_COUNT"] == "0":
    fl.all_reduce(np.ones(1))
    time.sleep(0.01)
print("sum", int(fl.all_reduce(np.ones(1))[0]))
"""
MISMATCH = """
import numpy as np
import flashlight_py as fl
fl.distributed_init()
fl.all_reduce(np.ones(1))
fl.all_reduce(np.ones(2 if fl.get_world_rank() < 2 else 3))
"""
SUM = """
import numpy as np
import flashlight_py as fl
fl.distributed_init()
print(fl.get_world_rank(), int(fl.all_reduce(np.ones(1))[0]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        for host in cluster:
            host.sshd()
        yield cluster


def start(cluster: Cluster, hosts: str, *arguments: object) -> subprocess.Popen[str]:
    ssh = " ".join(cluster.ssh)
    return cluster[0].popen([*LAUNCH, "--hosts", hosts, "--ssh", ssh, *arguments], **PIPES)


def processes(host: Host) -> list[str]:
    """Return the programs of a host, without its first process and its sshd."""
    lines = host.run(["ps", "-wweo", "pid=,args="]).stdout.splitlines()
    return [line for line in lines if re.search("python|sleep", line) and "host_init" not in line]


def wait_until_none(host: Host, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while left := processes(host):
        assert time.monotonic() < ends, left
        time.sleep(0.1)


def begin(process: subprocess.Popen[str], ranks: int) -> None:
    """Wait until ranks run; each rank writes a line."""
    for _ in range(ranks):
        assert "begun" in process.stdout.readline()


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["cut", "freeze"])
def test_flrun_ends_the_ranks_on_both_sides_of_a_lost_host(cluster: Cluster, fate: str) -> None:
    host = cluster[1]
    process = start(cluster, "h0:2,h1:2", write(cluster.folder, CALLING))
    begin(process, 4)
    began = time.monotonic()
    getattr(host, fate)()
    try:
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < 15
        assert process.returncode == 1
        last = next(line for line in errors.splitlines() if line.startswith("flrun: "))
        assert last.startswith("flrun: rank 2 of 4 on h1 is lost: received nothing from host h1 si")
        wait_until_none(cluster[0], 1.0)
        if fate == "freeze":
            host.thaw()
        wait_until_none(host, 15 - (time.monotonic() - began))
    finally:
        host.mend()
        host.thaw()


@pytest.mark.slow
def test_flrun_counts_all_ranks_of_a_lost_host_as_lost(cluster: Cluster) -> None:
    program = write(cluster.folder, CALLING)
    process = start(cluster, "h0:2,h2:2", "--min-n", 2, "--max-restarts", 1, program)
    begin(process, 4)
    began = time.monotonic()
    with cluster[2].cut_off():
        output, errors = process.communicate(timeout=40)
        assert time.monotonic() - began < 20
    wait_until_none(cluster[2], 20)
    assert process.returncode == 0, errors
    lines = [line for line in errors.splitlines() if line.startswith("flrun: ")]
    assert lines[0].startswith("flrun: rank 2 of 4 on h2 is lost: ")
    assert lines[-1] == "flrun: starting again with 2 rank(s): restart 1"
    assert sorted(output.splitlines()) == [
        f"[{r}] {x}" for r in (0, 1) for x in ("begun 2", "sum 2")
    ]


@pytest.mark.slow
def test_flrun_names_a_host_that_is_unreachable_at_the_start(cluster: Cluster) -> None:
    with cluster[1].cut_off() as began:
        done = start(cluster, "h0:1,h1:2", write(cluster.folder, SUM))
        _, errors = done.communicate(timeout=40)
    assert time.monotonic() - began < 25
    assert "flrun: rank 1 of 3 on h1 is lost: ssh to h1 exited with code 255" in errors


@pytest.mark.slow
def test_trace_diff_compares_all_hosts(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host writes to its own folder."""
    program = write(cluster.folder, MISMATCH)
    monkeypatch.delenv("FLASHLIGHT_TRACE_DIR", raising=False)
    _, errors = start(cluster, "h0:2,h1:2", program).communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line.startswith("flrun: flight records of ")]
    assert "4 of 4 ranks are on h0" in lines[0], errors
    folder = Path(lines[0].rpartition(" ")[2])
    compare = cluster[0].run([*LAUNCH[:2], "flashlight_py.trace", "diff", folder])
    assert compare.returncode == 1
    assert "records of 4 of 4 ranks" in compare.stdout
    assert "call 2: the ranks made different calls" in compare.stdout
