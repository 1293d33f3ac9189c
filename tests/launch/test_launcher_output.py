"""Output of ranks on a terminal or pipe: complete lines with the rank as prefix."""

import errno
import fcntl
import os
import pty
from collections.abc import Callable
from pathlib import Path

import pytest

from flashlight_py.launch.failures import Tail
from flashlight_py.launch.output import LONGEST_LINE, PARTIAL_SECONDS, RankOutput, Source
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
