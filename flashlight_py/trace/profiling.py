"""Profiles and flight records: the calls of all ranks as a Chrome trace, an HTML page or a report.

A trace has Chrome's JSON "Trace Event Format", with complete events (``"ph": "X"``) and times in
microseconds. Each rank is a process of the trace. Its first thread has calls and waits that block
the program. Its other threads have operations during which the program continues.
"""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.distributed import ProcessGroup, get_world_rank, internal
from flashlight_py.errors import DistributedError

# Number of clock measurements per rank. The fastest is used, because its error is the smallest.
_ROUNDS = 16
# Tag of this module's messages. Users' tags are at least 0, and the creation of groups uses -1.
_TAG = -2
_log = logging.getLogger("flashlight_py")


@dataclass
class RankTimeline:
    """Calls and spans of one rank. Times are in nanoseconds of the rank's clock.

    ``offset`` is added to a time to convert it to the common clock of all ranks. ``calls`` are
    results of ``Record.as_dict``. At time ``until``, calls without an end were still running.
    ``spans`` are (name, start, end) of parts that the program marked.
    """

    rank: int
    host: str
    pid: int
    offset: int
    until: int
    calls: list[dict[str, Any]]
    spans: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass(kw_only=True)
class FlightRecord(RankTimeline):
    """The flight record of a rank. ``offset`` converts its times to nanoseconds since 1970."""

    size: int
    job: str
    time: str
    reason: str
    stands_at: str
    groups: dict[str, dict[str, Any]]


def read_records(folder: Path) -> list[FlightRecord]:
    """Return the records of the newest job in ``folder``, sorted by rank, or raise ValueError."""
    records = [_read(path) for path in sorted(folder.glob("rank*.json"))]
    if not records:
        raise ValueError(f"{folder}: expected flight records (rank0.json, ...), got none")
    newest = max(records, key=lambda record: record.until + record.offset).job
    return sorted((r for r in records if r.job == newest), key=lambda record: record.rank)


def _read(path: Path) -> FlightRecord:
    fields = internal.read_fields(path)
    same = ("rank", "host", "pid", "calls", "size", "job", "time", "reason", "stands_at", "groups")
    try:
        now = fields["now"]
        clock = {"until": now, "offset": int(fields["wall"] * 1e9) - now}
        return FlightRecord(**clock, **{name: fields[name] for name in same})
    except KeyError as error:
        raise ValueError(f"{path}: expected a flight record, got a file without {error}") from error


def recorded_call_text(call: dict[str, Any]) -> str:
    """Return a call as code, for example ``all_reduce(float32 (4,), op=sum)``."""
    shape = call.get("shape")
    extents = "" if shape is None else f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    array = f"{call.get('dtype', '')} {extents}".strip()
    arguments = {name: call[name] for name in ("op", "root", "peer", "tag") if name in call}
    if arguments.get("peer") == -1:  # from any rank
        arguments["peer"] = "any"
    words = [array, *(f"{name}={value}" for name, value in arguments.items())]
    return f"{call['verb']}({', '.join(filter(None, words))})"


