"""Standard input, terminals, output and inherited signals of flrun and spawn; records of ranks."""

import errno
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashlight_py.launch.failures import Tail
from flashlight_py.launch.loop import Poll
from flashlight_py.launch.output import LONGEST_LINE, PARTIAL_SECONDS, RankOutput, Source
from flashlight_py.launch.records import MOST_BYTES, MOST_BYTES_OF_HOST, RecordPipe, send_records
from tests.distributed.processes import is_alive, wait_for_end
from tests.launch.launcher import LAUNCH, begin, launch, run, write
from tests.tables import for_each


def written(ours: int, write_end: int, steps: Callable[[RankOutput], None], size: int = 2) -> str:
    steps(RankOutput(size, descriptors=(write_end, write_end)))
    os.close(write_end)
    with open(ours, "rb", buffering=0) as stream:
        return b"".join(iter(lambda: _part(stream.fileno()), b"")).decode()


def _part(descriptor: int) -> bytes:
    """Read available data: a terminal returns it in chunks, and EIO at its end."""
    try:
        return os.read(descriptor, 1 << 20)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def test_rank_output_keeps_lines_of_ranks_apart() -> None:
    def steps(output: RankOutput) -> None:
        output.take(Source(0, "out"), b"one ")
        output.take(Source(1, "err"), b"two\nthr")
        output.flush()  # a pipe shows no prompts
        output.take(Source(0, "out"), b"line\r\nfour\n")
        output.take(Source(1, "err"), b"ee")
        assert output.flush_at() == float("inf")
        output.end()
        output.say("the end")

    assert written(*os.pipe(), steps).splitlines() == [
        "[1] two",
        "[0] one line",
        "[0] four",
        "[1] three",
        "flrun: the end",
    ]


def test_rank_output_drops_output_and_reports_a_failed_write() -> None:
    ours, write_end = os.pipe()
    with open("/dev/full", "wb") as full:
        output = RankOutput(1, descriptors=(full.fileno(), write_end))
        assert output.error == ""
        output.take(Source(0, "out"), b"one\ntwo\n")
        output.take(Source(0, "err"), b"three\n")
        output.say(output.error)
        output.end()
    assert os.read(ours, 1 << 10).decode().splitlines() == [
        "[0] three",
        "flrun: standard output cannot be written: No space left on device",
    ]
    os.close(ours)
    os.close(write_end)


def test_rank_output_reports_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "rank-0.out").symlink_to("/dev/full")
    (tmp_path / "rank-1.out").mkdir()
    output = RankOutput(2, tmp_path)
    for rank in (0, 0, 1):
        output.take(Source(rank, "out"), b"x\n")
    output.end()
    assert output.error == (
        f"{tmp_path}/rank-0.out cannot be written: No space left on device; "
        f"{tmp_path}/rank-1.out cannot be written: Is a directory"
    )


def test_rank_output_splits_a_line_that_exceeds_the_limit() -> None:
    def steps(output: RankOutput) -> None:
        output.take(Source(0, "out"), b"x" * (LONGEST_LINE + 1))
        output.take(Source(1, "out"), b"y\n")

    ours, write_end = os.pipe()
    os.set_blocking(write_end, True)
    fcntl.fcntl(write_end, 1031, 1 << 20)  # F_SETPIPE_SZ, because nothing reads
    text = written(ours, write_end, steps, size=100)  # with aligned prefixes
    assert text == f"[ 0] {'x' * (LONGEST_LINE + 1)}\n[ 1] y\n"


def test_rank_output_shows_a_prompt_on_a_terminal_and_continues_its_line() -> None:
    def steps(output: RankOutput) -> None:
        output.take(Source(0, "out"), b"50%\r60%")
        assert output.flush_at() < float("inf")
        output.flush()
        output.take(Source(0, "out"), b"\r70%")
        output.flush()
        output.take(Source(1, "out"), b"other\n")
        output.end()

    first, second = (f"\033[{colour}m[{rank}]\033[0m " for rank, colour in ((0, 36), (1, 33)))
    assert written(*pty.openpty(), steps) == (
        f"{first}50%\r{first}60%\r{first}70%\r\n{second}other\r\n"
    )


