"""Profiles contain every rank's calls on one clock as a Chrome trace, and leave no state."""

import gc
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.journal import Record
from flashlight_py.distributed.start.world import current_world
from flashlight_py.trace import profiling
from flashlight_py.trace.profiling import RankTimeline, chrome_trace, covered
from tests.distributed.conformance import on_ranks
from tests.trace.validity import assert_valid

SHM = {"BACKEND": "shm"}


def profiled(rank: int, size: int, path: str) -> bool:
    x = np.zeros(1000, np.float32)
    with fl.profile(path) as taken:
        fl.all_reduce(x)
        with taken.span("overlap"):
            work = fl.all_reduce(np.zeros(500_000), async_op=True)
            if rank == 0:
                fl.sendrecv(x, 1, out=x.copy(), src=1)
            else:
                fl.sendrecv(x, 0, out=x.copy(), src=0)
            work.wait()
        with pytest.raises(RuntimeError, match="another profile is active"):
            fl.profile(path).start()
    assert journal.listener is None
    gc.collect()
    fl.all_reduce(x)  # makes Python release objects of other tests in these ranks
    fl.all_reduce(x)
    of_world = current_world().group.journal
    last = of_world.records()[-1].id
    return any(isinstance(note, Record) and note.id == last for note in of_world.notes)


def test_profile_records_two_ranks(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    through_python = pool(2, params=SHM).run(profiled, str(path))
    assert through_python == [False, False]  # the native fast path is enabled again
    trace = json.loads(path.read_text())
    assert_valid(trace)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        local_events = [e for e in events if e["pid"] == rank and e["cat"] != "late"]
        names = sorted(e["name"] for e in local_events)
        expected = ["Profile.start", *["all_reduce"] * 2, "overlap", "sendrecv"]
        expected += ["wait for all_reduce"]
        assert names == expected
        lines = {e["args"]["line"].split(":")[0] for e in local_events if "line" in e["args"]}
        assert lines == {"trace/test_profile.py"}
        beside = next(e for e in local_events if e["args"].get("async"))
        assert beside["args"]["bytes"] == 4_000_000
        assert beside["tid"] != next(e for e in local_events if e["name"] == "overlap")["tid"]
    assert {s["rank"] for s in trace["otherData"]["summary"]} == {0, 1}


def test_profile_writes_one_part_per_rank_if_a_rank_raises(tmp_path: Path) -> None:
    def fail() -> None:
        with fl.profile(tmp_path / "trace.json"):
            fl.barrier()
            raise KeyError("in the program")

    with pytest.raises(RuntimeError, match="expected an active profile"):
        fl.profile(tmp_path / "trace.json").stop()
    with pytest.raises(KeyError):
        fail()
    assert journal.listener is None
    assert_valid(json.loads((tmp_path / "trace.rank0.json").read_text()))
    assert not (tmp_path / "trace.json").exists()


IN_CHILDREN = """
import os, sys
import numpy as np
import flashlight_py as fl
from flashlight_py.distributed.calls import journal

def profile_in_child(path):
    if os.fork() == 0:
        assert not journal.recent_records() and sorted(journal.groups()) == ["ranks 0", "world"]
        with fl.profile(path):
            fl.all_reduce(np.ones(3))
            alone.barrier()
        os._exit(0)
    assert os.wait()[1] == 0

alone, (outer, first, second) = fl.new_group([0]), sys.argv[1:]
fl.all_reduce(np.ones(3))
profile_in_child(first)
with fl.profile(outer):
    profile_in_child(second)
"""


@pytest.mark.slow
def test_profile_in_a_forked_child_records_its_calls(tmp_path: Path) -> None:
    paths = [tmp_path / "outer.json", tmp_path / "first.json", tmp_path / "second.json"]
    command = [sys.executable, "-c", IN_CHILDREN, *map(str, paths)]
    subprocess.run(command, check=True, timeout=60)
    for path in paths[1:]:
        events = json.loads(path.read_text())["traceEvents"]
        names = [event["name"] for event in events if event["ph"] == "X"]
        assert names == ["all_reduce", "barrier"]


@on_ranks(("shm", 2))
def test_offset_to_rank_0_measures_the_clock_of_another_host(rank: int, size: int) -> None:
    """Fake the clocks of two hosts, an hour apart; rank 1's clock is ahead."""
    backend = current_world().group.backend()
    assert profiling.offset_to_rank_0(backend) == 0  # one host, one clock
    if rank == 0:
        profiling._send_times(backend, 1)
        return
    ahead = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + 3_600 * 10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "time", ahead)
        assert abs(profiling._measure_offset(backend) + 3_600 * 10**9) < 5_000_000


TIMES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple))


@hypothesis.settings(max_examples=30)
@hypothesis.given(TIMES)
def test_covered_counts_overlapping_time_once(times: Any) -> None:
    assert covered(times) == len({time for start, end in times for time in range(start, end)})


@hypothesis.settings(max_examples=30)
@hypothesis.given(TIMES, st.booleans())
def test_threads_contain_events_without_overlap(times: Any, beside: bool) -> None:
    calls = [call(n, *span, **{"async": beside}) for n, span in enumerate(times)]
    trace = chrome_trace([RankTimeline(0, "a", 1, 0, 0, calls)])
    assert_valid(trace)
    zero = min((start for start, _ in times), default=0)
    threads: dict[int, list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e3) + zero
            end = start + round(event["dur"] * 1e3)
            threads.setdefault(event["tid"], []).append((start, end))
    assert sorted(item for thread in threads.values() for item in thread) == sorted(times)
    if beside:
        for thread in threads.values():
            assert all(later[0] >= event[1] for event, later in itertools.pairwise(thread))


def call(number: int, started: int, ended: int | None, **fields: Any) -> dict[str, Any]:
    times = {"started": started} if ended is None else {"started": started, "ended": ended}
    about = {"group": "world", "number": number, "verb": "all_reduce", "bytes": 8}
    return {**about, **times, **fields}


def test_trace_aligns_ranks_and_names_the_late_rank() -> None:
    # Rank 1's clock is an hour ahead.
    hour = 3_600 * 10**9
    first = RankTimeline(0, "a", 1, 0, 90_000, [call(1, 10_000, 50_000), call(2, 60_000, None)])
    second = RankTimeline(1, "b", 2, -hour, hour, [call(1, hour + 40_000, hour + 51_000)])
    first.spans.append(("step", 0, 55_000))
    trace = chrome_trace([first, second])
    assert_valid(trace)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (0, "step", 0.0, 55.0),
        (0, "all_reduce", 10.0, 40.0),
        (0, "waits for rank 1", 10.0, 30.0),
        (0, "all_reduce", 60.0, 30.0),
        (1, "all_reduce", 40.0, 11.0),
    ]
    assert events[3]["args"]["running"]
    verbs = trace["otherData"]["summary"][0]["verbs"]
    assert verbs == {"all_reduce": {"calls": 2, "bytes": 16, "us": 70.0, "waited_us": 30.0}}


def test_trace_has_separate_threads_for_overlapped_calls() -> None:
    both = [call(n, 0, 10_000 * n, **{"async": True, "waits": [[8_000, 9_000]]}) for n in (1, 2)]
    trace = chrome_trace([RankTimeline(0, "a", 1, 0, 0, both)])
    assert_valid(trace)
    threads = {(e["name"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert len({thread for name, thread in threads if name == "all_reduce"}) == 2
    summary = trace["otherData"]["summary"][0]
    assert summary["overlapped_us"] == 19.0
    assert summary["blocked_us"] == 1.0