class Profile:
    """A recording of the communication of all ranks; see :func:`flashlight_py.profile`."""

    def __init__(
        self, path: str | os.PathLike[str] = "trace.json", *, group: ProcessGroup | None = None
    ) -> None:
        self.path, self._group = Path(path), group
        self._records: list[internal.journal.Record] = []
        self._spans: list[tuple[str, int, int]] = []
        self._offset = 0

    @internal.in_step()
    def start(self) -> None:
        """Start recording. Collective, blocking.

        Raises:
            RuntimeError: If a profile is already being recorded.
            ValueError: If this process is not in the group.
            DistributedError: As :func:`flashlight_py.all_reduce`.
        """
        if internal.journal.listener is not None:
            raise RuntimeError("profile: another profile is active. Call its stop() first")
        self._records, self._spans = [], []
        self._offset = offset_to_rank_0(internal.group_or_world(self._group).backend())
        internal.journal.listener = self._records.append
        internal.journal.leave_to_python(1)

    @internal.in_step()
    def stop(self) -> None:
        """Stop recording, and write the file on rank 0 of the group. Collective, blocking.

        If a rank is lost, each other rank writes its own part, for example ``trace.rank1.json``.

        Raises:
            RuntimeError: If no recording was started.
            OSError: If the file cannot be written.
        """
        timeline = self._end()
        try:
            timelines = internal.group_or_world(self._group).gather_object(timeline)
        except DistributedError as error:
            self._write_alone(timeline, str(error))
            return
        if timelines is not None:
            self._write(self.path, timelines)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the duration of the ``with`` block as ``name`` on this rank. Not collective."""
        started = time.monotonic_ns()
        try:
            yield
        finally:
            self._spans.append((name, started, time.monotonic_ns()))

    def _end(self) -> RankTimeline:
        if internal.journal.listener != self._records.append:
            raise RuntimeError("profile: expected an active profile, got none. Call start() first")
        internal.journal.listener = None
        internal.journal.leave_to_python(-1)
        calls = [record.as_dict() for record in self._records]
        rank, host, now = get_world_rank(), socket.gethostname(), time.monotonic_ns()
        return RankTimeline(rank, host, os.getpid(), self._offset, now, calls, self._spans)

    def _write(self, path: Path, timelines: list[RankTimeline]) -> None:
        path.write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
        _log.info("the profile of %d rank(s) is in %s", len(timelines), path)

    def _write_alone(self, timeline: RankTimeline, reason: str) -> None:
        path = self.path.with_suffix(f".rank{timeline.rank}{self.path.suffix}")
        self._write(path, [timeline])
        _log.warning("the profile of rank %d only is in %s (%s)", timeline.rank, path, reason)

    def __enter__(self) -> "Profile":
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.stop()
        else:  # call no collective: other ranks may be in any call
            self._write_alone(self._end(), f"{type(error).__name__}: {error}")


def profile(
    path: str | os.PathLike[str] = "trace.json", *, group: ProcessGroup | None = None
) -> Profile:
    """Record the collectives and messages in a ``with`` block on all ranks of ``group``.

    Start and end of the block are collective and blocking, as are ``start()`` and ``stop()``. Rank
    0 of the group writes the Chrome trace ``path`` and replaces an existing file. Perfetto and
    Chrome can display it. ``python -m flashlight_py.trace view trace.json`` converts it to a page.
    The default group is the world.

    The trace has all calls of these ranks, in all groups. Ranks have their world numbers, and times
    are on rank 0's clock. A call has its verb, bytes, dtype, shape, line of user code
    and the time it waited for other ranks. ``span(name)`` marks a part of the program. During the
    recording, a call takes about 10 us instead of 1 us. The host measures GPU work, with an error
    below 0.5 ms.

    Example:
        >>> with fl.profile(folder / "trace.json") as taken:
        ...     with taken.span("a step"):
        ...         _ = fl.all_reduce(np.zeros(3))
        >>> (folder / "trace.json").exists()
        True
    """
    return Profile(path, group=group)


def offset_to_rank_0(backend: internal.Backend) -> int:
    """Return rank 0's clock minus this rank's monotonic clock, in nanoseconds. Collective.

    The result is 0 on rank 0's host. A rank of another host asks rank 0 for its time. It assumes
    that rank 0 answers halfway through the exchange (F. Cristian, 1989). The error is at most half
    the duration of the exchange.
    """
    identities = internal.exchange_bytes(backend, internal.rendezvous.host_identity().encode())
    remote_ranks = [rank for rank in range(backend.size) if identities[rank] != identities[0]]
    if backend.rank in remote_ranks:
        return _measure_offset(backend)
    if backend.rank == 0:
        for rank in remote_ranks:
            _send_times(backend, rank)
    return 0


def _measure_offset(backend: internal.Backend) -> int:
    message, measured = np.zeros(1, np.int64), []
    for _ in range(_ROUNDS):
        sent = time.monotonic_ns()
        backend.start(internal.Call(internal.SEND, message, peer=0, tag=_TAG)).wait()
        backend.start(internal.Call(internal.RECV, message, peer=0, tag=_TAG)).wait()
        received = time.monotonic_ns()
        measured.append((received - sent, int(message[0]) - (sent + received) // 2))
    return min(measured)[1]


def _send_times(backend: internal.Backend, rank: int) -> None:
    message = np.zeros(1, np.int64)
    for _ in range(_ROUNDS):
        backend.start(internal.Call(internal.RECV, message, peer=rank, tag=_TAG)).wait()
        message[0] = time.monotonic_ns()
        backend.start(internal.Call(internal.SEND, message, peer=rank, tag=_TAG)).wait()


FORMAT = "flashlight_py trace 1"
# Shorter waits for a late rank are not reported.
_LATE_NANOSECONDS = 1000
# Fields of a call that are left out of an event's ``args``, because its name and times show them.
_SHOWN = ("started", "ended", "waits", "verb", "seconds", "seconds_ago", "state")


@dataclass
class _Event:
    """An event of a timeline, with times in nanoseconds of the common clock."""

    name: str
    kind: str  # collective, message, wait, span, or late (wait for a late rank)
    start: int
    end: int
    arguments: dict[str, Any] = field(default_factory=dict)
    overlapped: bool = False  # the program continues during the event


def chrome_trace(timelines: Sequence[RankTimeline]) -> dict[str, Any]:
    """Return the trace of all ranks, with the earliest event at time 0."""
    by_rank = {timeline.rank: list(_events(timeline)) for timeline in timelines}
    zero = min((event.start for events in by_rank.values() for event in events), default=0)
    _find_late_ranks(by_rank)
    listed = []
    for timeline in timelines:
        rank, name = timeline.rank, f"rank {timeline.rank} ({timeline.host}, pid {timeline.pid})"
        listed.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}})
        for thread, (name, events) in enumerate(_threads(by_rank[rank])):
            thread_id = {"pid": rank, "tid": thread}
            listed.append({"name": "thread_name", "ph": "M", **thread_id, "args": {"name": name}})
            for event in events:
                times = {"ts": (event.start - zero) / 1e3, "dur": (event.end - event.start) / 1e3}
                kind = {"name": event.name, "cat": event.kind, "ph": "X"}
                listed.append({**kind, **thread_id, **times, "args": event.arguments})
    summary = [{"rank": rank, **_summary(events)} for rank, events in by_rank.items()]
    data = {"format": FORMAT, "summary": summary}
    return {"traceEvents": listed, "displayTimeUnit": "ms", "otherData": data}


def _events(timeline: RankTimeline) -> Iterator[_Event]:
    offset = timeline.offset
    for call in timeline.calls:
        verb, start, end = call["verb"], call["started"], call.get("ended", timeline.until)
        arguments: dict[str, Any] = {"call": recorded_call_text(call)}
        arguments |= {name: value for name, value in call.items() if name not in _SHOWN}
        if "ended" not in call:
            arguments["running"] = True
        kind, overlapped = "message" if "peer" in call else "collective", call.get("async", False)
        yield _Event(verb, kind, start + offset, end + offset, arguments, overlapped)
        call_id: dict[str, Any] = {k: call[k] for k in ("group", "number") if k in call}
        for start, end in call.get("waits", ()):
            yield _Event(f"wait for {verb}", "wait", start + offset, end + offset, call_id)
    for name, start, end in timeline.spans:
        yield _Event(name, "span", start + offset, end + offset)


def _find_late_ranks(by_rank: dict[int, list[_Event]]) -> None:
    """Add to each collective the rank that started it last, and the wait for that rank."""
    calls: dict[tuple[str, int], dict[int, _Event]] = {}
    for rank, events in by_rank.items():
        for event in events:
            if event.kind == "collective" and "number" in event.arguments:
                key = event.arguments["group"], event.arguments["number"]
                calls.setdefault(key, {})[rank] = event
    for by_rank_of_call in calls.values():
        last = max(by_rank_of_call, key=lambda rank: by_rank_of_call[rank].start)
        for event in by_rank_of_call.values():
            waited = min(by_rank_of_call[last].start, event.end) - event.start
            if waited > _LATE_NANOSECONDS:
                event.arguments |= {"waited_us": waited / 1e3, "waited_for_rank": last}


def _threads(events: Sequence[_Event]) -> Iterator[tuple[str, Iterator[_Event]]]:
    """Yield the name of each thread of a rank, and the thread's events, sorted by start."""
    for name, overlapped in (("program", False), ("overlapped", True)):
        for thread in _separate([e for e in events if e.overlapped == overlapped], not overlapped):
            yield name, _with_waiting(thread)


