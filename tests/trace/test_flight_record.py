"""Flight records: reasons for which ranks write them, and reports of their comparison."""

import json
import math
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import system
from flashlight_py.distributed.failures import flight_record
from flashlight_py.distributed.failures.flight_record import KEPT_JOBS, Flight, write_record
from flashlight_py.distributed.start.world import current_world
from flashlight_py.errors import MismatchError, PeerLostError
from flashlight_py.trace.__main__ import main
from flashlight_py.trace.profiling import FlightRecord, compare, read_records
from tests.distributed.harness import run_ranks
from tests.distributed.processes import await_file, limit_descriptors, process_state
from tests.trace.validity import assert_valid


def await_record(path: Path) -> dict[str, Any]:
    await_file(path)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def hang_then_part(rank: int, size: int, folder: str) -> str:
    """Rank 0 hangs in a native wait and gets the signal; later the ranks make different calls."""
    pids = fl.all_gather_object(os.getpid())
    record = Path(folder) / "rank0.json"
    if rank == 1:
        state = ""
        while state != "running":  # otherwise the signal came before the wait
            record.unlink(missing_ok=True)
            os.kill(pids[0], signal.SIGUSR1)
            state = await_record(record)["calls"][-1]["state"]
        record_of_rank = await_record(Path(folder) / "rank1.json")
        assert record_of_rank["reason"] == "another rank has written its own"
        assert record_of_rank["stands_at"].startswith("distributed/processes.py:")
        assert "in hang_then_part" in "\n".join(record_of_rank["threads"])
    fl.all_reduce(np.zeros(3))
    if rank == 0:
        result = json.loads(record.read_text())
        assert result["reason"] == "SIGUSR1"
        assert result["calls"][-1]["state"] == "running"
        assert result["calls"][-1]["verb"] == "all_reduce"
        assert "in hang_then_part" in "\n".join(result["threads"])
    return current_world().job


# MPICH installs its own handler of the signal.
@pytest.mark.parametrize("init", ["file", pytest.param("mpi", marks=pytest.mark.slow)])
def test_signal_makes_all_ranks_dump_during_a_native_wait(tmp_path: Path, init: str) -> None:
    folder = tmp_path / "records"
    jobs = run_ranks(hang_then_part, 2, str(folder), init=init, params={"TRACE_DIR": folder})
    assert len(set(jobs)) == 1
    for rank in range(2):
        file = folder / f"rank{rank}.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert json.loads(file.read_text())["job"] == jobs[0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {"rank0.json", "rank1.json"}


def part(rank: int, size: int) -> str:
    x = np.zeros(4, np.float32)
    fl.all_reduce(x)
    verb = (lambda: fl.all_reduce(x, op="max")) if rank == 0 else (lambda: fl.broadcast(x))
    with pytest.raises(MismatchError) as caught:
        verb()
    for _ in range(20):  # calls after a failure are not written again
        with pytest.raises(MismatchError, match=r"Make the same call on every rank$"):
            fl.all_reduce(np.zeros(3 + rank))
    return str(caught.value)


