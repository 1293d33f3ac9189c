"""Ten thousand messages that are open at once cost little, and all end when they cannot go on."""

import signal
from typing import Any

import pytest

from tests.distributed import many_open
from tests.distributed.conformance import BACKENDS, ranks_in
from tests.distributed.harness import run_outcomes, run_ranks

# On several hosts Python begins each message, and ends it, here for four ranks on two cores.
OPEN = {2: 10_000, 4: 1_000}
WORLDS = [("shm", 2), ("gloo", 2), ("hierarchical", 4)]

ranks = ranks_in(*WORLDS)


@pytest.mark.parametrize("one_tag", [False, True], ids=["tags", "one tag"])
@pytest.mark.parametrize("kind", ["irecv", "isend", "irecv of any"])
def test_open_messages_cost_no_thread_and_little_memory(
    ranks: Any, kind: str, one_tag: bool
) -> None:
    if kind == "irecv of any" and ranks.size > 2:
        pytest.skip("any other rank may send here")
    count = OPEN[ranks.size]
    # Small messages that were sent lie with the receiver, over TCP in what has come as well.
    most = many_open.MOST_BYTES * (2 if kind == "isend" else 1)
    for held in ranks.run(many_open.hold_open, count, kind, one_tag, deadline=20.0):
        assert max(held) <= most + many_open.ONCE / count, held


@pytest.mark.parametrize("batch", [False, True], ids=["each", "one batch"])
def test_all_end_when_the_group_is_closed(ranks: Any, batch: bool) -> None:
    ranks.run(many_open.close_with_many_open, OPEN[ranks.size], batch, deadline=20.0)


@pytest.mark.parametrize(("backend", "size"), WORLDS)
def test_all_end_when_a_peer_is_killed(backend: str, size: int) -> None:
    outcomes = run_outcomes(
        many_open.die_with_many_open, size, OPEN[size], deadline=20.0, **BACKENDS[backend][1]
    )
    assert outcomes.pop(1).signal == signal.SIGKILL
    assert all(outcome.ok for outcome in outcomes), outcomes


@pytest.mark.parametrize(("backend", "size"), WORLDS)
def test_all_have_ended_in_a_forked_child_and_go_on_in_its_parent(backend: str, size: int) -> None:
    """Ranks of their own: a fork leaves open what ranks of other tests share."""
    run_ranks(
        many_open.fork_with_many_open, size, OPEN[size], deadline=20.0, **BACKENDS[backend][1]
    )
