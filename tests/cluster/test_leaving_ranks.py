"""What looks like a lost host and is none: ranks that leave, wait, or differ in their limit."""

from __future__ import annotations

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
