"""Files that are spoilt while ranks meet, disks without room, clocks that differ."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rendezvous_helpers import Rank, Ranks

NOBODY = 65534
PAGE = 4096
# Enough pages for a run of three ranks, whose every file takes one.
DISK = 256
HOUR = 3600.0
TIMEOUT = 1.0
# Over TIMEOUT a rank may take so long to tell the others why it fails, in seconds.
FAREWELL = 7.0


def plan(folder: Path, **more: Any) -> dict[str, Any]:
    place = {"path": str(folder / "meeting"), "log": str(folder.parent / "log"), "env": {}}
    params = {"TIMEOUT": TIMEOUT, "BACKEND": "shm"}
    return {"part": "compute", "init": "file", "seconds": 0.05, "params": params, **place, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "folder"
    inside.mkdir()
    return inside


def ends(started: list[Rank]) -> set[int]:
    """Return how the ranks ended; either well, or by a RendezvousError, in time."""
    began = time.monotonic()
    codes = {rank.await_event("ended")["code"] for rank in started}
    assert time.monotonic() - began < TIMEOUT + FAREWELL
    log = Path(started[0].plan["log"]).read_text()
    assert codes <= {0, 1}, log
    assert ("RendezvousError" in log) == (1 in codes), log
    return codes


SPOILS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "garbage": lambda file: file.write_bytes(os.urandom(300)),
    "another version": lambda file: file.write_text('{"version": 99}'),
    "another owner": lambda file: os.chown(file, NOBODY, NOBODY),
}


def await_file(folder: Path, kind: str, rank: Rank) -> Path:
    rank.await_event("started")
    while not (found := list(folder.glob(f"meeting.{kind}-*"))):
        time.sleep(0.001)  # nothing tells when a file comes
    return found[0]


@pytest.mark.parametrize("how", SPOILS)
def test_a_spoilt_announcement_is_no_matter(ranks: Ranks, folder: Path, how: str) -> None:
    """Its name says all that the others need."""
    host = ranks.start(0, 2, **plan(folder))
    SPOILS[how](await_file(folder, "run", host))
    assert ends([host, ranks.start(1, 2, **plan(folder))]) == {0}
    assert os.listdir(folder) == []


@pytest.mark.parametrize("how", SPOILS)
def test_a_spoilt_join_is_not_believed_and_is_told(ranks: Ranks, folder: Path, how: str) -> None:
    """The rank whose file was spoilt counts as one that has not come, on every rank."""
    started = [ranks.start(rank, 3, **plan(folder)) for rank in (0, 1)]
    file = await_file(folder, "join", started[1])
    with suppress(FileNotFoundError):
        SPOILS[how](file)
    started.append(ranks.start(2, 3, **plan(folder)))
    codes = ends(started)
    # Rank 0 may have read it before; then all is well. Otherwise it says which file it passed over,
    # unless the time of another rank was up before its own.
    assert len(codes) == 1
    if codes == {1}:
        text = (folder.parent / "log").read_text()
        assert "files passed over: join-" in text or "has not answered within" in text
    assert os.listdir(folder) == []


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of ``DISK`` pages."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK * PAGE}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("pages", [0, 1, 2, 4])
def test_a_full_disk_is_an_error_on_every_rank(ranks: Ranks, small_disk: Path, pages: int) -> None:
    """With no room, or with room for so many files."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes((DISK - pages) * PAGE))
    codes = ends([ranks.start(rank, 3, **plan(small_disk)) for rank in range(3)])
    assert codes == {1}
    if pages == 0:
        assert "No space left on device" in (small_disk.parent / "log").read_text()
    filler.unlink()
    (small_disk.parent / "log").write_text("")
    assert ends([ranks.start(rank, 3, **plan(small_disk)) for rank in range(3)]) == {0}
    assert os.listdir(small_disk) == []


def test_a_read_only_folder_is_named(ranks: Ranks, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert ends([ranks.start(rank, 2, **plan(small_disk)) for rank in range(2)]) == {1}
    text = (small_disk.parent / "log").read_text()
    assert f"cannot create files in {small_disk}: Read-only file system" in text


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_clocks_may_differ_by_an_hour(ranks: Ranks, folder: Path, by: float) -> None:
    """That of a process, as Python reads it, and those by which a file server dates its files."""
    host = ranks.start(0, 2, **plan(folder))
    file = await_file(folder, "run", host)
    other = file.stat().st_mtime + by
    os.utime(file, (other, other))
    assert ends([host, ranks.start(1, 2, **plan(folder, clock=by))]) == {0}
    assert os.listdir(folder) == []
