"""Hosts are isolated, connected by cables, and removed afterwards."""

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


def can_reach(source: Host, target: Host) -> bool:
    return source.run(["ping", "-c1", "-W1", target.address]).returncode == 0


def test_hosts_have_separate_namespaces_and_one_shared_folder(cluster: Cluster) -> None:
    look = "hostname; cat /proc/sys/kernel/random/boot_id; ls /tmp /dev/shm; echo $$"
    text(cluster[0], f"touch /tmp/own /dev/shm/own {cluster.folder}/common")
    first, second = (text(host, look).split() for host in cluster)
    assert (first[0], second[0]) == ("h0", "h1")
    assert first[1] != second[1]
    assert (first.count("own"), second.count("own")) == (2, 0)
    assert int(second[-1]) < 50
    assert (cluster.folder / "common").exists()


def test_names_resolve_by_the_hosts_file(cluster: Cluster) -> None:
    cluster.hosts_file({"one": cluster[0].addresses, "two": "127.0.1.1"})
    cluster[1].hosts_file({"one": "10.77.0.9"})
    assert text(cluster[0], "getent ahostsv4 one; getent hosts two").split()[0] == "10.77.0.1"
    assert text(cluster[1], "getent hosts one").split()[0] == "10.77.0.9"
    cluster.hosts_file()
    assert text(cluster[1], "getent ahostsv6 h0").split()[0] == "fd77::1"


@pytest.mark.parametrize("family", ["4", "6"])
def test_cluster_counts_bytes_without_headers(cluster: Cluster, family: str) -> None:
    address = cluster[1].address if family == "4" else cluster[1].address6
    before = [cluster.bytes(host) for host in cluster]
    send(cluster[0], cluster[1], address, 3_000_000)
    after = [cluster.bytes(host) for host in cluster]
    assert 3_000_000 <= after[0][0] - before[0][0] < 3_010_000
    assert 3_000_000 <= after[1][1] - before[1][1] < 3_010_000


def test_host_has_the_requested_ip_versions() -> None:
    with Cluster(3, families=["4", "6", "46"]) as cluster:
        assert [len(host.addresses) for host in cluster] == [1, 1, 2]
        send(cluster[0], cluster[2], cluster[2].address, 10)
        send(cluster[1], cluster[2], cluster[2].address6, 10)
        assert "inet6" not in text(cluster[0], "ip address")


def test_cut_and_mend_disconnect_and_connect_a_host(cluster: Cluster) -> None:
    assert can_reach(cluster[0], cluster[1])
    cluster[1].cut()
    assert not can_reach(cluster[0], cluster[1])
    cluster[1].mend()
    assert can_reach(cluster[0], cluster[1])


def test_cable_has_rate_delay_and_loss() -> None:
    with Cluster(2, rate=1e8, delay=0.02, loss=0.01) as cluster:
        assert send(cluster[0], cluster[1], cluster[1].address, 1_000_000) > 0.08 + 4 * 0.02
        sent, received = cluster.bytes(0)[0], cluster.bytes(1)[1]
        assert sent > received >= 1_000_000


def await_state(process: subprocess.Popen[bytes], state: str) -> None:
    ends = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_freeze_and_thaw_stop_and_continue_a_host(cluster: Cluster) -> None:
    with cluster[0].popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        cluster[0].freeze()
        await_state(process, "T")
        cluster[0].thaw()
        assert process.communicate(b"words", timeout=10)[0] == b"words"


def test_exit_status_of_a_program_is_visible_outside_the_host(cluster: Cluster) -> None:
    assert cluster[0].run(["sh", "-c", "exit 7"]).returncode == 7
    with cluster[0].popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        cluster[0].run(["sleep", "60"], timeout=0.1)


def test_sshd_of_a_host_accepts_commands() -> None:
    with Cluster(2) as cluster:
        cluster[1].sshd()
        done = cluster[0].run([*cluster.ssh, "h1", "hostname; exit 3"])
        assert (done.stdout, done.returncode) == ("h1\n", 3), done.stderr


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
