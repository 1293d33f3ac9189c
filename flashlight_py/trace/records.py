"""The records of single ranks, of a profile or of a flight, and where the ranks parted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlight_py.distributed.internal import read_fields


@dataclass
class RankTimeline:
    """The calls and spans of one rank. Times are in nanoseconds of its own clock.

    ``offset`` added to them makes them those of a clock that all ranks have. ``calls`` are as
    ``Record.as_dict`` returns them; calls that have not ended have lasted ``until`` then. ``spans``
    are the program's own: (name, from, to).
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
    """The record that one rank has left in its file; ``calls`` and ``groups`` are as there.

    The clock that all ranks have is that of their hosts, in nanoseconds since 1970.
    """

    size: int
    job: str
    time: str
    reason: str
    stands_at: str
    groups: dict[str, dict[str, Any]]


def read_records(folder: Path) -> list[FlightRecord]:
    """Return the records of the newest job in ``folder``, by rank; none is a ValueError."""
    records = [_read(path) for path in sorted(folder.glob("rank*.json"))]
    if not records:
        raise ValueError(f"{folder} holds no flight records (rank0.json and so on)")
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
        raise ValueError(f"{path} is no flight record: it has no {error}") from error


def call_text(call: dict[str, Any]) -> str:
    """Write a call as a program would, such as ``all_reduce(float32 (4,), op=sum)``."""
    shape = call.get("shape")
    extents = "" if shape is None else f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    array = f"{call.get('dtype', '')} {extents}".strip()
    names = ("op", "root", "peer", "tag")
    arguments = {name: call[name] for name in names if name in call}
    if arguments.get("peer") == -1:  # a receive from any rank
        arguments["peer"] = "any"
    words = [array, *(f"{name}={value}" for name, value in arguments.items())]
    return f"{call['verb']}({', '.join(filter(None, words))})"


# Verbs to which ranks may pass arrays of different first dimensions, or of no shape at all.
_ROWS_DIFFER = ("all_gather", "gather", "all_to_all")
_SHAPES_DIFFER = ("scatter",)


def compare(records: Sequence[FlightRecord]) -> tuple[list[str], bool]:
    """Return a report on the ranks' records, in lines, and whether all ranks agree."""
    first = records[0]
    lines = [f"job {first.job}: {len(records)} of {first.size} ranks have left a record"]
    lines += [f"  rank {r.rank} ({r.host}, pid {r.pid}) at {r.time}: {r.reason}" for r in records]
    missing = sorted(set(range(first.size)) - {record.rank for record in records})
    differences = []
    if missing:
        ranks = _ranks(missing)
        differences = [f"{ranks} left none: killed, stopped, or on a host without the folder"]
    for name in dict.fromkeys(name for record in records for name in record.groups):
        differences += _Group(name, records).parting()
    differences += [
        f"rank {record.rank}: {_called(call)}, {_state(call)}"
        for record in records
        for call in record.calls
        if "peer" in call and call["state"] != "ended"
    ]
    return lines + (differences or ["all ranks have called the same"]), not differences


class _Group:
    """One group's calls, by rank in the world and by number."""

    def __init__(self, name: str, records: Sequence[FlightRecord]) -> None:
        self.name = name
        self._records = {r.rank: r for r in records if name in r.groups}
        self._calls = {
            rank: {c["number"]: c for c in r.calls if c["group"] == name and "number" in c}
            for rank, r in self._records.items()
        }
        self._last = {rank: r.groups[name]["calls"] for rank, r in self._records.items()}

    def parting(self) -> list[str]:
        """Return where the ranks parted, in lines; none where they did not."""
        if different := self._first_different(_signature, "the ranks made different calls"):
            return different
        behind = self._behind()
        line = "the same call is made on different lines"
        return behind and self._first_different(lambda call: call.get("line"), line) + behind

    def _first_different(self, key: Callable[[dict[str, Any]], Any], what: str) -> list[str]:
        """Describe the first call of which ``key`` differs, where several ranks know it."""
        for number in sorted({number for calls in self._calls.values() for number in calls}):
            known = {rank: calls.get(number) for rank, calls in self._calls.items()}
            if len({key(call) for call in known.values() if call} - {None}) > 1:
                by_text: dict[str, list[int]] = {}
                for rank, call in known.items():
                    text = _called(call) if call else "nothing that is still recorded"
                    by_text.setdefault(text, []).append(rank)
                ranks = [f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
                return [f"group {self.name}, call {number}: {what}", *ranks]
        return []

    def _behind(self) -> list[str]:
        """Report who has called less often than others, what those wait in, and where it stands."""
        most = max(self._last.values())
        late = [rank for rank, last in self._last.items() if last < most]
        ahead = [rank for rank in self._last if rank not in late]
        lines = [f"group {self.name}: {_ranks(late)} behind {_ranks(ahead)}"]
        for rank in ahead + late:
            record, number = self._records[rank], self._last[rank]
            call = self._calls[rank].get(number)
            where = f"  rank {rank} has called {number} times"
            if call is not None:
                where = f"  rank {rank}, call {number}: {_called(call)}, {_state(call)}"
            stands = f"; it stands at {record.stands_at}" if record.stands_at else ""
            lines.append(where + stands)
        return lines if late else []


def _signature(call: dict[str, Any]) -> tuple[Any, ...]:
    verb, shape = call["verb"], call.get("shape")
    if verb in _SHAPES_DIFFER or verb.endswith("_object"):
        return verb, call.get("root")
    rows = 1 if verb in _ROWS_DIFFER and shape else 0
    same = None if shape is None else tuple(shape[rows:])
    # The native all_reduce records three dimensions; what has more is recognised by its bytes.
    size = call["bytes"] if verb == "all_reduce" else None
    dimensions = same if same is not None and len(same) <= 3 else None
    return verb, call.get("dtype"), call.get("op"), call.get("root"), dimensions, size


def _called(call: dict[str, Any]) -> str:
    at = f" at {call['line']}" if "line" in call else ""
    via = f" through {call['via']}" if "via" in call else ""
    return f"{call_text(call)}{at}{via}"


def _state(call: dict[str, Any]) -> str:
    if call["state"] == "running":
        return f"running for {call['seconds']:.3g} s"
    ended = call["seconds_ago"] - call["seconds"]
    return f"{call['state']} {ended:.3g} s before the record"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
