"""From what ranks did to one Chrome trace, which Perfetto reads too, and to a page that shows it.

The format is the JSON of Chrome's "Trace Event Format": complete events (``"ph": "X"``), times in
microseconds. A process of the trace is a rank; its first thread is the program, with the calls that
block it and its waits; the others hold what runs beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from flashlight_py.trace.records import RankTimeline, call_text

FORMAT = "flashlight_py trace 1"
# Less than this is no waiting that anybody could see, or could do something about.
_LATE_NANOSECONDS = 1000
# What an event shows by its place and length, not as an argument.
_SHOWN = ("started", "ended", "waits", "verb", "seconds", "seconds_ago", "state")


@dataclass
class _Event:
    """Something on a timeline, in nanoseconds of the common clock."""

    name: str
    kind: str  # collective, message, wait, span, or late: the part of a call that is waiting
    start: int
    end: int
    arguments: dict[str, Any] = field(default_factory=dict)
    beside: bool = False  # the program goes on meanwhile


def chrome_trace(timelines: Sequence[RankTimeline]) -> dict[str, Any]:
    """Return the trace of all ranks, the earliest event at 0."""
    by_rank = {timeline.rank: list(_events(timeline)) for timeline in timelines}
    zero = min((event.start for events in by_rank.values() for event in events), default=0)
    _find_late_ranks(by_rank)
    listed = []
    for timeline in timelines:
        rank, name = timeline.rank, f"rank {timeline.rank} ({timeline.host}, pid {timeline.pid})"
        listed.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}})
        for thread, (name, events) in enumerate(_threads(by_rank[rank])):
            place = {"pid": rank, "tid": thread}
            listed.append({"name": "thread_name", "ph": "M", **place, "args": {"name": name}})
            listed += [
                {
                    "name": event.name,
                    "cat": event.kind,
                    "ph": "X",
                    **place,
                    "ts": (event.start - zero) / 1e3,
                    "dur": (event.end - event.start) / 1e3,
                    "args": event.arguments,
                }
                for event in events
            ]
    summary = [{"rank": rank, **_summary(events)} for rank, events in by_rank.items()]
    data = {"format": FORMAT, "summary": summary}
    return {"traceEvents": listed, "displayTimeUnit": "ms", "otherData": data}


def _events(timeline: RankTimeline) -> Iterator[_Event]:
    offset = timeline.offset
    for call in timeline.calls:
        verb, start, end = call["verb"], call["started"], call.get("ended", timeline.until)
        arguments: dict[str, Any] = {"call": call_text(call)}
        arguments |= {name: value for name, value in call.items() if name not in _SHOWN}
        if "ended" not in call:
            arguments["running"] = True
        kind, beside = "message" if "peer" in call else "collective", call.get("async", False)
        yield _Event(verb, kind, start + offset, end + offset, arguments, beside)
        which: dict[str, Any] = {k: call[k] for k in ("group", "number") if k in call}
        for start, end in call.get("waits", ()):
            yield _Event(f"wait for {verb}", "wait", start + offset, end + offset, which)
    for name, start, end in timeline.spans:
        yield _Event(name, "span", start + offset, end + offset)


def _find_late_ranks(by_rank: dict[int, list[_Event]]) -> None:
    """Note of each collective for which rank the others waited, and how long."""
    together: dict[tuple[str, int], dict[int, _Event]] = {}
    for rank, events in by_rank.items():
        for event in events:
            if event.kind == "collective" and "number" in event.arguments:
                key = event.arguments["group"], event.arguments["number"]
                together.setdefault(key, {})[rank] = event
    for same in together.values():
        last = max(same, key=lambda rank: same[rank].start)
        for event in same.values():
            waited = min(same[last].start, event.end) - event.start
            if waited > _LATE_NANOSECONDS:
                event.arguments |= {"waited_us": waited / 1e3, "waited_for_rank": last}


def _threads(events: Sequence[_Event]) -> Iterator[tuple[str, Iterator[_Event]]]:
    """Yield the threads of a rank: their names, and their events in the order of their starts."""
    for name, beside in (("program", False), ("beside it", True)):
        for own in _apart([e for e in events if e.beside == beside], nested=not beside):
            yield name, _with_waiting(own)


def _apart(events: Iterable[_Event], nested: bool) -> list[list[_Event]]:
    """Return threads whose events do not overlap; where ``nested``, one may lie within another."""
    threads: list[list[_Event]] = []
    open_ends: list[list[int]] = []  # of each thread, the outermost first
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        for thread, ends in zip(threads, open_ends, strict=True):
            while ends and ends[-1] <= event.start:
                ends.pop()
            if not ends or (nested and event.end <= ends[-1]):
                thread.append(event)
                ends.append(event.end)
                break
        else:
            threads.append([event])
            open_ends.append([event.end])
    return threads


def _with_waiting(events: Iterable[_Event]) -> Iterator[_Event]:
    for event in events:
        yield event
        if waited := event.arguments.get("waited_us"):
            name = f"waits for rank {event.arguments['waited_for_rank']}"
            yield _Event(name, "late", event.start, event.start + round(waited * 1e3))


def _summary(events: Iterable[_Event]) -> dict[str, Any]:
    """Return what each verb took, and microseconds of communication and of blocking.

    What is ``overlapped`` is communication during which the program went on.
    """
    own = [event for event in events if event.kind != "span"]
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
    return {
        "verbs": verbs,
        "communication_us": covered(moving) / 1e3,
        "blocked_us": covered(blocked) / 1e3,
        "overlapped_us": (covered(moving + blocked) - covered(blocked)) / 1e3,
    }


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Return how much time is in any of ``intervals``, each (from, to).

    Example:
        >>> covered([(5, 8), (0, 2), (1, 3)])
        6
    """
    total, last = 0, None
    for start, end in sorted(intervals):
        if last is None or end > last:
            total += end - (start if last is None else max(start, last))
            last = end
    return total


def page(trace: dict[str, Any]) -> str:
    """Return the HTML of ``trace``: one file that needs nothing else, and no network."""
    files = resources.files("flashlight_py.trace")
    template, script = (
        files.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "js")
    )
    # Nothing in the data may end the script that it stands in.
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("/*SCRIPT*/", script).replace("/*TRACE*/", data)


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace that ``fl.profile`` or ``trace view`` has written.

    Raises:
        ValueError: it is something else.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    data = trace.get("otherData", {}) if isinstance(trace, dict) else {}
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by fl.profile, or by another version of it")
    return dict(trace)
