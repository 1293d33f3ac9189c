"""Ten thousand messages that are open at once cost no thread and little memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import many_open
from tests.distributed.conformance import ranks_in

OPEN = 10_000

ranks = ranks_in(("shm", 2), ("gloo", 2), ("hierarchical", 4))


@pytest.mark.parametrize("one_tag", [False, True], ids=["tags", "one tag"])
@pytest.mark.parametrize("kind", ["irecv", "isend", "irecv of any"])
def test_open_messages_cost_no_thread_and_little_memory(
    ranks: Any, kind: str, one_tag: bool
) -> None:
    if kind == "irecv of any" and ranks.size > 2:
        pytest.skip("any other rank may send here")
    for held in ranks.run(many_open.hold_open, OPEN, kind, one_tag, deadline=20.0):
        assert max(held) <= many_open.MOST_BYTES + many_open.ONCE / OPEN, held
