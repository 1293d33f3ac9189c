"""What starts the ranks of these tests."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.chaos.rounds import start_ranks
from tests.distributed.rendezvous_helpers import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """What starts ranks; each plan names the ``part`` that it plays in ``tests.chaos.rank``.

    It stays between tests, the ranks must not.
    """
    with closing(start_ranks()) as started:
        yield started
