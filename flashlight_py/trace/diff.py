"""Where ranks parted: their flight records side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flashlight_py.trace.records import FlightRecord, call_text

__all__ = ["compare"]

# Verbs to which ranks may give arrays of different first dimensions, or of no shape at all.
_ROWS_DIFFER = ("all_gather", "gather", "all_to_all")
_SHAPES_DIFFER = ("scatter",)


def compare(records: Sequence[FlightRecord]) -> tuple[list[str], bool]:
    """Return what to tell about the ranks' records, in lines, and whether all ranks agree."""
    first = records[0]
    lines = [f"job {first.job}: {len(records)} of {first.size} ranks have left a record"]
    lines += [f"  rank {r.rank} ({r.host}, pid {r.pid}) at {r.time}: {r.reason}" for r in records]
    missing = sorted(set(range(first.size)) - {record.rank for record in records})
    if missing:
        lines.append(
            f"{_ranks(missing)} left none: killed, stopped, or on a host without the folder"
        )
    names = list(dict.fromkeys(name for record in records for name in record.groups))
    parted = [_Group(name, records).parting() for name in names]
    waiting = [line for record in records for line in _messages(record)]
    for part in parted:
        lines += part
    lines += waiting
    agree = not missing and not waiting and not any(parted)
    return [*lines, *(["all ranks have called the same"] if agree else [])], agree


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
        """Say where the ranks parted; nothing where they did not."""
        number = self._first_different(_signature)
        if number is not None:
            return self._told(number, "the ranks called different things")
        behind = self._behind()
        number = self._first_different(_line)
        if number is not None and behind:
            return self._told(number, "the same call comes from different lines") + behind
        return behind

    def _first_different(self, key: Any) -> int | None:
        """Return the first number at which ``key`` of the calls differs, where several know it."""
        numbers = sorted({number for calls in self._calls.values() for number in calls})
        for number in numbers:
            found = {key(calls[number]) for calls in self._calls.values() if number in calls}
            if len(found - {None}) > 1:
                return int(number)
        return None

    def _told(self, number: int, what: str) -> list[str]:
        by_text: dict[str, list[int]] = {}
        for rank, calls in self._calls.items():
            text = _called(calls[number]) if number in calls else "nothing that is still recorded"
            by_text.setdefault(text, []).append(rank)
        said = [f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
        return [f"group {self.name}, call {number}: {what}", *said]

    def _behind(self) -> list[str]:
        """Say who has called less often than others, what those wait in, and where it stands."""
        most = max(self._last.values())
        late = [rank for rank, last in self._last.items() if last < most]
        if not late:
            return []
        ahead = [rank for rank in self._last if rank not in late]
        lines = [f"group {self.name}: {_ranks(late)} behind {_ranks(ahead)}"]
        lines += [f"  {self._position(rank, most)}" for rank in ahead]
        return lines + [f"  {self._position(rank, self._last[rank])}" for rank in late]

    def _position(self, rank: int, number: int) -> str:
        record, call = self._records[rank], self._calls[rank].get(number)
        stands = f"; it stands at {record.stands_at}" if record.stands_at else ""
        if call is None:
            return f"rank {rank} has called {number} times{stands}"
        return f"rank {rank}, call {number}: {_called(call)}, {_state(call)}{stands}"


def _signature(call: dict[str, Any]) -> tuple[Any, ...]:
    verb, shape = call["verb"], call.get("shape")
    if verb in _SHAPES_DIFFER or verb.endswith("_object"):
        return verb, call.get("root")
    rows = 1 if verb in _ROWS_DIFFER and shape else 0
    told = None if shape is None else tuple(shape[rows:])
    # The native all_reduce notes three dimensions; what has more is told by its bytes.
    size = call["bytes"] if verb == "all_reduce" else None
    dimensions = told if told is not None and len(told) <= 3 else None
    return verb, call.get("dtype"), call.get("op"), call.get("root"), dimensions, size


def _line(call: dict[str, Any]) -> str | None:
    line: str | None = call.get("line")
    return line


def _called(call: dict[str, Any]) -> str:
    at = f" at {call['line']}" if "line" in call else ""
    via = f" through {call['via']}" if "via" in call else ""
    return f"{call_text(call)}{at}{via}"


def _state(call: dict[str, Any]) -> str:
    if call["state"] == "running":
        return f"running for {call['seconds']:.3g} s"
    ended = call["seconds_ago"] - call["seconds"]
    return f"{call['state']} {ended:.3g} s before the record"


def _messages(record: FlightRecord) -> Iterable[str]:
    """Say which messages of a rank have not ended."""
    for call in record.calls:
        if "peer" in call and call["state"] != "ended":
            yield f"rank {record.rank}: {_called(call)}, {_state(call)}"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
