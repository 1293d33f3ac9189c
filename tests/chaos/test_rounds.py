"""A rank dies, stops, raises or exits during a verb, and the other ranks raise soon.

A sample of the rounds of ``python -m tests.chaos``. The ordinary run contains each backend,
the slow run each pair of a backend and a fault.
"""

from itertools import product

import pytest

from tests.chaos.rounds import BACKENDS, FATES, Round, play
from tests.chaos.verbs import VERBS
from tests.distributed.rendezvous_helpers import Ranks

# Each call creates a group of some ranks, which is slow.
SAMPLED = [verb for verb in VERBS if verb != "split"]


def sample(backend: str, fate: str) -> list[str]:
    """Return rounds in which every verb meets some fault on some backend. A stopped rank costs a
    timeout."""
    number = list(BACKENDS).index(backend) * len(FATES) + list(FATES).index(fate)
    step = len(SAMPLED) if fate == "stop" else 2 * len(FATES)
    return [
        *SAMPLED[number % step :: step],
        *(["split"] if (backend, fate) == ("shm", "kill") else []),
    ]


ORDINARY = [("gloo", "kill"), ("hierarchical", "exception"), ("shm", "interrupt")]
PAIRS = [
    pytest.param(*pair, marks=() if pair in ORDINARY else pytest.mark.slow)
    for pair in product(BACKENDS, FATES)
]


@pytest.mark.parametrize(("backend", "fate"), PAIRS)
def test_survivors_raise_in_time_and_clean_up(ranks: Ranks, backend: str, fate: str) -> None:
    for verb in sample(backend, fate):
        game = Round(backend, verb, fate, seed=1)
        assert play(ranks, game).wrong == [], game.command
