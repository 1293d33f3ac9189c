"""From what ranks have recorded to one Chrome trace, which Perfetto reads too.

The format is the JSON of Chrome's "Trace Event Format": complete events (``"ph": "X"``), times in
microseconds. A process of the trace is a rank; its first thread is the program, with the calls that
block it and its waits; the others hold what runs beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlight_py.trace.lanes import in_lanes
from flashlight_py.trace.records import FlightRecord, call_text
from flashlight_py.trace.summary import summarise

__all__ = ["FORMAT", "RankTimeline", "chrome_trace", "of_records", "read_trace"]

FORMAT = "flashlight_py trace 1"
# Less than this is no waiting that anybody could see, or could do something about.
_LATE_NANOSECONDS = 1000


@dataclass
class RankTimeline:
    """What one rank did. Times are in nanoseconds of its own clock; ``offset`` makes them rank 0's.

    ``calls`` are as ``Record.as_dict`` gives them; what has not ended has lasted ``until`` then.
    ``spans`` are the program's own: (name, from, to).
    """

    rank: int
    host: str
    pid: int
    offset: int
    until: int
    calls: list[dict[str, Any]]
    spans: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass
class _Event:
    """Something on a timeline, in nanoseconds of the common clock."""

    name: str
    kind: str  # collective, message, wait or span
    start: int
    end: int
    rank: int
    arguments: dict[str, Any]
    beside: bool = False  # the program goes on meanwhile
    late: int = 0  # until this time it waited for the rank that came last


def chrome_trace(timelines: Sequence[RankTimeline]) -> dict[str, Any]:
    """Return the trace of all ranks, the earliest event at 0."""
    events = [event for timeline in timelines for event in _events(timeline)]
    _find_late_ranks(events)
    zero = min((event.start for event in events), default=0)
    listed = [_process(timeline) for timeline in timelines]
    for timeline in timelines:
        own = [event for event in events if event.rank == timeline.rank]
        program = in_lanes([e for e in own if not e.beside], nested=True)
        beside = in_lanes([e for e in own if e.beside], nested=False)
        lanes = [("program", lane) for lane in program] + [("beside it", lane) for lane in beside]
        for thread, (name, lane) in enumerate(lanes):
            listed += _lane(timeline.rank, thread, name, lane, zero)
    return {
        "traceEvents": listed,
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "summary": [_summary(t.rank, events) for t in timelines],
        },
    }


def _events(timeline: RankTimeline) -> Iterable[_Event]:
    rank, offset = timeline.rank, timeline.offset
    for call in timeline.calls:
        start, end = call["started"], call.get("ended", timeline.until)
        kind = "message" if "peer" in call else "collective"
        left_out = ("started", "ended", "waits", "verb", "seconds", "seconds_ago", "state")
        arguments: dict[str, Any] = {"call": call_text(call)}
        arguments |= {name: value for name, value in call.items() if name not in left_out}
        if "ended" not in call:
            arguments["running"] = True
        beside = call.get("async", False)
        yield _Event(call["verb"], kind, start + offset, end + offset, rank, arguments, beside)
        for began, ended in call.get("waits", ()):
            name = f"wait for {call['verb']}"
            told: dict[str, Any] = {k: call[k] for k in ("group", "number") if k in call}
            yield _Event(name, "wait", began + offset, ended + offset, rank, told)
    for name, start, end in timeline.spans:
        yield _Event(name, "span", start + offset, end + offset, rank, {})


def _find_late_ranks(events: Iterable[_Event]) -> None:
    """Note of each collective for which rank the others waited, and until when."""
    together: dict[tuple[str, int], list[_Event]] = {}
    for event in events:
        if event.kind == "collective" and "number" in event.arguments:
            key = event.arguments["group"], event.arguments["number"]
            together.setdefault(key, []).append(event)
    for same in together.values():
        last = max(same, key=lambda event: event.start)
        for event in same:
            waited = min(last.start, event.end) - event.start
            if waited > _LATE_NANOSECONDS:
                event.late = event.start + waited
                event.arguments["waited_us"] = waited / 1e3
                event.arguments["waited_for_rank"] = last.rank


def _process(timeline: RankTimeline) -> dict[str, Any]:
    name = f"rank {timeline.rank} ({timeline.host}, pid {timeline.pid})"
    return {"name": "process_name", "ph": "M", "pid": timeline.rank, "args": {"name": name}}


def _lane(
    rank: int, thread: int, name: str, events: Sequence[_Event], zero: int
) -> Iterable[dict[str, Any]]:
    yield {
        "name": "thread_name",
        "ph": "M",
        "pid": rank,
        "tid": thread,
        "args": {"name": name},
    }
    for event in events:
        place = {"ph": "X", "pid": rank, "tid": thread, "ts": (event.start - zero) / 1e3}
        duration = (event.end - event.start) / 1e3
        arguments = event.arguments
        yield {
            "name": event.name,
            "cat": event.kind,
            **place,
            "dur": duration,
            "args": arguments,
        }
        if event.late:
            late = f"waits for rank {arguments['waited_for_rank']}"
            yield {"name": late, "cat": "late", **place, "dur": arguments["waited_us"], "args": {}}


def _summary(rank: int, events: Iterable[_Event]) -> dict[str, Any]:
    own = [event for event in events if event.rank == rank and event.kind != "span"]
    calls = [event for event in own if event.kind != "wait"]
    verbs: dict[str, dict[str, float]] = {}
    for event in calls:
        verb = verbs.setdefault(event.name, {"calls": 0, "bytes": 0, "us": 0.0, "waited_us": 0.0})
        verb["calls"] += 1
        verb["bytes"] += event.arguments["bytes"]
        verb["us"] += (event.end - event.start) / 1e3
        verb["waited_us"] += event.arguments.get("waited_us", 0.0)
    moving = [(event.start, event.end) for event in calls]
    blocked = [(event.start, event.end) for event in own if not event.beside]
    return {"rank": rank, "verbs": verbs, **summarise(moving, blocked)}


def of_records(records: Sequence[FlightRecord]) -> dict[str, Any]:
    """Return the trace of flight records, aligned by the hosts' clocks."""
    return chrome_trace(
        [
            RankTimeline(r.rank, r.host, r.pid, int(r.wall * 1e9) - r.now, r.now, r.calls)
            for r in records
        ]
    )


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace that ``fl.profile`` has written.

    Raises:
        ValueError: it is something else.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    data = trace.get("otherData", {}) if isinstance(trace, dict) else {}
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by fl.profile, or by another version of it")
    return dict(trace)
