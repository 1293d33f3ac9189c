"""Requirements of Perfetto and Chrome on a trace."""

import json
from typing import Any


def assert_valid(trace: dict[str, Any]) -> None:
    """Check the event format, and that events of a thread are nested or disjoint."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            named.add((event["pid"], event.get("tid")))
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["args"], dict)
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread, events in threads.items():
        assert thread in named
        assert (thread[0], None) in named
        _assert_nested(events)


def _assert_nested(events: list[dict[str, Any]]) -> None:
    open_ends: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= event["ts"] + 1e-6:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-6, event
        open_ends.append(end)
