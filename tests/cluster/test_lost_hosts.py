"""Ranks detect hosts that cannot be reached within seconds."""

import contextlib
import json
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.member import SECONDS
from tests.cluster.members import Members

LIMIT = 5.0  # default of HOST_TIMEOUT in seconds
WITHIN = 15.0  # seconds allowed after LIMIT on a busy machine


def check(ends: Iterable[dict[str, Any]], since: float, lost: str, *words: str) -> None:
    """Check that ranks raised in time, with errors that contain ``lost`` and ``words``."""
    for end in ends:
        assert end["kind"] == "PeerLostError", end
        assert end["at"] - since < WITHIN
        assert f"lost {lost} (" in end["words"]
        for word in words:
            assert word in end["words"]


def check_two_by_two(ends: list[dict[str, Any]], since: float) -> None:
    """Check the errors of four ranks on two hosts that cannot reach each other."""
    either = "it is the only other host, so host {}, where"
    check(ends[:2], since, "ranks 2, 3", "host h1 cannot be reached since", either.format("h0"))
    check(ends[2:], since, "ranks 0, 1", "host h0 cannot be reached since", either.format("h1"))


def test_ranks_on_both_sides_of_a_cut_raise(cluster: Cluster) -> None:
    with (
        Members(cluster, [2, 2], "small", FLASHLIGHT_HOST_TIMEOUT="1.5") as members,
        cluster[1].cut_off() as since,
    ):
        check_two_by_two(members.ends(), since)


GLOO = '{"BACKEND": "gloo"}'


@contextlib.contextmanager
def in_a_huge_call(
    params: str, *, rate: float | None = 1e8, few_retries: bool = False, **env: str
) -> Iterator[tuple[Cluster, Members]]:
    """Run two ranks on each of two hosts in a call of 64 MB, which takes 5 s.

    With ``few_retries`` the kernel closes a connection after 1.4 s.
    """
    with (
        Cluster(2, rate=rate) as cluster,
        Members(cluster, [2, 2], "huge", PARAMS=params, **env) as members,
    ):
        for host in cluster if few_retries else ():
            host.run(["sysctl", "-w", "net.ipv4.tcp_retries2=2"]).check_returncode()
        time.sleep(1)
        yield cluster, members


@pytest.mark.slow
@pytest.mark.parametrize(("params", "few_retries"), [("{}", False), (GLOO, True)])
def test_ranks_on_both_sides_of_a_cut_raise_in_large_calls(params: str, few_retries: bool) -> None:
    """Reports of ranks are queued behind the data.

    The kernel may close a connection before a host is lost, because hosts may be silent for 4 s.
    """
    env = {} if few_retries else {"FLASHLIGHT_HOST_TIMEOUT": "1.5"}
    with (
        in_a_huge_call(params, few_retries=few_retries, **env) as (cluster, members),
        cluster[1].cut_off() as since,
    ):
        check_two_by_two(members.ends(), since)


@pytest.mark.slow
def test_ranks_detect_a_lost_host_during_large_messages_of_other_hosts() -> None:
    """Senders close their connections when they detect the loss; their reports are queued behind
    the message."""
    with Cluster(4, rate=1e9) as cluster, Members(cluster, [2] * 4, "messages") as members:
        time.sleep(1)
        since = time.monotonic()
        cluster[1].cut()
        others = [0, 1, 4, 5, 6, 7]
        check(members.ends(others), since, "ranks 2, 3", "host h1 cannot be reached since")
        text = "host h1, where this rank runs, cannot reach any other host since"
        check(members.ends([2, 3]), since, "ranks 0, 1, 4, 5, 6, 7", text)


@pytest.mark.slow
@pytest.mark.parametrize(("params", "is_interrupted"), [("{}", True), (GLOO, False)])
def test_wait_for_heartbeats_ends_at_timeout_or_signal(params: str, is_interrupted: bool) -> None:
    """The kernel closes a connection; the heartbeats would explain it only after 24 s."""
    settings = {**json.loads(params), "HOST_TIMEOUT": 30, "TIMEOUT": 60 if is_interrupted else 4}
    with (
        in_a_huge_call(json.dumps(settings), few_retries=True) as (cluster, members),
        cluster[1].cut_off() as since,
    ):
        if is_interrupted:
            time.sleep(5)
            for process in members.processes:
                process.send_signal(signal.SIGINT)
            assert [process.wait(WITHIN) for process in members.processes] == [-signal.SIGINT] * 4
        else:
            for end in members.ends():
                assert end["kind"] in {"PeerLostError", "CollectiveTimeoutError"}, end
        assert time.monotonic() - since < WITHIN


