"""Records of every verb of every backend: arguments, line of code and outcome."""

import time
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import BROADCAST
from flashlight_py.distributed.work import Done
from flashlight_py.errors import CollectiveTimeoutError, MismatchError
from tests.distributed.conformance import on_ranks

EVERY_WORLD = on_ranks(("shm", 2), ("hierarchical", 4), slow=[("gloo", 2), ("mpi", 2)])


def current_line() -> str:
    """Return the name of this file in records."""
    return "trace/test_recorder.py:"


def calls_since(number: int, group: str = "world") -> list[dict[str, Any]]:
    records = [record.as_dict() for record in journal.recent_records()]
    return [r for r in records if r["group"] == group and r.get("number", 0) > number]


VERBS = [
    *("all_reduce", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter"),
    *("reduce_scatter", "all_to_all", "barrier", "all_gather_object", "broadcast_object"),
    *("all_reduce", "all_reduce", "all_reduce"),
]


@EVERY_WORLD
def test_journal_numbers_and_describes_every_verb(rank: int, size: int) -> None:
    before = journal.groups()["world"]["calls"]
    x = np.full(4, 1.0, np.float32)
    fl.all_reduce(x)
    fl.all_reduce(x, op="max", async_op=True).wait()
    fl.reduce(x, root=1)
    fl.broadcast(np.zeros((2, 3)), root=1)
    fl.all_gather(np.zeros(rank + 1))
    fl.gather(x, root=1)
    fl.scatter(np.zeros((size, 2)) if rank == 0 else None)
    fl.reduce_scatter(x)
    fl.all_to_all(x)
    fl.barrier()
    fl.all_gather_object("word")
    fl.broadcast_object("word")
    fl.all_reduce_multiple([x, np.zeros(2)])
    fl.all_reduce(x)
    right, left = (rank + 1) % size, (rank - 1) % size
    fl.sendrecv(x, right, out=np.zeros(4, np.float32), src=left, tag=3)
    message = journal.recent_records()[-1].as_dict()
    calls = calls_since(before)
    assert [call["verb"] for call in calls] == VERBS
    assert [call["number"] - before for call in calls] == list(range(1, len(VERBS) + 1))
    assert all(0 < call["started"] <= call["ended"] for call in calls)
    # Only calls that took the native fast path without waiting have no line.
    lines = [call.get("line", current_line()) for call in calls[1:-1]]
    assert all(line.startswith(current_line()) for line in lines)
    assert [call["bytes"] for call in calls[:5]] == [16, 16, 16, 48, 8 * (rank + 1)]
    assert calls[1]["op"] == "max"
    assert calls[1]["async"]
    assert calls[3] | {"root": 1, "dtype": "float64", "shape": [2, 3]} == calls[3]
    assert calls[12].get("via") == ("all_reduce_multiple" if "line" in calls[12] else None)
    assert message | {"verb": "sendrecv", "peer": right, "tag": 3} == message


@EVERY_WORLD
def test_journal_records_the_line_of_a_with_block_for_its_last_call(rank: int, size: int) -> None:
    """The line must not be one of contextlib, which makes the call."""
    fl.set_seed(1)
    model = fl.nn.Linear(3, 2)
    fl.distribute_module_grads(model)
    before = journal.groups()["world"]["calls"]
    with fl.join(model):
        pass
    calls = calls_since(before)
    assert calls
    assert {call.get("via", "join") for call in calls} == {"join"}
    assert all(call.get("line", current_line()).startswith(current_line()) for call in calls)


@on_ranks(("shm", 2))
def test_journal_records_the_reason_of_a_failed_call_and_counts_on(rank: int, size: int) -> None:
    before = journal.groups()["world"]["calls"]
    for verb in (
        lambda: fl.all_reduce(np.zeros(3 + rank)),
        lambda: fl.broadcast(np.zeros(2000), rank),  # large, so that its root waits for all ranks
    ):
        with pytest.raises(MismatchError):
            verb()
    fl.all_reduce(np.zeros(3))
    calls = calls_since(before)
    assert [call["verb"] for call in calls] == ["all_reduce", "broadcast", "all_reduce"]
    assert all(call["error"].startswith("MismatchError: ") for call in calls[:2])
    assert all(call["line"].startswith(current_line()) for call in calls[:2])
    assert "error" not in calls[2]


@on_ranks(("shm", 2))
def test_journal_records_no_failure_if_a_wait_times_out(rank: int, size: int) -> None:
    before = journal.groups()["world"]["calls"]
    if rank == 1:
        fl.recv(np.zeros(1), 0)
        fl.all_reduce(np.zeros(3))
        return
    work = fl.all_reduce(np.zeros(3), async_op=True)
    with pytest.raises(CollectiveTimeoutError):
        work.wait(timeout=0.01)
    (running,) = calls_since(before)
    fl.send(np.zeros(1), 1)  # lets the other rank continue
    work.wait()
    (ended,) = calls_since(before)
    assert "ended" not in running
    assert "error" not in running
    assert ended["ended"] > running["started"]


@on_ranks(("shm", 2))
def test_group_names_are_equal_on_all_ranks(rank: int, size: int) -> None:
    groups_before = set(journal.groups())
    groups = [fl.new_group([1, 0]), fl.new_group([1, 0])]
    for group in groups:
        group.all_reduce(np.zeros(3))
    names = [name for name in journal.groups() if name not in groups_before]
    calls = [call for name in names for call in calls_since(0, name)]
    for group in groups:
        group.close()
    assert fl.all_gather_object(names) == [names] * 2
    assert len(names) == 2
    assert [call["number"] for call in calls] == [1, 1]


class Flight:
    """A fake collective of a device that ends when the test sets it."""

    ended: float | None = None


def test_device_call_ends_when_the_device_is_done() -> None:
    device_journal = journal.Journal("devices", (0,), "")
    work, flight = Done(None), Flight()
    work.flight = flight
    device_journal.run([Call(BROADCAST)], "broadcast", lambda: work)
    assert "ended" not in calls_since(0, "devices")[0]
    flight.ended = time.monotonic()
    assert calls_since(0, "devices")[0]["ended"] == int(flight.ended * 1e9)


def test_journal_of_one_rank_ignores_invalid_calls() -> None:
    before = current_world().group.journal.count[0]
    with pytest.raises(TypeError):
        fl.all_reduce("no array")
    fl.all_reduce(np.zeros(3), scale=0.5)
    call = calls_since(before)[-1]
    assert call["number"] == before + 1
    assert call["line"].startswith(current_line())
