"""Silent hosts, and flight records that the launcher collects from hosts."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flashlight_py.launch.loop import Poll
from flashlight_py.launch.records import MOST_BYTES, MOST_BYTES_OF_HOST, RecordPipe, send_records
from tests.distributed.processes import is_alive, wait_for_end
from tests.launch.launcher import begin, launch, write

# An oversized record, and a record whose path contains a newline.
WRITING = """
import os, pathlib, signal, sys
rank = os.environ["RANK"]
path = pathlib.Path(sys.argv[1], f"rank{rank}.json")
path.write_text('{"job": "j"}' + " " * (5 << 20 if rank == "1" else 0))
descriptor = int(os.environ["FLASHLIGHT_RECORDS"].partition(":")[0])
os.write(descriptor, f"{rank} {path}\\n{rank}\\nno record\\n".encode())
there = pathlib.Path(sys.argv[1], "there")
if rank == "0":
    there.touch()
    signal.pause()
while not there.exists():
    pass
sys.exit(3)
"""


@pytest.mark.slow
def test_flrun_names_a_record_that_exceeds_the_limit(tmp_path: Path, ssh: str) -> None:
    records = tmp_path / "records"
    records.mkdir()
    done = launch("--hosts", "a,b", "--ssh", ssh, write(tmp_path, WRITING), records, code=3)
    size = (records / "rank1.json").stat().st_size
    left = (
        f"flrun: the flight record of rank 1 remains on host b, at {records}/rank1.json: it has "
        f"{size} bytes, more than the limit of {MOST_BYTES} for one record"
    )
    assert left in done.stderr.splitlines()
    assert "flrun: flight records of 1 of 2 ranks are on " in done.stderr


def test_send_records_leaves_out_records_beyond_limits(tmp_path: Path) -> None:
    reports: dict[int, list[Any]] = {}
    paths = {rank: tmp_path / f"rank{rank}.json" for rank in range(20)}
    sizes = {0: MOST_BYTES, 1: MOST_BYTES + 1, 19: 1} | dict.fromkeys(range(2, 18), MOST_BYTES)
    for rank, size in sizes.items():
        paths[rank].touch()
        os.truncate(paths[rank], size)
    os.mkfifo(paths[18])  # no writer: a read would block for ever
    send_records(paths, lambda kind, rank, *values: reports.update({rank: [kind, *values]}))
    kinds = {rank: report[0] for rank, report in reports.items()}
    count = MOST_BYTES_OF_HOST // MOST_BYTES
    sent = [0, *range(2, 1 + count)]
    assert kinds == dict.fromkeys(sent, "record") | dict.fromkeys((1, 17, 19), "left_out")
    assert reports[1][1] == str(paths[1])
    assert f"more than the limit of {MOST_BYTES} for one record" in reports[1][2]
    assert f"of {MOST_BYTES_OF_HOST} for a host" in reports[17][2]
    assert reports[19][2].startswith("it has 1 bytes")


def test_record_pipe_ignores_invalid_lines(temporary_folder: Path) -> None:
    loop = Poll()
    notes = RecordPipe(loop)
    os.write(notes.descriptor, b"0 /a b\n\nx /c\n1 relative\n2\n3 /cut")
    assert notes.paths() == {0: Path("/a b")}
    notes.close()
    loop.close()


# Silent hosts -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_launcher_beats_while_it_blocks_on_a_pager(tmp_path: Path, ssh: str) -> None:
    """The launcher blocks in a system call for longer than the limit of silence."""
    program = write(tmp_path, "for _ in range(3000): print('x' * 1000)\n")
    process = begin("--hosts", "a,b", "--ssh", ssh, "--lost-after", 2, program, text=False)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=6)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")
    assert output.count(b"\n") == 6000


@pytest.mark.slow
def test_agent_reports_silence_of_the_launcher_and_ends_its_ranks(tmp_path: Path, ssh: str) -> None:
    """The copy of the launcher that has the connection is stopped."""
    hold = ("--no-python", "sh", "-c", "echo $$ >&2; sleep 60")
    launcher = begin("--hosts", "a", "--ssh", ssh, "--lost-after", 2, *hold)
    assert launcher.stderr
    rank = int(launcher.stderr.readline().split()[-1])
    copy = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text())
    os.kill(copy, signal.SIGSTOP)
    line = launcher.stderr.readline()
    expected = f"flrun: agent on {os.uname().nodename}: received nothing from the launcher since "
    assert line.startswith(expected)
    assert line.endswith(" (2 s); the agent ended its ranks\n")
    wait_for_end({rank}, 10.0)
    assert not is_alive(rank)
    os.kill(copy, signal.SIGCONT)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "flrun: rank 0 of 1 on a is lost: ssh to a exited with code 1" in errors
