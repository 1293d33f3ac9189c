"""Fixture that starts the ranks of these tests."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.distributed.rendezvous_helpers import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Return the object that starts ranks; each plan names its ``part`` of ``fork_server``.

    The object is kept between tests, but no rank may remain.
    """
    with closing(Ranks()) as started:
        yield started
