"""Every test here starts processes, so every test here is checked for what it leaves behind."""

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Cluster


@pytest.fixture(autouse=True)
def _nothing_left(leaves_nothing: None) -> None:
    """Use ``leaves_nothing`` for each test of this folder."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts, with both versions of IP and no limits."""
    with Cluster(2) as made:
        yield made