def test_rank_output_shows_prompts_among_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("flashlight_py.system.monotonic", lambda: clock[0])

    def steps(output: RankOutput) -> None:
        output.take(Source(0, "out"), b"go on? ")
        for clock[0] in (0.1, 0.2):
            output.take(Source(1, "out"), b"a line\nanother")
            assert output.flush_at() == PARTIAL_SECONDS
        output.flush(clock[0])
        assert output.flush_at() == 0.2 + PARTIAL_SECONDS

    shown = written(*pty.openpty(), steps)
    assert shown.endswith("go on? ")
    assert shown.count("another") == 1


HEAD = "Traceback (most recent call last):\n"
LINK = "\nDuring handling of the above exception, another exception occurred:\n\n"


@for_each(
    "text errors",
    [
        ("", []),
        ("ValueError: printed\n", []),
        (f"{HEAD}  File\n    x\nError: a\nmore\n", ["Error: a"]),
        (f"{HEAD}  a\nA: 1\n\n{HEAD}  b\nB: 2\n", ["B: 2"]),
        (f"{HEAD}  a\nA: 1\n{LINK}{HEAD}  b\nB: 2\n", ["A: 1", "B: 2"]),
        # Written like torch.distributed does.
        (f"[rank12]: {HEAD}[rank12]:   File\n[rank12]: \n[rank12]: B: 2\n", ["B: 2"]),
        (f"{HEAD}  a\nA: 1\n\nThe traceback of rank 1:\n  {HEAD}    b\n  B: 2\n", ["A: 1"]),
        ('  File "x.py", line 1\n    x y\n      ^\nSyntaxError: no\n', ["SyntaxError: no"]),
    ],
)
def test_tail_keeps_last_lines_of_the_last_traceback_chain(text: str, errors: list[str]) -> None:
    tail = Tail()
    for line in text.encode().splitlines():
        tail.read(line)
    assert tail.errors == errors


def test_rank_output_files_have_unmodified_bytes(tmp_path: Path) -> None:
    output = RankOutput(2, tmp_path)
    output.take(Source(1, "err"), b"a\r\nb")
    output.end()
    assert (tmp_path / "rank-1.err").read_bytes() == b"a\r\nb"
    assert output.files_of(1) == str(tmp_path / "rank-1.err")


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


ECHO = """
import os, sys
print(repr(sys.stdin.read()))
"""


def test_rank_0_reads_a_pipe(tmp_path: Path) -> None:
    done = launch("-n", 2, write(tmp_path, ECHO), input="two\nlines\n")
    assert sorted(done.stdout.splitlines()) == [r"[0] 'two\nlines\n'", "[1] ''"]


class Terminal:
    """A command, by default the launcher, in a new terminal."""

    def __init__(self, *arguments: object, command: tuple[str, ...] = LAUNCH) -> None:
        self._ours, child_end = pty.openpty()
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=child_end,
            stdout=child_end,
            stderr=child_end,
            start_new_session=True,
            # A session leader owns the first terminal that it opens. No other thread runs here.
            preexec_fn=lambda: os.close(os.open(os.ttyname(child_end), os.O_RDWR)),  # noqa: PLW1509
        )
        os.close(child_end)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str) -> None:
        """Read until ``text`` appears after the previously expected text."""
        ends = time.monotonic() + 20
        while text not in self.text:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"no {text!r} in {self.text!r}"
            try:
                self.text += os.read(self._ours, 4096).decode()
            except OSError as error:  # the other end is closed
                raise AssertionError(f"no {text!r} in {self.text!r}") from error
        self.text = self.text.partition(text)[2]

    def end(self) -> int:
        code = self.process.wait(timeout=20)
        os.close(self._ours)
        return code


