"""From calls to a Chrome trace: threads, waiting, overlap."""

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st

from flashlight_py.trace.profiling import chrome_trace, covered
from flashlight_py.trace.records import RankTimeline
from tests.trace.validity import assert_valid

TIMES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple))


@hypothesis.given(TIMES)
def test_time_is_counted_once(times: Any) -> None:
    assert covered(times) == len({time for start, end in times for time in range(start, end)})


@hypothesis.given(TIMES, st.booleans())
def test_threads_hold_what_fits(times: Any, beside: bool) -> None:
    calls = [call(n, *each, **{"async": beside}) for n, each in enumerate(times)]
    trace = chrome_trace([RankTimeline(0, "a", 1, 0, 0, calls)])
    assert_valid(trace)
    zero = min((start for start, _ in times), default=0)
    threads: dict[int, list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e3) + zero
            end = start + round(event["dur"] * 1e3)
            threads.setdefault(event["tid"], []).append((start, end))
    assert sorted(each for thread in threads.values() for each in thread) == sorted(times)
    if beside:
        for thread in threads.values():
            assert all(later[0] >= event[1] for event, later in itertools.pairwise(thread))


def call(number: int, started: int, ended: int | None, **fields: Any) -> dict[str, Any]:
    times = {"started": started} if ended is None else {"started": started, "ended": ended}
    about = {"group": "world", "number": number, "verb": "all_reduce", "bytes": 8}
    return {**about, **times, **fields}


def test_ranks_are_aligned_and_the_late_one_is_named() -> None:
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


def test_what_runs_beside_the_program_has_threads_of_its_own() -> None:
    both = [call(n, 0, 10_000 * n, **{"async": True, "waits": [[8_000, 9_000]]}) for n in (1, 2)]
    trace = chrome_trace([RankTimeline(0, "a", 1, 0, 0, both)])
    assert_valid(trace)
    threads = {(e["name"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert len({thread for name, thread in threads if name == "all_reduce"}) == 2
    summary = trace["otherData"]["summary"][0]
    assert summary["overlapped_us"] == 19.0
    assert summary["blocked_us"] == 1.0


def test_nothing_at_all_is_a_trace_too() -> None:
    trace = chrome_trace([RankTimeline(0, "a", 1, 0, 0, [])])
    assert_valid(trace)
    nothing = {"communication_us": 0.0, "blocked_us": 0.0, "overlapped_us": 0.0}
    assert trace["otherData"]["summary"] == [{"rank": 0, "verbs": {}, **nothing}]