def _separate(events: Iterable[_Event], nested: bool) -> list[list[_Event]]:
    """Divide events into threads without overlaps. If ``nested``, an event may contain others."""
    threads: list[list[_Event]] = []
    open_ends: list[list[int]] = []  # by thread: ends of the open events, the outermost first
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
    """Return calls, bytes and microseconds per verb, and total microseconds over all verbs.

    The program waited for ``blocked_us``. It continued during communication for ``overlapped_us``.
    """
    communication = [event for event in events if event.kind != "span"]
    calls = [event for event in communication if event.kind != "wait"]
    verbs: dict[str, dict[str, float]] = {}
    for event in calls:
        verb = verbs.setdefault(event.name, {"calls": 0, "bytes": 0, "us": 0.0, "waited_us": 0.0})
        verb["calls"] += 1
        verb["bytes"] += event.arguments["bytes"]
        verb["us"] += (event.end - event.start) / 1e3
        verb["waited_us"] += event.arguments.get("waited_us", 0.0)
    moving = [(event.start, event.end) for event in calls]
    blocked = [(event.start, event.end) for event in communication if not event.overlapped]
    return {
        "verbs": verbs,
        "communication_us": covered(moving) / 1e3,
        "blocked_us": covered(blocked) / 1e3,
        "overlapped_us": (covered(moving + blocked) - covered(blocked)) / 1e3,
    }


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the total length of the union of ``intervals``, each (start, end).

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
    """Return the HTML page of ``trace``: one file that needs no other file and no network."""
    files = resources.files("flashlight_py.trace")
    template, script = ((files / f"page.{kind}").read_text("utf-8") for kind in ("html", "js"))
    # Escape "<" so that no data can end the script element.
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("/*SCRIPT*/", script).replace("/*TRACE*/", data)


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace that ``fl.profile`` or ``trace view -o`` wrote, or raise ValueError."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    data = trace.get("otherData", {}) if isinstance(trace, dict) else {}
    if data.get("format") != FORMAT:
        raise ValueError(f"{path}: expected {FORMAT!r} of fl.profile, got {data.get('format')!r}")
    return dict(trace)


