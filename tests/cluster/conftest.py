"""Fixture of the hosts."""

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Return two hosts with both versions of IP and no limits."""
    with Cluster(2) as made:
        yield made
