"""Fixture that starts the ranks of these tests."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.chaos.rounds import start_ranks
from tests.distributed.rendezvous_helpers import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Return the object that starts ranks; each plan names its ``part`` in ``tests.chaos.rank``.

    The object is kept between tests, but no rank may remain.
    """
    with closing(start_ranks()) as started:
        yield started
