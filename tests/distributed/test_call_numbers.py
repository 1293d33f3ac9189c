"""Errors and flight records number the calls of a group alike, however many steps those take."""

import re
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.exchange import exchange_bytes
from flashlight_py.distributed.failures import journal
from tests.distributed.conformance import on_ranks

CALLS = {
    "shared_empty": lambda group: group.shared_empty(3),
    "host_array": lambda group: group.host_array(lambda: np.ones(3)),
    "a short object": lambda group: group.all_gather_object("x"),
    "a long object": lambda group: group.all_gather_object("x" * 5000),
    "a long object of one": lambda group: group.broadcast_object("x" * 5000),
    "objects": lambda group: group.scatter_object(["x" * 5000] * group.size),
    "unequal parts": lambda group: group.all_to_all(np.ones(group.size), rows=[1] * group.size),
    "a group": lambda group: group.new_group(range(group.size)).close(),
    "a split": lambda group: group.split(0).close(),
    "several": lambda group: group.all_reduce_multiple([np.ones(2), np.ones(3)]),
    "what runs natively": lambda group: group.all_reduce(np.ones(2)),
    "what no user has called": lambda group: exchange_bytes(group.backend(), b"x" * 5000),
    "a message": lambda group: group.sendrecv(
        np.ones(1),
        (group.rank + 1) % group.size,
        out=np.ones(1),
        src=(group.rank - 1) % group.size,
    ),
}


@on_ranks(("gloo", 3), ("shm", 3), ("hierarchical", 3), slow=[("mpi", 3)])
def test_errors_count_as_records_do(rank: int, size: int) -> None:
    world = fl.new_group(range(size))  # with a count of its own
    for group in (world, world.new_group([1, 0])):
        if not group.is_member:
            continue
        for name, call in CALLS.items():
            call(group)
            differ(group, name)
        late = group.all_reduce(np.ones(2 + group.rank), async_op=True)
        due = calls_of(group)
        group.all_gather_object("x" * 5000)  # what comes afterwards does not count
        with pytest.raises(fl.errors.MismatchError, match=f" in call {due} of this group"):
            late.wait()
    world.close()


def differ(group: Any, name: str) -> None:
    """Fail in a plain call, and in the first step of others."""
    for call in (
        lambda: group.all_reduce(np.ones(2 + group.rank)),
        lambda: group.all_gather_object("x") if group.rank else group.barrier(),
        lambda: group.all_reduce(None if group.rank else np.ones(2)),
    ):
        with pytest.raises((TypeError, fl.errors.MismatchError)) as caught:
            call()
        if isinstance(caught.value, TypeError):
            continue
        reported = re.search(r" in call (\d+) of this group", str(caught.value))
        assert reported, str(caught.value)
        assert int(reported[1]) == calls_of(group), (name, str(caught.value))


def calls_of(group: Any) -> int:
    (found,) = [
        journal.groups()[name]["calls"] for name in journal.groups() if name == group.journal.name
    ]
    return int(found)
