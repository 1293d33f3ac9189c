"""Rendezvous in a tree: positions, deaths of parents, late and duplicate ranks, several hosts."""

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flashlight_py import _native
from flashlight_py.distributed.backends.native_errors import failure
from flashlight_py.distributed.rendezvous.store import Roster, missing_text, name_ranks
from flashlight_py.distributed.rendezvous.wire import Connection, Kind
from tests.distributed.conformance import slow
from tests.distributed.rendezvous_helpers import Rank, Ranks, all_closed, ranks_at

SIZE = 8
# In order of arrival, with two children for each rank.
ABOVE = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2, 7: 3}


ranks = ranks_at("tree")


def in_order(ranks: Ranks, count: int = SIZE, plans: Any = None, **plan: Any) -> list[Rank]:
    """Start ranks below each other as in ``ABOVE``."""
    started = []
    for rank in range(count):
        more = (plans or {}).get(rank, {})
        started.append(ranks.start(rank, SIZE, fan=2, **{**plan, **more}))
        started[-1].await_event(f"below {ABOVE[rank]}" if rank else "constructed")
    return started


def reasons(started: list[Rank]) -> set[str]:
    """Return the reasons of the errors, without the rank."""
    return {re.sub("rank [0-9] of [0-9]: ", "", rank.refusal(), count=1) for rank in started}


def test_positions_are_assigned_in_order_of_arrival(ranks: Ranks) -> None:
    assert all_closed(in_order(ranks, lengths=[3, 0, 1_000_000, 1]))


@pytest.mark.parametrize("victim", [1, 5])
def test_rank_that_loses_its_parent_gets_another_position(ranks: Ranks, victim: int) -> None:
    """Payloads that were sent through the parent are sent again."""
    count = 6
    started = in_order(ranks, count)
    started[victim].kill()
    for rank in [child for child, above in ABOVE.items() if above == victim and child < count]:
        started[rank].await_event(*(f"below {above}" for above in range(8) if above != victim))
    started[victim] = ranks.start(victim, SIZE, fan=2)
    assert all_closed([*started, *(ranks.start(rank, SIZE, fan=2) for rank in range(count, SIZE))])


@pytest.mark.parametrize("late", [(5, 7), *slow(((1,),))])
def test_tree_names_only_late_ranks_in_a_later_exchange(
    ranks: Ranks, late: tuple[int, ...]
) -> None:
    """Ranks below a late rank are not named."""
    plans = {rank: {"pause_at": "exchanged 0"} for rank in late}
    started = in_order(ranks, plans=plans, timeout=1.0)
    others = [rank for number, rank in enumerate(started) if number not in late]
    assert all(missing_text(late, SIZE, 1.0) in reason for reason in reasons(others))


@pytest.mark.slow
def test_stopped_parent_is_named_but_its_children_are_not(ranks: Ranks) -> None:
    """The stopped rank does not pass received payloads on."""
    started = in_order(ranks, 6, timeout=1.5)
    os.kill(started[1].pid, signal.SIGSTOP)
    started += [ranks.start(rank, SIZE, fan=2, timeout=1.5) for rank in (6, 7)]
    assert "rank 1 of 8 has not arrived within 1.5 s" in started[0].refusal()


@pytest.mark.parametrize("resumes", [True, *slow(False)])
def test_rank_that_reads_no_roster_delays_no_other_rank(ranks: Ranks, resumes: bool) -> None:
    """The kernel has no buffer for the roster, which is sent to one rank after another."""
    plan = {"lengths": [3, 600_000, 5], "timeout": 20.0 if resumes else 1.5}
    started = [ranks.start(rank, 4, local_rank=rank, **plan) for rank in (0, 2, 3)]
    stopped = ranks.start(1, 4, local_rank=1, stop=1, **plan)
    for rank in started:
        rank.await_event("exchanged 1")
    if resumes:
        os.kill(stopped.pid, signal.SIGCONT)
        assert all_closed([*started, stopped])
    else:
        (reason,) = reasons(started)
        assert "rank 1 of 4 has not arrived within 1.5 s" in reason


SECRET = {"env": {"MASTER_SECRET": "a"}}


