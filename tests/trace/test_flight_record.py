"""The flight record is written when a call fails, when SIGUSR1 comes, and on every rank."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.failures.flight_record import KEPT_JOBS, Flight, write_record
from flashlight_py.distributed.start.world import current_world
from flashlight_py.errors import MismatchError
from flashlight_py.trace.__main__ import main
from flashlight_py.trace.records import read_records
from tests.distributed.harness import run_ranks
from tests.trace.validity import assert_valid


def await_file(path: Path, seconds: float = 10.0) -> dict[str, Any]:
    ends = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < ends, f"{path} has not come"
        time.sleep(0.01)  # no event when another process has written
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def hang_then_part(rank: int, size: int, folder: str) -> str:
    """Rank 0 hangs in a native wait and gets the signal; later the ranks call different things."""
    pids = fl.all_gather_object(os.getpid())
    record = Path(folder) / "rank0.json"
    if rank == 1:
        state = ""
        while state != "running":  # else it came before the wait had begun
            record.unlink(missing_ok=True)
            os.kill(pids[0], signal.SIGUSR1)
            state = await_file(record)["calls"][-1]["state"]
        own = await_file(Path(folder) / "rank1.json")
        assert own["reason"] == "another rank has written its own"
        assert own["stands_at"].startswith("trace/test_flight_record.py:")
        assert "in hang_then_part" in "\n".join(own["threads"])
    fl.all_reduce(np.zeros(3))
    if rank == 0:
        found = json.loads(record.read_text())
        assert found["reason"] == "SIGUSR1"
        assert found["calls"][-1]["state"] == "running"
        assert found["calls"][-1]["verb"] == "all_reduce"
        assert "in hang_then_part" in "\n".join(found["threads"])
    return current_world().job


@pytest.mark.parametrize("init", ["file", "mpi"])  # MPICH has a handler for the signal itself
def test_a_signal_is_answered_during_a_native_wait_and_by_all_ranks(
    tmp_path: Path, init: str
) -> None:
    folder = tmp_path / "records"
    jobs = run_ranks(hang_then_part, 2, str(folder), init=init, params={"TRACE_DIR": folder})
    assert len(set(jobs)) == 1
    for rank in range(2):
        found = folder / f"rank{rank}.json"
        assert stat.S_IMODE(found.stat().st_mode) == 0o600
        assert json.loads(found.read_text())["job"] == jobs[0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {"rank0.json", "rank1.json"}


def part(rank: int, size: int) -> str:
    x = np.zeros(4, np.float32)
    fl.all_reduce(x)
    verb = (lambda: fl.all_reduce(x, op="max")) if rank == 0 else (lambda: fl.broadcast(x))
    with pytest.raises(MismatchError) as caught:
        verb()
    for _ in range(20):  # what follows a failure is not written again
        with pytest.raises(MismatchError, match=r"make every rank call the same$"):
            fl.all_reduce(np.zeros(3 + rank))
    return str(caught.value)


def test_a_mismatch_is_written_and_diff_says_where_ranks_parted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "records"
    messages = run_ranks(part, 2, params={"TRACE_DIR": str(folder), "BACKEND": "shm"})
    for rank, message in enumerate(messages):
        assert f"{folder}/rank{rank}.json" in message
        assert f"python -m flashlight_py.trace diff {folder}" in message
    assert main(["diff", str(folder)]) == 1
    reported = capsys.readouterr().out
    assert "group world, call 2: the ranks called different things" in reported
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


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_user_stays(when: str, tmp_path: Path) -> None:
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


def test_nothing_is_left_after_a_shutdown(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    env = {**os.environ, "FLASHLIGHT_TRACE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", CYCLES], timeout=60, env=env, check=False)
    assert done.returncode == -signal.SIGUSR1  # the signal does again what it did before
    assert not folder.exists()


def test_a_folder_that_somebody_put_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "records").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder of this user's own"):
        write_record(Flight(folder=tmp_path / "records"), "a test")
    assert not list((tmp_path / "elsewhere").iterdir())
    write_record(Flight(folder=tmp_path / "records", chosen=True), "a test")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["rank0.json"]


def test_of_old_jobs_the_newest_records_stay(tmp_path: Path) -> None:
    """In the default place; what is not a folder of this user is not touched."""
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


@pytest.mark.parametrize("command", ["doctor", "trace diff"])
def test_a_reader_that_has_read_enough_ends_a_command_quietly(command: str, tmp_path: Path) -> None:
    if command == "trace diff":
        write_record(Flight(folder=tmp_path, chosen=True), "a test")
        command = f"{command} {tmp_path}"
    reader, writer = os.pipe()
    os.close(reader)  # as head does, if earlier
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
from flashlight_py.trace.records import read_records
fl.distributed_init(params={"TRACE_DIR": sys.argv[1]})
fl.trace.dump("Caf\u00e9 " + sys.argv[2])  # im Café
assert main(["diff", sys.argv[1]]) == 0
"""


def test_a_record_holds_any_text_in_any_locale(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_ANY_LANGUAGE, encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, str(program), str(tmp_path / "records"), b"caf\xe9"]
    reported = subprocess.run(
        command, env={**os.environ, **plain}, capture_output=True, check=True, timeout=60
    )
    assert b"Caf\\xe9 caf\\udce9" in reported.stdout
    (found,) = read_records(tmp_path / "records")
    assert found.reason == "Caf\u00e9 caf\udce9"
    assert "# im Café" in (tmp_path / "records" / "rank0.json").read_text(encoding="utf-8")
