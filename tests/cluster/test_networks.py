"""Ranks start on unusual networks: odd names, one version of IP, NAT, unreachable addresses."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import Cluster, Host
from tests.distributed.processes import finish_all

PROGRAM = """
import json, os, sys
import numpy as np
import flashlight_py as fl
fl.distributed_init(params={"TIMEOUT": 20, **json.loads(sys.argv[1])})
print(os.uname().nodename, fl.get_world_rank(), int(fl.all_reduce(np.ones(100_000))[-1]))
fl.distributed_shutdown()
"""
PORT, PER_HOST = "29511", 2
# Each rank prints its host, its number, and a sum of ones.
PRINTED = ["h0 0 4", "h0 1 4", "h1 2 4", "h1 3 4"]
SECRET = {"MASTER_SECRET": "known to these ranks alone"}


class Place(NamedTuple):
    rank: int
    size: int
    local: int
    host: int


Variables = Callable[[Cluster, Place], dict[str, str]]


def by_env(cluster: Cluster, setup: Place) -> dict[str, str]:
    numbers = {"RANK": str(setup.rank), "WORLD_SIZE": str(setup.size)}
    return {**numbers, "MASTER_ADDR": "h0", "MASTER_PORT": PORT, **SECRET}


def by_address(cluster: Cluster, setup: Place) -> dict[str, str]:
    """Return the last address of the host, which is an IPv6 address if it has one."""
    common = [
        address for address in cluster[0].addresses if cluster[1].address6 or ":" not in address
    ]
    return {**by_env(cluster, setup), "MASTER_ADDR": common[-1]}


def by_file(cluster: Cluster, setup: Place) -> dict[str, str]:
    numbers = {"RANK": str(setup.rank), "WORLD_SIZE": str(setup.size)}
    return {**numbers, "FLASHLIGHT_FILE": str(cluster.folder / "meeting")}


def by_slurm(cluster: Cluster, setup: Place) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(setup.rank),
        "SLURM_STEP_NUM_TASKS": str(setup.size),
        "SLURM_LOCALID": str(setup.local),
        "SLURM_NODEID": str(setup.host),
        "SLURM_STEP_TASKS_PER_NODE": f"{PER_HOST}(x{len(cluster)})",
        "SLURM_STEP_NODELIST": f"h[0-{len(cluster) - 1}]",
        **SECRET,
    }


class Outcome(NamedTuple):
    """Exit code and output of a process, with its errors."""

    code: int
    text: str


def finished(processes: list[subprocess.Popen[str]]) -> list[Outcome]:
    return [Outcome(code, text) for code, text, _ in finish_all(processes, 60)]


def start(host: Host, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return host.popen(command, env=env, text=True, stdin=subprocess.DEVNULL, **pipes)


def program(cluster: Cluster, source: str = PROGRAM) -> Path:
    path = cluster.folder / "train.py"
    path.write_text(source)
    return path


def ranks(
    cluster: Cluster,
    variables: Variables,
    env: Mapping[str, str] | None = None,
    hosts: int | None = None,
    source: str = PROGRAM,
    **params: Any,
) -> list[Outcome]:
    command = [sys.executable, str(program(cluster, source)), json.dumps(params)]
    size = PER_HOST * (hosts or len(cluster))
    places = [Place(rank, size, rank % PER_HOST, rank // PER_HOST) for rank in range(size)]
    return finished(
        [
            start(cluster[setup.host], command, {**variables(cluster, setup), **(env or {})})
            for setup in places
        ]
    )


def by_flrun(cluster: Cluster) -> list[Outcome]:
    for host in cluster:
        host.sshd()
    hosts = ",".join(f"{host.name}:{PER_HOST}" for host in cluster)
    options = ["--ssh", shlex.join(cluster.ssh), "--hosts", hosts]
    command = [sys.executable, "-m", "flashlight_py.launch", *options, str(program(cluster)), "{}"]
    return finished([start(cluster[0], command, {})])


BAD = {"MASTER_ADDR": "nowhere"}  # params take precedence
WAYS: dict[str, Callable[[Cluster], list[Outcome]]] = {
    "env": lambda cluster: ranks(cluster, by_env),
    "address": lambda cluster: ranks(cluster, by_address),
    "params": lambda cluster: ranks(cluster, by_env, BAD, MASTER_ADDR="h0", MASTER_PORT=29513),
    "file": lambda cluster: ranks(cluster, by_file),
    "slurm": lambda cluster: ranks(cluster, by_slurm),
    "flrun": by_flrun,
}


def as_debian(cluster: Cluster) -> None:
    """Each host resolves its own name to the loopback address, as Debian does."""
    for host in cluster:
        names = {item.name: item.addresses for item in cluster}
        host.hosts_file({**names, host.name: "127.0.1.1"})


def names_of_both(cluster: Cluster) -> None:
    """Names have addresses of both IP versions, also if the hosts have one version only."""
    names = {
        host.name: [f"fd77::{host.index + 1}", f"10.77.0.{host.index + 1}"] for host in cluster
    }
    cluster.hosts_file(names)


def interface(host: Host, address: str, *routes: str) -> None:
    for line in (
        "link add nat0 type ifb",
        f"address add {address} dev nat0",
        "link set nat0 up",
        *(f"route add {route} dev nat0" for route in routes),
    ):
        done = host.run(["ip", *line.split()])
        assert done.returncode == 0, done.stderr


def as_nat(cluster: Cluster) -> None:
    """All hosts have the same address on the default route, as virtual machines may have."""
    for host in cluster:
        interface(host, "10.0.2.15/24", "default")
    as_debian(cluster)


def as_black_hole(cluster: Cluster) -> None:
    """The first address of rank 0's host does not answer other hosts."""
    interface(cluster[0], "10.99.0.1/24")
    for host in cluster:
        if host.index:
            interface(host, f"10.98.0.{host.index}/24", "10.99.0.0/24")
    names = {host.name: host.addresses for host in cluster}
    cluster.hosts_file({**names, "h0": ["10.99.0.1", *cluster[0].addresses]})


