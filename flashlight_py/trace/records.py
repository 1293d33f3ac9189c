"""Timelines of single ranks, from profiles or flight records, and a report on differing calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlight_py.distributed.internal import read_fields


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
    fields = read_fields(path)
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
    # Records of native all_reduce calls have at most three dimensions. Arrays with more dimensions
    # are compared by bytes.
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
