"""Ranks of an engine connect between hosts, whatever name the engine uses for rank 0's host."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flashlight_py.engines.rank import Start
from flashlight_py.launch.pickling import dumps
from tests.cluster.hosts import Cluster
from tests.engines import tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# The work of an engine process: rank 0 prints its address, and the other rank receives it.
PROGRAM = """
import json, pickle, sys
from flashlight_py.engines.rank import RendezvousAddress, listen_for_ranks
from flashlight_py.launch.failures import Failure
packed, rank, hosts, meeting = json.loads(sys.argv[1])
start = pickle.loads(bytes.fromhex(packed))
if rank == 0:
    meeting = listen_for_ranks(start.key, hosts[0], hosts)
    print(json.dumps(meeting), flush=True)
outcome = start.serve(rank, RendezvousAddress(*meeting))
print(outcome.description if isinstance(outcome, Failure) else pickle.loads(outcome), flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        names = {item.name: item.addresses for item in cluster}
        for host in cluster:  # like Debian's installer
            host.hosts_file({**names, host.name: "127.0.1.1"})
        yield cluster


@pytest.mark.parametrize(
    "hosts", [["h0", "h1"], ["127.0.1.1", "127.0.1.1", "h1"], ["fd77::1", "fd77::2"]]
)
def test_rank_0_is_reachable_from_another_host(cluster: Cluster, hosts: list[str]) -> None:
    start = Start(2, 0, dumps((tasks.total, (10,), {"TIMEOUT": 20})))

    def begin(rank: int, meeting: object = None) -> subprocess.Popen[str]:
        argument = json.dumps([dumps(start).hex(), rank, hosts, meeting])
        command = [sys.executable, "-c", PROGRAM, argument]
        return cluster[rank].popen(command, stdout=subprocess.PIPE, text=True)

    with begin(0) as first:
        assert first.stdout is not None
        meeting = json.loads(first.stdout.readline())
        assert meeting[0][0] == hosts[0]
        with begin(1, meeting) as second:
            outputs = [process.communicate()[0].strip() for process in (first, second)]
    assert outputs == ["(0, 21)", "(1, 21)"]