@pytest.mark.slow
def test_ranks_raise_at_once_if_one_dies_in_a_large_call() -> None:
    """Reports are queued behind large data, so ranks do not wait for the heartbeats."""
    with in_a_huge_call(GLOO, rate=None, FLASHLIGHT_HOST_TIMEOUT="60") as (_, members):
        since = time.monotonic()
        members.processes[2].kill()
        check(members.ends([0, 1, 3]), since, "rank 2")


@pytest.mark.parametrize(
    ("program", "params"), [("small", "{}"), pytest.param("pairs", GLOO, marks=pytest.mark.slow)]
)
def test_ranks_of_both_hosts_name_killed_ranks(cluster: Cluster, program: str, params: str) -> None:
    """This includes a host whose ranks send messages only to each other."""
    env = {"FLASHLIGHT_HOST_TIMEOUT": "60", "PARAMS": params}
    with Members(cluster, [2, 2], program, **env) as members:
        since = time.monotonic()
        members.processes[2].kill()
        check(members.ends([0, 1, 3]), since, "rank 2")


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [True, False])
def test_idle_connection_survives_only_a_short_cut(cluster: Cluster, is_cut: bool) -> None:
    """The kernel sends its first probe after 5 s, and does not close the connection before the
    heartbeats do.

    A host that returns after 3.8 s was not lost.
    """
    with Members(cluster, [1, 1], "asynchronous", FLASHLIGHT_HOST_TIMEOUT="5.99") as members:
        time.sleep(4.7)
        since = time.monotonic()
        cluster[1].cut()
        if is_cut:
            try:
                check(members.ends([1]), since, "rank 0", "host h0 cannot be reached since")
            finally:
                cluster[1].mend()
            return
        time.sleep(3.8)
        cluster[1].mend()
        members.all_end_well(ranks=[0])


@pytest.mark.slow
def test_first_message_to_a_lost_host_raises() -> None:
    with Cluster(2, families="4") as cluster, Members(cluster, [2, 2], "message") as members:
        since = time.monotonic()
        cluster[0].run(["ip", "link", "set", "eth0", "down"]).check_returncode()
        members.tell([0])
        check(members.ends([0]), since, "ranks 2, 3", "host h1 cannot be reached since")
        check(members.ends([3]), since, "ranks 0, 1", "host h0 cannot be reached since")


@pytest.mark.slow
def test_rank_that_joins_late_raises_after_a_cut(cluster: Cluster) -> None:
    """Rank 0 joins an asynchronous call only after the other ranks have raised."""
    with Members(cluster, [2, 2], "asynchronous") as members, cluster[1].cut_off() as since:
        check(members.ends([1]), since, "ranks 2, 3", "host h1 cannot be reached")
        check(members.ends([2, 3]), since, "ranks 0, 1", "host h0 cannot be reached")
        members.tell([0])
        check(members.ends([0]), time.monotonic(), "ranks 2, 3")


@pytest.mark.slow
def test_ranks_raise_after_an_interface_goes_down() -> None:
    with Cluster(2, families="4") as cluster, Members(cluster, [2, 2], "large") as members:
        since = time.monotonic()
        cluster[1].run(["ip", "link", "set", "eth0", "down"]).check_returncode()
        check_two_by_two(members.ends(), since)


@pytest.mark.slow
def test_idle_rank_raises_at_its_next_call_after_a_cut(cluster: Cluster) -> None:
    """The call is a message between ranks of one host."""
    with Members(cluster, [2, 2], "neighbours") as members:
        cluster[1].cut()
        time.sleep(LIMIT + 1)
        cluster[1].mend()
        since = time.monotonic()
        members.tell(range(4))
        ends = members.ends()
        check_two_by_two(ends, since)
        assert max(end["at"] for end in ends) - since < 2.0


