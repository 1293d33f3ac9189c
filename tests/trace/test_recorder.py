"""Journals of calls, profiles with their trace files, and the page of a trace in a real browser."""

import gc
import html
import itertools
import json
import re
import shutil
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
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.journal import Record
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import BROADCAST
from flashlight_py.distributed.work import Done
from flashlight_py.errors import CollectiveTimeoutError, MismatchError
from flashlight_py.trace import profiling
from flashlight_py.trace.profiling import RankTimeline, chrome_trace, covered, page
from tests.distributed.conformance import on_ranks
from tests.launch.launcher import run
from tests.trace.validity import assert_valid

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
        assert lines == {"trace/test_recorder.py"}
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


MS = 1_000_000
BROWSERS = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
PROGRAM = next(BROWSERS, None)


def an_event(number: int, verb: str, start: float, end: float, **fields: Any) -> dict[str, Any]:
    times = {"started": int(start * MS), "ended": int(end * MS)}
    about = {"group": "world", "number": number, "verb": verb, "bytes": 4096, "dtype": "float32"}
    return {**about, "shape": [1024], "line": "examples/train.py:7", **times, **fields}


def a_trace() -> dict[str, Any]:
    timelines = []
    for rank in range(3):
        calls = [
            an_event(1, "all_reduce", 2, 20, **{"async": True, "op": "sum"}),
            an_event(2, "broadcast", 30 + 5 * rank, 45, root=0),
            an_event(3, "barrier", 50, 60, error="</script><b>PeerLostError"),
        ]
        spans = [("forward & backward", 0, 25 * MS)]
        timelines.append(RankTimeline(rank, "host", 100 + rank, 0, 70 * MS, calls, spans))
    return chrome_trace(timelines)


def test_page_is_self_contained() -> None:
    text = page(a_trace())
    assert not re.search(r"https?://|src=|<link|@import|url\(", text)
    assert text.count("</script>") == 2  # data cannot end a script element
    assert "/*TRACE*/" not in text
    assert "/*SCRIPT*/" not in text


def a_long_trace(count: int) -> dict[str, Any]:
    trace = a_trace()
    barrier = next(event for event in trace["traceEvents"] if event["name"] == "barrier")
    later = ({**barrier, "ts": 70_000 + number, "dur": 1, "args": {}} for number in range(count))
    trace["traceEvents"] += later
    return trace


# What a user sees and does, in the window of the page.
ACTIONS = """
const results = {};
const texts = (selector) => [...document.querySelectorAll(selector)].map(e => e.innerText);
results.rows = texts("tbody tr").map(row => row.split("\\t"));
results.facts = byId("facts").textContent;
results.legend = texts("#legend button");
const middle = (rank, name) => {  // of an event, in the window
  const box = canvas.getBoundingClientRect();
  for (const thread of bands[rank].threads.values())
    for (const e of thread.events) if (e.name === name)
      return {clientX: box.left + x(e.ts + e.dur / 2),
              clientY: box.top + thread.top + (e.row + .5) * ROW};
};
canvas.setPointerCapture = () => {};  // the browser knows no such pointer
const move = (kind, place) => canvas.dispatchEvent(new PointerEvent(kind, place));
const described = () => tip.style.display + tip.innerText;
const range = () => [from, to];
move("pointermove", middle(0, "broadcast"));
results.pointed = described();
move("pointermove", {clientX: 600, clientY: 20});
results.elsewhere = described();
results.all = range();
const place = middle(1, "broadcast");
canvas.dispatchEvent(new WheelEvent("wheel", {...place, deltaY: -600}));
results.zoomed = range();
move("pointerdown", place);
move("pointermove", {...place, clientX: place.clientX + 100});
move("pointerup", place);
results.moved = range();
byId("fit").click();
results.again = range();
results.error = document.body.dataset.error;
document.body.dataset.results = JSON.stringify(results);
"""


def seen(trace: dict[str, Any], folder: Path) -> dict[str, Any]:
    file = folder / "page.html"
    text = page(trace).replace("</body>", f"<script>{{{ACTIONS}}}</script></body>")
    file.write_text(text, encoding="utf-8")
    options = "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"
    done = run([PROGRAM, *options, "--window-size=1200,800", "--dump-dom", file.as_uri()])
    (results,) = re.findall('data-results="([^"]*)"', done.stdout)
    parsed: dict[str, Any] = json.loads(html.unescape(results))
    assert "error" not in parsed
    return {**parsed, "rows": {row[0].strip(): row[1:] for row in parsed["rows"]}}


@pytest.mark.skipif(PROGRAM is None, reason="needs a browser: apt-get install chromium")
def test_page_works_in_a_browser(tmp_path: Path) -> None:
    assert seen(a_long_trace(200_000), tmp_path)["rows"]["barrier"][4] == "10.00 ms"
    results = seen(a_trace(), tmp_path)
    assert results["facts"].startswith("3 ranks, ")
    assert results["legend"] == ["broadcast", "barrier", "all_reduce", "span"]
    assert results["rows"]["all_reduce"][:3] == ["3", "12 KiB", "54.00 ms"]
    # rank 0 waited 10 ms and rank 1 waited 5 ms for rank 2
    assert results["rows"]["broadcast"][3] == "15.00 ms"
    assert {"rank 0 (host, pid 100)", "rank 2 (host, pid 102)"} <= set(results["rows"])
    assert results["pointed"].startswith("blockbroadcast(float32 (1024,), root=0)")
    for part in ("15.00 ms", "10.00 ms for rank 2", "4 KiB", "examples/train.py:7", "call 2"):
        assert part in results["pointed"]
    assert results["elsewhere"].startswith("none")
    first, last = results["all"]
    left, right = results["zoomed"]
    assert first < left < 40_000 < right < last
    moved = results["moved"]
    assert moved[0] < left
    assert moved[1] - moved[0] == pytest.approx(right - left)
    assert results["again"] == pytest.approx(results["all"])
