"""Hosts are isolated, connected by cables, and removed; verbs send few bytes between them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.cluster.hosts import ROOT, Cluster, Host
from tests.distributed import conformance, processes
from tests.distributed.conformance import dtype_of, on_ranks
from tests.distributed.programs import every_verb, run_program

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


MB = 1 << 20
CALLS = [
    *(("all_reduce", name) for name in ("float32", "float16", "bfloat16")),
    *(("all_gather", "float32"), ("reduce_scatter", "float32"), ("reduce_scatter", "float16")),
    *(("reduce", "float32"), ("broadcast", "float32")),
]
# Bytes of headers and of the comparison of calls, in addition to the arrays.
MOST = 1.01


def fewest(verb: str, size: int, counts: list[int]) -> float:
    """Return the least number of bytes of the busiest host, by bytes per rank and ranks per
    host."""
    hosts, ranks = len(counts), sum(counts)
    if verb in ("reduce", "broadcast"):
        return size
    if verb == "all_reduce":
        return 2 * (hosts - 1) / hosts * size
    # Bytes that a host sends and receives, from its own parts and the parts of other hosts. For
    # sums the directions are exchanged.
    parts = max(max(ranks - count, count * (hosts - 1)) for count in counts)
    return size * parts / (ranks if verb == "reduce_scatter" else 1)


def call(rank: int, size: int, verb: str, name: str, count: int) -> None:
    root = {"root": size - 1} if verb in ("reduce", "broadcast") else {}
    getattr(fl, verb)(np.ones(count, dtype_of(name)), **root)


def over_the_fewest(cluster: Cluster, ranks: Any, counts: list[int], verb: str, name: str) -> float:
    count = 4 * MB // dtype_of(name).itemsize
    ranks.run(call, verb, name, 16)  # the first call connects
    before = [cluster.bytes(host) for host in cluster]
    ranks.run(call, verb, name, count)
    after = [cluster.bytes(host) for host in cluster]
    moved = [
        new - old
        for pair in zip(before, after, strict=True)
        for old, new in zip(*pair, strict=True)
    ]
    return max(moved) / fewest(verb, 4 * MB, counts)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[2, 2], [1, 1, 1, 1], [3, 1], [1, 2, 1]], ids=str)
def test_collectives_send_the_minimum_of_bytes_between_hosts(counts: list[int]) -> None:
    with Cluster(len(counts)) as cluster, cluster.ranks(counts) as ranks:
        results = {one: over_the_fewest(cluster, ranks, counts, *one) for one in CALLS}
    assert 1 <= min(results.values()) <= max(results.values()) < MOST, results


def exchanges(rank: int, size: int) -> float:
    """Return the mean seconds of a small call, because a late rank waits less than the others."""
    x = np.ones(1024, np.float32)
    for _ in range(4):
        fl.all_reduce(x)
    began = time.perf_counter()
    for _ in range(20):
        fl.all_reduce(x)
    return (time.perf_counter() - began) / 20


@pytest.mark.slow
def test_small_collectives_take_one_exchange_between_hosts() -> None:
    delay = 0.05
    with Cluster(2, delay=delay) as cluster, cluster.ranks(2) as ranks:
        assert delay * 0.9 <= np.mean(ranks.run(exchanges)) < delay * 1.7


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> Iterator[Any]:
    with cluster.ranks(2) as pool:
        yield pool


@on_ranks()
def test_two_hosts_of_two_ranks_pass_the_short_conformance_suite(rank: int, size: int) -> None:
    assert os.uname().nodename == f"h{rank // 2}"
    for verb in ("all_reduce", "reduce"):
        conformance.check_every_op(rank, size, verb, "float32", "strided")
        conformance.check_every_size(rank, size, verb, "float16", [1, 16_384, 16_385, 300_001])
    conformance.check_pending_works(rank, size)
    run_program(rank, size, every_verb(size, "float32", (1, 100_000)))
    conformance.check_message_ring(rank, size, 100_000)