def test_breakpoint_works_in_rank_0_on_a_terminal(tmp_path: Path) -> None:
    program = """
    import os
    x = 40
    if os.environ["RANK"] == "0":
        breakpoint()
    print("after", x)
    """
    terminal = Terminal("-n", 2, write(tmp_path, program))
    terminal.expect("\033[33m[1]\033[0m after 40\r\n")
    terminal.expect("\033[36m[0]\033[0m (Pdb) ")
    for text, answer in (("p x + 2", "42"), ("x = 7", "(Pdb) "), ("continue", "after 7")):
        terminal.type(f"{text}\n")
        terminal.expect(answer)
    assert terminal.end() == 0


def test_ctrl_c_on_a_terminal_ends_ranks(tmp_path: Path) -> None:
    terminal = Terminal("-n", 2, write(tmp_path, "import signal\nprint('ready')\nsignal.pause()"))
    terminal.expect("ready")
    terminal.expect("ready")
    terminal.type("\x03")
    terminal.expect("flrun: interrupted by SIGINT; all ranks were ended")
    assert terminal.end() == 130


def test_background_launcher_reads_nothing_from_the_terminal(tmp_path: Path) -> None:
    """The shell is in the foreground, so it receives the typed text."""
    launcher = f"{' '.join(LAUNCH)} -n 1 {write(tmp_path, ECHO)}"
    script = f"set -m; {launcher} & read line; echo got $line; wait"
    terminal = Terminal("-c", script, command=("bash",))
    terminal.expect("[0]\033[0m ''")
    terminal.type("typed\n")
    terminal.expect("got typed")
    assert terminal.end() == 0


SPAWN = """
import os, signal, sys
import flashlight_py as fl

def job(rank):
    fl.barrier()
    if rank == 1:
        os._exit(7)

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

if __name__ == "__main__":
    if sys.argv[1] == "reaped":
        signal.signal(signal.SIGCHLD, reap)
    try:
        fl.spawn(job, nprocs=2)
    except fl.errors.RankFailedError as error:
        print(error.rank, error.exit_code)
    try:  # what spawn found is as it was
        os.waitpid(os.posix_spawnp("true", ["true"], os.environ), 0)
        print("kept")
    except ChildProcessError:
        print("ignored")
"""
RANKS = "import os, sys, time; time.sleep(0.2); sys.exit(7 * int(os.environ['RANK']))"


def ignore() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@pytest.mark.slow
def test_flrun_returns_codes_without_sigchld(tmp_path: Path) -> None:
    done = launch("-n", 2, write(tmp_path, RANKS), preexec_fn=ignore, code=7)
    assert "rank 1 of 2" in done.stderr


def test_flrun_and_its_ranks_end_on_signals_that_the_parent_blocked(tmp_path: Path) -> None:
    program = write(tmp_path, "import signal; print('here', flush=True); signal.pause()")
    with begin("-n", 1, "--grace", 60, program, preexec_fn=block) as process:
        assert process.stdout is not None
        assert "here" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


BLOCKED = """
import os, signal, flashlight_py as fl

def job(rank):
    os.kill(os.getpid(), signal.SIGTERM)
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    try:
        print(fl.spawn(job, nprocs=2))
    except fl.errors.RankFailedError as error:
        print("ended", error.exit_code)
"""


@pytest.mark.slow
def test_spawned_ranks_end_on_signals_that_the_parent_blocked(tmp_path: Path) -> None:
    done = run([sys.executable, write(tmp_path, BLOCKED)], preexec_fn=block)
    assert done.stdout.startswith("ended"), done.stdout + done.stderr


@pytest.mark.parametrize("handling", ["ignored", pytest.param("reaped", marks=pytest.mark.slow)])
def test_spawn_returns_exit_codes_if_sigchld_is_handled(handling: str, tmp_path: Path) -> None:
    before = ignore if handling == "ignored" else None
    done = run([sys.executable, write(tmp_path, SPAWN), handling], preexec_fn=before)
    if handling == "reaped":
        assert done.stdout.startswith(("1 7\n", "1 None\n")), done.stderr
    else:
        assert done.stdout == "1 7\nignored\n", done.stderr
