"""Files that are damaged during the rendezvous, full disks, different clocks."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rendezvous_helpers import Rank, Ranks
from tests.tables import pairs

NOBODY = 65534
PAGE = 4096
# Pages of a small file system; a run of three ranks writes one.
DISK = 256
HOUR = 3600.0
TIMEOUT = 1.0
# Seconds after TIMEOUT in which a rank may report its failure to the other ranks.
FAREWELL = 7.0

FLAT, TREE = "512", "2"  # values of FLASHLIGHT_TREE_FROM for a job of three ranks


def plan(folder: Path, shape: str = TREE, **more: Any) -> dict[str, Any]:
    env = {"FLASHLIGHT_TREE_FROM": shape}
    common = {"path": str(folder / "meeting"), "log": str(folder.parent / "log"), "env": env}
    params = {"TIMEOUT": TIMEOUT, "BACKEND": "shm"}
    return {"part": "compute", "seconds": 0.05, "params": params, **common, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "folder"
    inside.mkdir()
    return inside


def ends(started: list[Rank]) -> set[int]:
    """Return the ends of the ranks, which must be success or RendezvousError in time."""
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
    while not (results := list(folder.glob(f"meeting.{kind}-*"))):
        time.sleep(0.001)  # no event signals a new file
    return results[0]


ORDINARY = [("truncated", False, FLAT), ("garbage", False, TREE)]


@pytest.mark.parametrize(
    ("damage", "connected", "shape"),
    [
        pytest.param(*row, marks=() if row in ORDINARY else pytest.mark.slow)
        for row in pairs([*SPOILS, "removed"], [False, True], [FLAT, TREE])
    ],
)
def test_file_store_repairs_damage(
    ranks: Ranks, folder: Path, damage: str, connected: bool, shape: str
) -> None:
    """Rank 0 announces itself again to ranks that have not ``connected``."""
    started = [ranks.start(rank, 3, **plan(folder, shape)) for rank in range(1 + connected)]
    SPOILS.get(damage, os.remove)(await_file(folder, "run", started[0]))
    started += [ranks.start(rank, 3, **plan(folder, shape)) for rank in range(len(started), 3)]
    assert ends(started) == {0}
    assert os.listdir(folder) == []


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK * PAGE}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_file_store_raises_on_all_ranks_if_the_disk_is_full(ranks: Ranks, small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(DISK * PAGE))
    assert ends([ranks.start(rank, 3, **plan(small_disk)) for rank in range(3)]) == {1}
    assert "No space left on device" in (small_disk.parent / "log").read_text()
    filler.unlink()
    (small_disk.parent / "log").write_text("")
    assert ends([ranks.start(rank, 3, **plan(small_disk)) for rank in range(3)]) == {0}
    assert os.listdir(small_disk) == []


def test_file_store_names_a_read_only_folder(ranks: Ranks, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert ends([ranks.start(rank, 2, **plan(small_disk)) for rank in range(2)]) == {1}
    text = (small_disk.parent / "log").read_text()
    assert f"cannot create files in {small_disk}: Read-only file system" in text


@pytest.mark.parametrize(("by", "shape"), [(-HOUR, FLAT), (HOUR, TREE)])
def test_rendezvous_succeeds_if_clocks_differ(
    ranks: Ranks, folder: Path, by: float, shape: str
) -> None:
    """This covers the clock of a process, as Python reads it, and the file times of a server."""
    host = ranks.start(0, 2, **plan(folder, shape))
    file = await_file(folder, "run", host)
    other = file.stat().st_mtime + by
    os.utime(file, (other, other))
    assert ends([host, ranks.start(1, 2, **plan(folder, shape, clock=by))]) == {0}
    assert os.listdir(folder) == []