def test_mismatch_writes_flight_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "records"
    messages = run_ranks(part, 2, params={"TRACE_DIR": str(folder), "BACKEND": "shm"})
    for rank, message in enumerate(messages):
        assert f"{folder}/rank{rank}.json" in message
        assert f"python -m flashlight_py.trace diff {folder}" in message
    assert main(["diff", str(folder)]) == 1
    reported = capsys.readouterr().out
    assert "group world, call 2: the ranks made different calls" in reported
    assert "rank 0: all_reduce(float32 (4,), op=max) at trace/test_flight_record.py:" in reported
    assert "rank 1: broadcast(float32 (4,), root=0) at trace/test_flight_record.py:" in reported
    assert main(["view", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert "broadcast" in (tmp_path / "page.html").read_text()
    assert main(["view", str(folder), "-o", str(tmp_path / "perfetto.json")]) == 0
    assert_valid(json.loads((tmp_path / "perfetto.json").read_text()))


OWN_HANDLER = """
import os, signal, sys
import flashlight_py as fl
seen = []
own = lambda *_: seen.append(1)
if sys.argv[2] == "before":
    signal.signal(signal.SIGUSR1, own)
fl.distributed_init(params={"TRACE_DIR": sys.argv[1]})
if sys.argv[2] == "after":
    signal.signal(signal.SIGUSR1, own)
os.kill(os.getpid(), signal.SIGUSR1)
fl.distributed_shutdown()
os.kill(os.getpid(), signal.SIGUSR1)
assert seen == [1, 1] and not os.path.exists(sys.argv[1])
"""


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_dump_signal_keeps_the_handler_of_the_user(when: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", OWN_HANDLER, str(tmp_path / "records"), when]
    subprocess.run(command, check=True, timeout=60)


CYCLES = """
import os, signal, threading
import flashlight_py as fl
def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()
before = held()
for _ in range(50):
    fl.distributed_init()
    if os.fork() == 0:  # a child has no watchdog, and lets go of the parent's pipe
        os._exit(0 if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and held()[1] == 1 else 1)
    assert os.wait()[1] == 0
    fl.distributed_shutdown()
assert held() == before
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.slow
def test_shutdown_removes_signal_handler_and_threads(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    env = {**os.environ, "FLASHLIGHT_TRACE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", CYCLES], timeout=60, env=env, check=False)
    assert done.returncode == -signal.SIGUSR1  # the signal has its default action again
    assert not folder.exists()


def test_record_raises_permission_error_for_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "records").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a folder of this user"):
        write_record(Flight(folder=tmp_path / "records"), "a test")
    assert not list((tmp_path / "elsewhere").iterdir())
    write_record(Flight(folder=tmp_path / "records", chosen=True), "a test")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["rank0.json"]


def test_default_folder_keeps_the_newest_jobs(tmp_path: Path) -> None:
    """Uses the default folder; folders of other users are not touched."""
    for age in range(KEPT_JOBS + 5):
        old = tmp_path / f"flashlight-trace-{age:02}"
        write_record(Flight(folder=old, chosen=True), "a test")
        os.utime(old, (1e9 - age, 1e9 - age))
    (tmp_path / "flashlight-trace-link").symlink_to(tmp_path)
    (tmp_path / "flashlight-trace-file").touch()
    write_record(Flight(folder=tmp_path / "flashlight-trace-new"), "a test")
    kept = {f"flashlight-trace-{age:02}" for age in range(KEPT_JOBS - 1)}
    kept |= {f"flashlight-trace-{name}" for name in ("link", "file", "new")}
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("command", ["trace diff", pytest.param("doctor", marks=pytest.mark.slow)])
def test_command_exits_quietly_if_its_pipe_is_closed(command: str, tmp_path: Path) -> None:
    if command == "trace diff":
        write_record(Flight(folder=tmp_path, chosen=True), "a test")
        command = f"{command} {tmp_path}"
    reader, writer = os.pipe()
    os.close(reader)  # as head does, but earlier
    done = subprocess.run(
        [sys.executable, "-m", *f"flashlight_py.{command}".split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE
    assert done.stderr == b""


IN_ANY_LANGUAGE = """
import os, sys
import flashlight_py as fl
from flashlight_py.trace.__main__ import main
from flashlight_py.trace.profiling import read_records
fl.distributed_init(params={"TRACE_DIR": sys.argv[1]})
fl.trace.dump("Caf\u00e9 " + sys.argv[2])  # im Café
assert main(["diff", sys.argv[1]]) == 0
"""


@pytest.mark.slow
def test_record_stores_any_text_in_any_locale(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_ANY_LANGUAGE, encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, str(program), str(tmp_path / "records"), b"caf\xe9"]
    reported = subprocess.run(
        command, env={**os.environ, **plain}, capture_output=True, check=True, timeout=60
    )
    assert b"Caf\\xe9 caf\\udce9" in reported.stdout
    (result,) = read_records(tmp_path / "records")
    assert result.reason == "Caf\u00e9 caf\udce9"
    assert "# im Café" in (tmp_path / "records" / "rank0.json").read_text(encoding="utf-8")


def call(number: int, verb: str = "all_reduce", **fields: Any) -> dict[str, Any]:
    about = {"state": "ended", "seconds": 0.1, "seconds_ago": 5.0, "group": "world", "bytes": 12}
    array = {"dtype": "float32", "shape": [3], "op": "sum", "line": "a/train.py:7"}
    return {**about, **array, "number": number, "verb": verb, **fields}


def record(rank: int, calls: list[dict[str, Any]], size: int = 2) -> FlightRecord:
    last = max((c["number"] for c in calls if "number" in c), default=0)
    groups = {"world": {"ranks": list(range(size)), "path": "shared memory", "calls": last}}
    named = {"host": f"node{rank}", "pid": 100 + rank, "stands_at": f"a/train.py:{rank} in step"}
    about = {"job": "job", "time": "now", "reason": "SIGUSR1", "groups": groups, **named}
    return FlightRecord(rank, offset=0, until=0, calls=calls, size=size, **about)


def reported(*records: FlightRecord) -> str:
    lines, agree = compare(records)
    assert not agree
    return "\n".join(lines)


def test_diff_reports_agreement_for_equal_calls() -> None:
    same = [call(5), call(6, "broadcast", root=1)]
    lines, agree = compare([record(0, same), record(1, same)])
    assert agree
    assert lines[-1] == "all ranks have made the same calls"


def test_diff_reports_the_first_different_call_with_its_lines() -> None:
    other = call(6, op="max", line="a/train.py:9")
    text = reported(record(0, [call(5), call(6), call(7)]), record(1, [call(5), other, call(7)]))
    assert "group world, call 6: the ranks made different calls" in text
    assert "rank 0: all_reduce(float32 (3,), op=sum) at a/train.py:7" in text
    assert "rank 1: all_reduce(float32 (3,), op=max) at a/train.py:9" in text
    assert "call 7" not in text


def test_diff_reports_a_rank_with_fewer_calls_and_its_position() -> None:
    waits = call(6, "broadcast", state="running", seconds=30.0)
    text = reported(record(0, [call(5), waits]), record(1, [call(5)]))
    assert "group world: fewer calls by rank 1 than by rank 0" in text
    assert (
        "rank 0, call 6: broadcast(float32 (3,), op=sum) at a/train.py:7, running for 30 s" in text
    )
    assert "rank 1, call 5" in text
    assert "ended 4.9 s before the record; the program is at a/train.py:1 in step" in text


def test_diff_reports_different_lines_of_equal_calls() -> None:
    extra = call(6, line="a/train.py:9")
    text = reported(record(0, [call(5), call(6)]), record(1, [call(5), extra, call(7)]))
    assert "call 6: the ranks make this call on different lines" in text
    assert "fewer calls by rank 0 than by rank 1" in text


def test_diff_ignores_row_counts_if_the_verb_allows_them_to_differ() -> None:
    rows = [call(1, "all_gather", shape=[n, 4], op=None) for n in (2, 5)]
    assert compare([record(0, rows[:1]), record(1, rows[1:])])[1]
    assert "different calls" in reported(record(0, [call(1)]), record(1, [call(1, shape=[4])]))


def test_diff_names_missing_ranks_and_open_messages() -> None:
    message = {**call(0, "recv", state="running", seconds=2.0, peer=1, tag=7), "op": None}
    del message["number"], message["op"]
    text = reported(record(0, [call(1), message], size=3), record(1, [call(1)], size=3))
    assert "rank 2: no record" in text
    assert "rank 0: recv(float32 (3,), peer=1, tag=7) at a/train.py:7, running for 2 s" in text


def test_diff_fails_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(tmp_path)]) == 2
    assert "expected flight records" in capsys.readouterr().err
    (tmp_path / "rank0.json").write_text(json.dumps({"format": "another"}))
    assert main(["diff", str(tmp_path)]) == 2
    assert "is no flight record: format must be" in capsys.readouterr().err


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
