"""A rank writes its record for its own reasons, and after another rank's record."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py import system
from flashlight_py.distributed.failures import flight_record
from flashlight_py.errors import PeerLostError
from tests.distributed.processes import limit_descriptors, process_state


def own_reason(folder: Path) -> str:
    return str(json.loads((folder / "rank0.json").read_text())["reason"])


def test_watchdog_ignores_reports_of_other_jobs(tmp_path: Path) -> None:
    flight = flight_record.Flight(tmp_path, 0, 3, "this job")
    other, foreign = replace(flight, rank=1), replace(flight, rank=1, job="another job")
    records = flight_record.OtherRecords(flight)
    ticks = count(10**18)

    def counts(act: Callable[[], object], after: float = -math.inf) -> bool:
        act()
        os.utime(tmp_path, ns=(0, next(ticks)))  # otherwise two changes may have the same timestamp
        return records.have_written(after)

    assert not counts((tmp_path / "loss.txt").touch)
    assert not counts(lambda: flight_record.write_record(flight, "a test"))
    assert not counts(lambda: flight_record.write_record(foreign, "a test"))
    assert not counts(lambda: flight_record.write_record(other, flight_record.ANSWER))
    assert not counts(lambda: (tmp_path / "rank2.json").write_text("[]"))
    assert not counts(lambda: os.mkfifo(tmp_path / "rank3.json"))  # reading it would block forever
    assert counts(lambda: flight_record.write_record(other, "a test"))
    assert not records.have_written(-math.inf)
    written = flight_record.write_record(other, "a test").stat().st_mtime
    assert not counts(lambda: None, after=written + 10)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the records folder, a function that waits for the watchdog, and the watchdog."""
    looked = threading.Event()
    have_written = flight_record.OtherRecords.have_written

    def report(self: flight_record.OtherRecords, after: float) -> bool:
        looked.set()
        return have_written(self, after)

    def look() -> None:
        for _ in range(3):  # the first look may have begun earlier; the last begins after the write
            looked.clear()
            assert looked.wait(10)

    monkeypatch.setattr(flight_record.OtherRecords, "have_written", report)
    monkeypatch.setattr(flight_record, "_LOOK_SECONDS", 0.01)
    fl.distributed_init(params={"TRACE_DIR": tmp_path})
    try:
        yield tmp_path, look, flight_record.current
    finally:
        fl.distributed_shutdown()


def test_dump_keeps_its_reason_until_a_later_report(world: Any) -> None:
    folder, look, dog = world
    other = replace(dog.flight, rank=1)
    fl.trace.dump("a test")
    look()
    assert own_reason(folder) == "a test"
    written = flight_record.write_record(other, "a signal").stat().st_mtime
    look()
    assert own_reason(folder) == "a test"  # the other record has no new reason
    later = flight_record.write_record(other, "another signal")
    os.utime(later, (written + 60, written + 60))
    (folder / "loss.txt").touch()  # changes the folder, as a new record does
    look()
    assert own_reason(folder) == flight_record.ANSWER


def test_failure_is_written_after_an_earlier_record(world: Any) -> None:
    folder, look, dog = world
    fl.trace.dump("a test")
    with dog._lock:  # as during a write on the interrupted thread
        fl.trace.dump("the handler of a signal")
        flight_record.write_record(replace(dog.flight, rank=1), "a test")
        time.sleep(0.05)  # until the watchdog has read the record; there is no event for it
        dog.explain(PeerLostError("[barrier] rank 0 of 2: lost rank 1"))
    dog.explain(PeerLostError("again"))
    look()
    assert own_reason(folder) == "PeerLostError: [barrier] rank 0 of 2: lost rank 1"


def test_signal_handler_may_raise_during_a_write(world: Any) -> None:
    _, _, dog = world
    with dog._lock:  # as during a write on the interrupted thread
        os.kill(os.getpid(), signal.SIGUSR1)  # the watchdog wants to write this as well
        time.sleep(0.2)  # until the watchdog tries; there is no event for it
        flight_record.stop()
    assert not dog._thread.is_alive()


@pytest.mark.parametrize("allowed", [1, 2, 3])
def test_watchdog_leaves_nothing_if_it_cannot_start(tmp_path: Path, allowed: int) -> None:
    """The watchdog needs two pipes; three descriptors are too few."""
    before = process_state()
    free = (number for number in count() if not os.path.exists(f"/proc/self/fd/{number}"))
    *_, last = islice(free, allowed)
    with limit_descriptors(last + 1), pytest.raises(OSError, match="Too many open files"):
        flight_record.Watchdog(flight_record.Flight(folder=tmp_path))
    assert process_state() == before


def test_watchdog_start_survives_a_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise SystemExit(143)

    monkeypatch.setattr(system, "Thread", Interrupted)
    with pytest.raises(SystemExit):
        flight_record.Watchdog(flight_record.Flight(tmp_path))
    (thread,) = (thread for thread in threading.enumerate() if isinstance(thread, Interrupted))
    thread._target.__self__.stop()  # type: ignore[attr-defined]
    assert not errors
