"""Production's control plane in virtual time: no fault of a seed makes it hang or name another."""

from __future__ import annotations

import signal

import pytest

from tests.simulation.faults import trial
from tests.simulation.scenario import Start, gather, meet


@pytest.mark.parametrize("tens", range(10))
def test_no_schedule_of_faults_ends_wrongly(tens: int) -> None:
    """Replay one that does by ``make simulate SEED=... RANKS=64``."""
    found = {seed: trial(seed)[2] for seed in range(20 * tens, 20 * tens + 20)}
    assert {seed: wrong for seed, wrong in found.items() if wrong} == {}


def test_a_seed_decides_everything() -> None:
    first, again, other = (trial(seed)[0] for seed in (8, 8, 12))
    assert first.ended == again.ended
    assert first.up == again.up
    assert first.world.messages == again.world.messages
    assert (first.up, first.ended) != (other.up, other.ended)


def test_all_ranks_come_up_and_rank_0_is_connected_with_all() -> None:
    start = Start(64, seed=1, begin=meet).run()
    assert start.up.keys() == set(range(64))
    assert max(start.up.values()) < 1.0
    assert start.processes[0].most_connections >= 63


def test_who_dies_between_two_exchanges_is_named_at_once() -> None:
    start = Start(64, seed=2, begin=gather)
    victim = start.processes[5]
    whole = max(Start(64, seed=2, begin=gather).run().up.values())
    start.world.at(0.65 * whole, victim.end, -signal.SIGKILL)
    start.run()
    assert start.errors.keys() == set(range(64)) - {5}
    assert all("rank 5 of 64" in str(error) for error in start.errors.values())
    assert max(start.ended.values()) < whole + 1.0


def test_a_host_without_an_answer_is_lost_after_the_hosts_timeout() -> None:
    from tests.simulation.network import divide

    start = Start(64, seed=3, begin=gather)
    whole = max(Start(64, seed=3, begin=gather).run().up.values())
    start.world.at(0.65 * whole, divide, start.world, [start.hosts[2]], 1)
    start.run()
    far = [rank for rank in range(64) if start.host_of(rank) is start.hosts[2]]
    assert all("cannot be reached for 5 s" in str(error) for error in start.errors.values())
    assert all("rank 0" in str(start.errors[rank]) for rank in far)
    assert max(start.ended.values()) < 6.0
