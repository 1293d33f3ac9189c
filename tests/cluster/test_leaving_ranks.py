"""What looks like a lost host and is none: ranks that leave, wait, or differ in their limit."""

import time

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.members import Members
from tests.cluster.test_lost_hosts import LIMIT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("counts", [[1, 1], [2, 1]])
def test_a_rank_that_leaves_is_not_lost(cluster: Cluster, counts: list[int]) -> None:
    """Although a child of it that it has forked is still there, and the others go on for long."""
    with Members(cluster, counts, "leave") as members:
        members.await_ready()
        assert [end["kind"] for end in members.ends()] == [""] * sum(counts)
        assert [process.wait(20) for process in members.processes] == [0] * sum(counts)


def test_the_only_rank_of_a_host_may_stop_for_less_than_the_limit(cluster: Cluster) -> None:
    with Members(cluster, [1, 1], "small") as members:
        members.await_ready()
        members.stop(1)
        time.sleep(LIMIT / 2)
        members.stop(1, is_stopped=False)
        time.sleep(LIMIT)
        members.tell([0])
        assert [end["kind"] for end in members.ends()] == [""] * 2


@pytest.mark.parametrize("limits", [("1", "8"), ("8", "1"), ("1", "0"), ("100000", "100000")])
def test_the_longest_limit_of_any_rank_counts(cluster: Cluster, limits: tuple[str, str]) -> None:
    with Members(cluster, [1, 1], "small", FLASHLIGHT_HOST_TIMEOUT=limits) as members:
        members.await_ready()
        for rank in range(2):
            members.stop(rank)
            time.sleep(4)
            members.stop(rank, is_stopped=False)
        members.tell([0])
        assert [end["kind"] for end in members.ends()] == [""] * 2


@pytest.mark.parametrize("counts", [[1, 1], [2, 2]])
def test_an_interface_that_is_down_for_a_short_time(cluster: Cluster, counts: list[int]) -> None:
    with Members(cluster, counts, "large") as members:
        members.await_ready()
        cluster[1].run(["ip", "link", "set", "eth0", "down"]).check_returncode()
        time.sleep(2)
        cluster[1].run(["ip", "link", "set", "eth0", "up"]).check_returncode()
        time.sleep(LIMIT)
        members.tell([0])
        assert [end["kind"] for end in members.ends()] == [""] * sum(counts)