NETWORKS: dict[str, tuple[Any, Callable[[Cluster], None]]] = {
    "debian": ("46", as_debian),
    "one without IPv6": (["46", "4"], names_of_both),
    "one without IPv4": (["46", "6"], names_of_both),
    "IPv4 only": ("4", lambda cluster: None),
    "IPv6 only": ("6", lambda cluster: None),
    "NAT": ("46", as_nat),
    "black hole": ("46", as_black_hole),
}


# Each network with "env", which needs an address of rank 0, and with another kind of start.
OTHERS = [kind for kind in WAYS if kind != "env"]
CASES = [
    (name, kind)
    for number, name in enumerate(NETWORKS)
    for kind in ("env", OTHERS[number % len(OTHERS)])
]


@pytest.fixture(scope="module")
def network(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    families, prepare = NETWORKS[request.param]
    with Cluster(2, families=families) as cluster:
        prepare(cluster)
        yield cluster


def printed(outcomes: list[Outcome]) -> list[str]:
    """Return the last three words of each line that the ranks printed about their sums."""
    for outcome in outcomes:
        assert outcome.code == 0, outcome.text
    lines = [line.split() for outcome in outcomes for line in outcome.text.splitlines()]
    return sorted(" ".join(words[-3:]) for words in lines if words[-3:-2] in (["h0"], ["h1"]))


@pytest.mark.slow
@pytest.mark.parametrize(("network", "init_kind"), CASES, indirect=["network"])
def test_init_succeeds_without_parameters_on_unusual_networks(
    network: Cluster, init_kind: str
) -> None:
    assert printed(WAYS[init_kind](network)) == PRINTED


@pytest.mark.slow
def test_init_names_a_loopback_address_of_rank_0(cluster: Cluster) -> None:
    outcomes = ranks(cluster, by_env, {"MASTER_ADDR": "localhost"}, TIMEOUT=3)
    assert [outcome.code for outcome in outcomes] == [1] * 4
    for outcome in outcomes[:PER_HOST]:
        assert "Rank 0 listens at localhost, the loopback of h0" in outcome.text
    for outcome in outcomes[PER_HOST:]:
        assert "Here localhost is this host (h1)" in outcome.text


@pytest.mark.slow
def test_init_names_hosts_without_a_common_ip_version_on_every_rank() -> None:
    with Cluster(3, families=["46", "4", "6"]) as cluster:
        for outcome in ranks(cluster, by_env):
            assert outcome.code == 1
            assert "h1 (rank 2) has 10.77.0.2 and no IPv6" in outcome.text
            assert "h2 (rank 4) has fd77::3 and no IPv4" in outcome.text


@pytest.mark.slow
def test_init_uses_the_requested_interface_or_rejects_it() -> None:
    """The environment or params name it, and params take precedence. An unusable interface is
    rejected."""
    with Cluster(2) as cluster:
        as_nat(cluster)
        for variable in ("FLASHLIGHT_INTERFACE", "GLOO_SOCKET_IFNAME"):
            assert printed(ranks(cluster, by_env, {variable: "eth0"})) == PRINTED
        wrong = {"FLASHLIGHT_INTERFACE": "nat0"}
        assert printed(ranks(cluster, by_env, wrong, INTERFACE="eth0")) == PRINTED
        for outcome in ranks(cluster, by_env, wrong):
            assert outcome.code == 1
            text = "'nat0' must have distinct addresses on each host, got 10.0.2.15 on"
            assert text in outcome.text
        for outcome in ranks(cluster, by_env, INTERFACE="eth7"):
            assert "has no 'eth7'; its interfaces: " in outcome.text


@pytest.mark.slow
def test_init_names_an_address_that_every_host_has() -> None:
    with Cluster(2) as cluster:
        as_nat(cluster)
        outcomes = ranks(cluster, by_env, {"MASTER_ADDR": "10.0.2.15"}, TIMEOUT=3)
        for outcome in outcomes[PER_HOST:]:
            assert "Here 10.0.2.15 is this host (h1)" in outcome.text


WATCH = """
import socket
listened = set()
listen = socket.socket.listen
def noted(self, *args):
    listened.add("%s:%d" % self.getsockname()[:2])
    return listen(self, *args)
socket.socket.listen = noted
import flashlight_py as fl
fl.distributed_init(params={"TIMEOUT": 20})
fl.barrier()
print(*listened)
fl.distributed_shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("variables", [by_env, by_file])
def test_init_on_one_host_opens_no_port_to_other_hosts(
    cluster: Cluster, variables: Variables
) -> None:
    """The launcher says that the job has one host, or the ranks use a file."""
    as_debian(cluster)

    def local(cluster: Cluster, setup: Place) -> dict[str, str]:
        numbers = {"LOCAL_RANK": str(setup.rank), "LOCAL_WORLD_SIZE": "2"}
        return {**variables(cluster, setup), **numbers}

    outcomes = ranks(cluster, local, hosts=1, source=WATCH)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    heard = {line for outcome in outcomes for line in outcome.text.split() if ":" in line}
    assert heard
    assert all(line.startswith("127.") for line in heard), heard
