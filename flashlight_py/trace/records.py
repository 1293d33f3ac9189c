"""What one rank did, of a profile or read from its flight record."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlight_py.distributed.failures.flight_record import read_fields


@dataclass
class RankTimeline:
    """What one rank did. Times are in nanoseconds of its own clock.

    ``offset`` added to them makes them those of a clock that all ranks have. ``calls`` are as
    ``Record.as_dict`` returns them; what has not ended has lasted ``until`` then. ``spans`` are the
    program's own: (name, from, to).
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
    """What one rank has left in its file; ``calls`` and ``groups`` are as there.

    The clock that all ranks have is that of their hosts, in nanoseconds since 1970.
    """

    size: int
    job: str
    time: str
    reason: str
    stands_at: str
    groups: dict[str, dict[str, Any]]


def read_records(folder: Path) -> list[FlightRecord]:
    """Return the records of the newest job in ``folder``, by rank.

    Raises:
        OSError: one cannot be read.
        ValueError: there are none, or a file is none.
    """
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
