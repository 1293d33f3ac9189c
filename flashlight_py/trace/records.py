"""The flight records of a job, read from their folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlight_py.distributed.recorder.flight_record import read_fields

__all__ = ["FlightRecord", "call_text", "read_records"]


@dataclass(frozen=True)
class FlightRecord:
    """What one rank has left; ``calls`` and ``groups`` are as in its file. Times are in ns."""

    rank: int
    size: int
    job: str
    host: str
    pid: int
    time: str
    reason: str
    stands_at: str
    now: int
    wall: float
    groups: dict[str, dict[str, Any]]
    calls: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> FlightRecord:
        """Read one file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no flight record.
        """
        fields = read_fields(path)
        try:
            return cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise ValueError(f"{path} is no flight record: it has no {error}") from error


def read_records(folder: Path) -> list[FlightRecord]:
    """Return the records of the newest job in ``folder``, by rank.

    Raises:
        ValueError: there are none, or a file is none.
    """
    records = [FlightRecord.read(path) for path in sorted(folder.glob("rank*.json"))]
    if not records:
        raise ValueError(f"{folder} holds no flight records (rank0.json and so on)")
    newest = max(records, key=lambda record: record.wall).job
    return sorted((r for r in records if r.job == newest), key=lambda record: record.rank)


def call_text(call: dict[str, Any]) -> str:
    """Write a call as a program would, such as ``all_reduce(float32 (4,), op=sum)``."""
    shape = call.get("shape")
    extents = "" if shape is None else f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    array = f"{call.get('dtype', '')} {extents}".strip()
    names = ("op", "root", "peer", "tag")
    given = {name: call[name] for name in names if name in call}
    if given.get("peer") == -1:  # a receive from any rank
        given["peer"] = "any"
    arguments = [array, *(f"{name}={value}" for name, value in given.items())]
    return f"{call['verb']}({', '.join(filter(None, arguments))})"