@pytest.mark.parametrize(
    ("count", "plan", "other", "why"),
    [
        (7, {}, {"rank": 5}, "two processes claim rank 5: host "),
        (6, {}, {"rank": 6, "size": 9}, r"rank 6 \(.* size 9, but rank 0 \("),
        (
            3,
            {},
            {"rank": 3, "env": {"FLASHLIGHT_TREE_FROM": "9"}},
            r"rank 3 \(.* have different FLASHLIGHT_TREE_FROM",
        ),
        (5, SECRET, {"rank": 5, "env": {"MASTER_SECRET": "b"}}, "the secrets differ"),
    ],
    ids=["a rank twice", "another size", "no tree", "another secret"],
)
def test_rank_unlike_the_others_raises_on_every_rank(
    ranks: Ranks, count: int, plan: dict[str, Any], other: dict[str, Any], why: str
) -> None:
    started = in_order(ranks, count, **plan)
    started.append(ranks.start(**{"size": SIZE, "fan": 2, **other}))
    assert all(re.search(why, rank.refusal()) for rank in started)


def test_one_rank_per_host_connects_to_rank_0(ranks: Ranks) -> None:
    started = [ranks.start(rank, 4, local_rank=rank, fan=2) for rank in range(4)]
    assert all_closed(started)
    assert all("below 0" in rank.events for rank in started[1:])


def test_ranks_wait_for_the_speaker_of_their_host(ranks: Ranks) -> None:
    started = [ranks.start_ready(rank, 3, local_rank=rank) for rank in (2, 1)]
    assert all_closed([ranks.start(0, 3, local_rank=0), *started])


@pytest.mark.slow
def test_rank_becomes_a_speaker_if_its_host_has_none(ranks: Ranks) -> None:
    """Only the missing rank is named."""
    local = {0: None, 5: 1, 6: 2, 7: 3}
    started = [ranks.start(rank, SIZE, local_rank=local[rank], timeout=1.0) for rank in local]
    (reason,) = reasons(started)
    assert "ranks 1, 2, 3, 4 of 8 have not arrived within 1 s" in reason


def test_roster_is_a_sequence_that_caches_derived_values() -> None:
    roster = Roster(Roster.of([b"one", b"", b"three"]).body)
    assert roster == [b"one", b"", b"three"]
    assert (len(roster), roster[-1], roster[1:]) == (3, b"three", [b"", b"three"])
    assert b"" in roster
    with pytest.raises(IndexError):
        roster[3]
    made: list[int] = []

    def total(payloads: Sequence[bytes], more: int) -> int:
        made.append(more)
        return sum(map(len, payloads)) + more

    assert [roster.derived(total, more) for more in (1, 1, 2)] == [9, 9, 10]
    assert made == [1, 2]


def test_message_follows_the_unsent_rest_of_the_previous_message() -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        one, other = Connection(sender), Connection(receiver)
        other.trust(0.0)
        sent = [(Kind.PART, bytes(1 << 20)), (Kind.FAILURE, b"why")]
        assert not any(one.send(*message, time.monotonic() + 0.01) for message in sent)
        for message in sent:
            while not other.inbox:
                one.flush(time.monotonic() + 0.01)
                other.receive(0.01)
            assert other.inbox.popleft() == message


def test_error_about_many_ranks_says_how_many_are_omitted() -> None:
    """A lost rack or all other ranks: more processes than an error can name."""
    size, native = 100_000, _native.load_extension("shm")

    def missing(_: Any, room: Any, capacity: int) -> int:
        room[0 : size - 1] = range(1, size)
        return min(capacity, size - 1)

    library = SimpleNamespace(
        fl_op_message=lambda _: native.ffi.new("char[]", b"why"),
        fl_op_missing=missing,
        fl_op_signatures=lambda _: native.ffi.NULL,
        **{name: getattr(native.lib, name) for name in dir(native.lib) if name.startswith("FL_")},
    )
    backend: Any = SimpleNamespace(
        ffi=native.ffi, lib=library, name="rank 0", size=size, numbers=range(size)
    )
    backend.processes = [f"process {rank} on host" for rank in range(size)]
    error = failure(backend, None, library.FL_HOST_LOST, "all_reduce", 1.0, 1)
    assert "rank 0: lost ranks 1, 2, 3" in str(error)
    assert name_ranks(range(20)).endswith("18, 19")
    assert "19, 20 and 99979 more (why), which are process 1 on host, process 2" in str(error)
    assert "process 20 on host and 99979 more. Check that host" in str(error)
