"""The conformance suite between hosts; each world is started in another way."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.distributed.test_conformance import (  # noqa: F401 - run here, with the fixture below
    test_all_reduce_location_returns_values_and_ranks,
    test_all_reduce_multiple_sums_mixed_arrays,
    test_async_verbs_complete_even_if_their_work_is_dropped,
    test_concurrent_verbs_match_numpy_in_any_order_of_waiting,
    test_messages_in_a_ring_arrive_during_collectives_of_a_thread,
    test_reductions_have_the_same_bits_in_every_run,
    test_reductions_match_numpy_for_each_dtype_and_each_layout,
    test_reductions_match_numpy_for_every_dtype_in_every_layout,
    test_reductions_match_numpy_for_sizes_around_every_threshold,
    test_verbs_match_numpy_for_every_root_and_op,
)
from tests.distributed.test_programs import test_each_verb_works_in_every_size  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Ranks on each host, versions of IP, kind of start.
WORLDS = [((2, 2), "6", "env"), ((1, 1, 1, 1), "4", "env"), ((3, 1), "4", "file")]


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
