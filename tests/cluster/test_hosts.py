"""Hosts are isolated, connected by cables, and removed afterwards.

The other tests of this folder use all other functions of ``Host``.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT, Cluster, Host
from tests.distributed import processes

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
"""
RECEIVE = """
import socket, sys
with socket.create_server(("::", 5000), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print("listening", flush=True)
    with server.accept()[0] as peer:
        while peer.recv(1 << 20):
            pass
"""


def text(host: Host, command: str) -> str:
    done = host.run(["sh", "-c", command])
    assert done.returncode == 0, done.stderr
    return done.stdout


def send(source: Host, target: Host, address: str | None, count: int) -> float:
    receive = [sys.executable, "-c", RECEIVE]
    with target.popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout.readline() == "listening\n"
        began = time.monotonic()
        done = source.run([sys.executable, "-c", SEND, address, count])
        took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    return took


def test_hosts_have_separate_namespaces_and_one_shared_folder(cluster: Cluster) -> None:
    look = "hostname; cat /proc/sys/kernel/random/boot_id; ls /tmp /dev/shm; echo $$"
    text(cluster[0], f"touch /tmp/own /dev/shm/own {cluster.folder}/common")
    first, second = (text(host, look).split() for host in cluster)
    assert (first[0], second[0]) == ("h0", "h1")
    assert first[1] != second[1]
    assert (first.count("own"), second.count("own")) == (2, 0)
    assert int(second[-1]) < 50
    assert (cluster.folder / "common").exists()


def test_cable_has_rate_delay_and_loss() -> None:
    with Cluster(2, rate=1e8, delay=0.02, loss=0.01) as cluster:
        assert send(cluster[0], cluster[1], cluster[1].address, 1_000_000) > 0.08 + 4 * 0.02
        sent, received = cluster.bytes(0)[0], cluster.bytes(1)[1]
        assert sent > received >= 1_000_000


def test_exit_status_of_a_program_is_visible_outside_the_host(cluster: Cluster) -> None:
    assert cluster[0].run(["sh", "-c", "exit 7"]).returncode == 7
    with cluster[0].popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        cluster[0].run(["sleep", "60"], timeout=0.1)


KILLED = """
import os, signal
from tests.cluster.hosts import Cluster
with Cluster(2) as cluster:
    stays = cluster[0].popen(["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
    print(*[host.init for host in cluster], stays.pid, cluster.folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_hosts_end_if_the_test_process_is_killed(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    *pids, folder = done.stdout.split()
    processes.wait_for_end({int(pid) for pid in pids}, 10)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    for file in sorted(Path(folder).rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    Path(folder).rmdir()
