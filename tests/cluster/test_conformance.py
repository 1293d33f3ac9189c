"""The conformance suite between hosts; each world is started in another way."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.distributed.test_conformance import (  # noqa: F401 - run here, with the fixture below
    test_a_reduction_gives_the_same_bits_every_time,
    test_all_reduce_multiple_of_mixed_arrays,
    test_everything_at_once_in_any_order_of_waiting,
    test_messages,
    test_reductions_of_every_dtype_and_of_every_layout,
    test_reductions_of_every_dtype_in_every_layout,
    test_reductions_of_sizes_around_every_threshold,
    test_verbs_from_every_root_with_every_op,
    test_where_the_extremes_are,
    test_works_that_are_in_flight_or_dropped,
)
from tests.distributed.test_programs import test_each_verb_in_every_size  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Ranks on each host, versions of IP, kind of start.
WORLDS = [
    ((2, 2), "4", "env"),
    ((2, 2), "6", "env"),
    ((2, 2), "4", "file"),
    ((1, 1, 1, 1), "4", "env"),
    ((1, 1, 1, 1), "6", "file"),
    ((3, 1), "4", "env"),
]


def _name(world: tuple[tuple[int, ...], str, str]) -> str:
    counts, family, init = world
    return f"{'+'.join(map(str, counts))} IPv{family} {init}"


@pytest.fixture(scope="module", params=WORLDS, ids=_name)
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    counts, families, init = request.param
    with (
        Cluster(len(counts), families=families) as cluster,
        cluster.ranks(counts, init=init) as run,
    ):
        yield run
