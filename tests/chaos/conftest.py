"""Every test here starts processes, so every test here is checked for what it leaves behind."""

from collections.abc import Iterator

import pytest

from tests.chaos.rounds import start_ranks
from tests.distributed.rendezvous_helpers import Ranks


@pytest.fixture(autouse=True)
def _nothing_left(leaves_nothing: None) -> None:
    """Use ``leaves_nothing`` for each test of this folder."""


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """What starts ranks; each plan names the ``part`` that it plays in ``tests.chaos.rank``.

    It stays between tests, the ranks must not.
    """
    started = start_ranks()
    try:
        yield started
    finally:
        started.close()