@pytest.mark.slow
def test_ranks_raise_if_a_host_is_frozen(cluster: Cluster) -> None:
    with Members(cluster, [3, 1], "small") as members:
        since = time.monotonic()
        cluster[1].freeze()
        try:
            check(members.ends(range(3)), since, "rank 3", "host h1 answers, but none of its")
        finally:
            cluster[1].thaw()
        (end,) = members.ends([3])
        assert end["kind"] == "PeerLostError", end


@pytest.mark.slow
def test_rank_that_holds_the_gil_is_not_lost(cluster: Cluster) -> None:
    with Members(cluster, [1, 1], "gil") as members:
        since = time.monotonic()
        ends = members.ends()
        assert [end["kind"] for end in ends] == [""] * 2
        assert min(end["at"] for end in ends) - since > SECONDS - 1


@pytest.mark.slow
def test_ranks_of_a_cut_off_host_name_their_own_host() -> None:
    with Cluster(3) as cluster, Members(cluster, [2, 2, 1], "small") as members:
        since = time.monotonic()
        cluster[2].cut()
        check(members.ends(range(4)), since, "rank 4", "host h2 cannot be reached since")
        text = "host h2, where this rank runs, cannot reach any other host since"
        check(members.ends([4]), since, "ranks 0, 1, 2, 3", text)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.15, 1.25])
def test_ranks_shut_down_while_a_host_is_being_lost(cluster: Cluster, seconds: float) -> None:
    """Shutting down takes 1.2 s to 1.3 s; the ranks raise and end."""
    with (
        Members(cluster, [2, 2], "shutdown", FLASHLIGHT_HOST_TIMEOUT="1.5") as members,
        cluster[1].cut_off(),
    ):
        time.sleep(seconds)
        members.all_end_well(ranks=range(4))
        assert [process.wait(WITHIN) for process in members.processes] == [1] * 4


@pytest.mark.slow
def test_group_without_the_lost_host_continues(cluster: Cluster) -> None:
    with Members(cluster, [2, 1], "group") as members, cluster[1].cut_off() as since:
        check(members.ends([0, 1]), since, "rank 2", "host h1 cannot be reached")


@pytest.mark.slow
def test_init_names_a_host_that_is_lost_during_the_rendezvous(cluster: Cluster) -> None:
    """Ranks 0, 2 and 3 have joined; rank 1 is stopped and does not join."""
    with Members(cluster, [2, 2], "small", all_meet=False) as members:
        members.stop(1)
        time.sleep(6)  # no event outside shows that they have joined
        with cluster[1].cut_off() as since:
            ends = members.ends([0, 2, 3])
        for end in ends:
            assert end["kind"] == "RendezvousError", end
            assert end["at"] - since < WITHIN
            assert "cannot be reached for 5 s" in end["words"]


@pytest.mark.slow
def test_rank_that_shuts_down_does_not_count_as_lost(cluster: Cluster) -> None:
    """A forked child of the rank still runs, and the other ranks continue for a long time."""
    with Members(cluster, [2, 1], "leave") as members:
        members.all_end_well()
        assert [process.wait(20) for process in members.processes] == [0] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "limits", "seconds"),
    [
        ([2, 2], (str(LIMIT),) * 4, LIMIT + 3),  # the other rank of the host answers
        ([1, 1], (str(LIMIT),) * 2, LIMIT / 2),
        ([1, 1], ("0", "1"), LIMIT + 3),  # no limit
        ([1, 1], ("1", "8"), LIMIT - 0.5),  # the longest limit of the ranks applies
    ],
)
def test_ranks_may_stop_for_less_than_host_timeout(
    cluster: Cluster, counts: list[int], limits: tuple[str, ...], seconds: float
) -> None:
    with Members(cluster, counts, "large", FLASHLIGHT_HOST_TIMEOUT=limits) as members:
        members.pause(counts[0], seconds)
        members.all_end_well(ranks=[0])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "interface"])
def test_short_outage_changes_no_result(cluster: Cluster, fault: str) -> None:
    with Members(cluster, [2, 2], "large") as members:
        if fault == "cut":
            with cluster[1].cut_off():
                time.sleep(2)
        else:
            for state in ("down", "up"):
                cluster[1].run(["ip", "link", "set", "eth0", state]).check_returncode()
                time.sleep(2)
        time.sleep(LIMIT)
        members.all_end_well(ranks=[0])