# Verbs whose arrays may differ between ranks: in the first dimension only, and in all dimensions.
_ROWS_DIFFER = ("all_gather", "gather", "all_to_all")
_SHAPES_DIFFER = ("scatter",)


def compare(records: Sequence[FlightRecord]) -> tuple[list[str], bool]:
    """Return a report on the ranks' records as lines, and whether all calls agree."""
    first = records[0]
    lines = [f"job {first.job}: records of {len(records)} of {first.size} ranks"]
    lines += [f"  rank {r.rank} ({r.host}, pid {r.pid}) at {r.time}: {r.reason}" for r in records]
    missing = sorted(set(range(first.size)) - {record.rank for record in records})
    differences = []
    if missing:
        ranks = _ranks(missing)
        differences = [f"{ranks}: no record (killed, stopped, or on a host without the folder)"]
    for name in dict.fromkeys(name for record in records for name in record.groups):
        differences += _Group(name, records).differences()
    differences += [
        f"rank {record.rank}: {_call_and_line(call)}, {_state(call)}"
        for record in records
        for call in record.calls
        if "peer" in call and call["state"] != "ended"
    ]
    return lines + (differences or ["all ranks have made the same calls"]), not differences


class _Group:
    """Calls of one group, by rank in the world and then by number of the call."""

    def __init__(self, name: str, records: Sequence[FlightRecord]) -> None:
        self.name = name
        self._records = {r.rank: r for r in records if name in r.groups}
        self._calls = {
            rank: {c["number"]: c for c in r.calls if c["group"] == name and "number" in c}
            for rank, r in self._records.items()
        }
        self._last = {rank: r.groups[name]["calls"] for rank, r in self._records.items()}

    def differences(self) -> list[str]:
        """Return lines that describe where the calls of the ranks differ, or [] if they agree."""
        if different := self._first_different(_signature, "the ranks made different calls"):
            return different
        behind = self._behind()
        line = "the ranks make this call on different lines of code"
        return behind and self._first_different(lambda call: call.get("line"), line) + behind

    def _first_different(self, key: Callable[[dict[str, Any]], Any], text: str) -> list[str]:
        """Return ``text`` and lines on the first call whose ``key(call)`` differs between ranks."""
        for number in sorted({number for calls in self._calls.values() for number in calls}):
            by_rank = {rank: calls.get(number) for rank, calls in self._calls.items()}
            if len({key(call) for call in by_rank.values() if call} - {None}) > 1:
                by_text: dict[str, list[int]] = {}
                for rank, call in by_rank.items():
                    words = _call_and_line(call) if call else "call no longer recorded"
                    by_text.setdefault(words, []).append(rank)
                ranks = [f"  {_ranks(ranks)}: {words}" for words, ranks in by_text.items()]
                return [f"group {self.name}, call {number}: {text}", *ranks]
        return []

    def _behind(self) -> list[str]:
        """Return the last call of each rank as lines, or [] if all have made equally many calls."""
        most = max(self._last.values())
        late = [rank for rank, last in self._last.items() if last < most]
        ahead = [rank for rank in self._last if rank not in late]
        lines = [f"group {self.name}: fewer calls by {_ranks(late)} than by {_ranks(ahead)}"]
        for rank in ahead + late:
            record, number = self._records[rank], self._last[rank]
            call = self._calls[rank].get(number)
            line = f"  rank {rank} has made {number} calls"
            if call is not None:
                line = f"  rank {rank}, call {number}: {_call_and_line(call)}, {_state(call)}"
            position = f"; the program is at {record.stands_at}" if record.stands_at else ""
            lines.append(line + position)
        return lines if late else []


def _signature(call: dict[str, Any]) -> tuple[Any, ...]:
    verb, shape = call["verb"], call.get("shape")
    if verb in _SHAPES_DIFFER or verb.endswith("_object"):
        return verb, call.get("root")
    rows = 1 if verb in _ROWS_DIFFER and shape else 0
    same = None if shape is None else tuple(shape[rows:])
    # Native all_reduce records at most three dimensions. Arrays with more are compared by bytes.
    size = call["bytes"] if verb == "all_reduce" else None
    dimensions = same if same is not None and len(same) <= 3 else None
    return verb, call.get("dtype"), call.get("op"), call.get("root"), dimensions, size


def _call_and_line(call: dict[str, Any]) -> str:
    at = f" at {call['line']}" if "line" in call else ""
    via = f" through {call['via']}" if "via" in call else ""
    return f"{recorded_call_text(call)}{at}{via}"


def _state(call: dict[str, Any]) -> str:
    if call["state"] == "running":
        return f"running for {call['seconds']:.3g} s"
    return f"{call['state']} {call['seconds_ago'] - call['seconds']:.3g} s before the record"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
