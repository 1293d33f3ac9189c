"""Other users, strangers, damaged files and full disks neither end a run nor receive its data."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flashlight_py.distributed.memory.topology import address_inside
from flashlight_py.distributed.rendezvous.stores import FileStore
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from tests.chaos import wire
from tests.chaos.rounds import all_end_well, start_together
from tests.distributed.rendezvous_helpers import Rank, Ranks
from tests.tables import pairs

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def start(
    ranks: Ranks, folder: Path, backend: str, seconds: float = 0.3, **plan: Any
) -> list[Rank]:
    """Start two ranks that compute for a moment."""
    return start_together(ranks, folder, 2, backend, seconds=seconds, **plan)


def test_ranks_create_files_and_memory_only_for_their_user(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks create every file exclusively, without following a link, with mode 0600 and any umask.

    The ranks record each creation.
    """
    started = start(ranks, tmp_path, "auto", umask=0, records_files=True)
    assert all_end_well(started)
    created = [entry for rank in started for entry in rank.events["computed"]["created"]]
    assert any("meeting" in path for path, *_ in created)
    for path, flags, mode in created:
        assert flags & os.O_EXCL, path
        assert flags & os.O_NOFOLLOW, path
        assert mode in (None, 0o600), (path, oct(mode))


def test_ranks_do_not_write_through_a_symbolic_link(tmp_path: Path) -> None:
    """Another user has placed a link at a guessed name. Ranks do not change its target."""
    store = FileStore(tmp_path / "meeting", 0, 2, 5.0)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for number in range(1, 4):
        (tmp_path / f"meeting.tmp-{store.run}-{number}").symlink_to(precious)
    with pytest.raises(RendezvousError, match="File exists"):
        store.exchange(b"mine")
    assert precious.read_text() == "precious"


def test_rendezvous_modules_do_not_import_pickle() -> None:
    import flashlight_py.distributed.rendezvous as package

    for module in Path(str(package.__file__)).parent.glob("*.py"):
        assert "pickle" not in module.read_text().replace("unpickled", ""), module


@pytest.mark.parametrize("backend", ["gloo", pytest.param("auto", marks=pytest.mark.slow)])
def test_ranks_on_one_host_listen_on_loopback(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    started = start(ranks, tmp_path, backend, seconds=0.5)
    for rank in started:
        rank.await_event("joined")
    # Gloo's sockets listen only until they are connected, and shared memory needs none.
    assert wire.listening(rank.pid for rank in started) == set()
    ends = [end for rank in started for end in wire.connected(rank.pid)]
    assert bool(ends) == (backend == "gloo")
    assert {host for host, _ in ends} <= {"127.0.0.1"}
    assert all_end_well(started)


def test_ranks_listen_on_the_requested_interface(ranks: Ranks, tmp_path: Path) -> None:
    started = start(ranks, tmp_path, "gloo", seconds=0.5, params={"INTERFACE": "127.0.0.2"})
    for rank in started:
        rank.await_event("joined")
    hosts = {host for rank in started for host, _ in wire.connected(rank.pid)}
    assert "127.0.0.2" in hosts
    assert all_end_well(started)


def test_gloo_listens_on_the_loopback_unless_hosts_differ() -> None:
    assert address_inside("") == "127.0.0.1"
    assert address_inside("lo") == "127.0.0.1"
    assert address_inside("::1") == "::1"
    with pytest.raises(BackendUnavailableError, match="neither an interface nor an address"):
        address_inside("192.0.2.77")


def test_ranks_do_not_map_memory_of_another_user(tmp_path: Path) -> None:
    from flashlight_py import _native

    try:
        native = _native.load_extension("shm")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    file = tmp_path / "memory"
    file.write_bytes(bytes(native.lib.fl_shm_bytes(2)))

    def opened(path: Path) -> bool:
        group = native.lib.fl_shm_open(str(path).encode(), 0, 0, 1, 2)
        if group == native.ffi.NULL:
            return False
        native.lib.fl_close(group)
        return True

    (tmp_path / "link").symlink_to(file)
    assert opened(file)
    assert not opened(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(file, NOBODY, NOBODY)
        assert not opened(file)
        assert "another user" in native.ffi.string(native.lib.fl_error()).decode()


# Limit of descriptors of a rank; a flood has twice as many connections.
DESCRIPTORS = 64
# Seconds within which ranks begin to connect, and starts of which at least one is caught.
LONGEST_START = 10.0
MOST_STARTS = 20
# Answer of a rank to a process without the job's secret: an empty greeting.
REFUSED = bytes(56)


def test_strangers_do_not_join_while_hosts_compute(ranks: Ranks, tmp_path: Path) -> None:
    started = start_together(ranks, tmp_path, 3, "hierarchical", seconds=0.6)
    for rank in started:
        rank.await_event("joined")
    for address in wire.listening(rank.pid for rank in started):
        with suppress(ConnectionError), socket.create_connection(address, 5) as stranger:
            stranger.sendall(bytes(1000))
    assert all_end_well(started)


def stopped_while_connecting(started: list[Rank]) -> set[wire.Address]:
    """Stop the ranks, and return their listening addresses; empty if they are connected already.

    On a busy machine all ranks may have ended.
    """
    pids = [rank.pid for rank in started]
    ends = time.monotonic() + LONGEST_START
    while are_alive(pids):
        assert time.monotonic() < ends  # no event signals the start
        now = wire.ends_of(pids)
        if any(listens for _, listens in now) or all(connected for connected, _ in now):
            break
    send(signal.SIGSTOP, started)
    return wire.listening(pids)


def are_alive(pids: list[int]) -> bool:
    return all(Path(f"/proc/{pid}").exists() for pid in pids)


def send(number: signal.Signals, started: list[Rank]) -> None:
    for rank in started:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def visited(ranks: Ranks, folder: Path, count: int) -> tuple[list[bytes], set[int]]:
    """Send up to ``count`` strangers to every port of ranks that connect.

    Returns the data that each stranger received (empty if the ranks were too quick), and the ends
    of the ranks.
    """
    draw = random.Random(str(folder))
    plan = {"timeout": 1.0, "seconds": 0.2, "descriptors": DESCRIPTORS}
    started = start_together(ranks, folder, 3, "gloo", **plan)
    try:
        doors = stopped_while_connecting(started)
        crowds = [wire.crowd(door, wire.blobs(draw, count)) for door in doors]
        strangers = [stranger for crowd in crowds for stranger in crowd]
    finally:
        send(signal.SIGCONT, started)
    codes = {rank.await_event("ended")["code"] for rank in started}
    return [wire.received(stranger) for stranger in strangers], codes


@pytest.mark.parametrize("count", [2 * DESCRIPTORS, pytest.param(1, marks=pytest.mark.slow)])
def test_strangers_can_only_make_the_start_fail(ranks: Ranks, tmp_path: Path, count: int) -> None:
    """Strangers receive no data. A flood may make the start fail in time on every rank."""
    answers: list[bytes] = []
    starts = 0
    while not answers:
        assert starts < MOST_STARTS, "no stranger was ever let in"
        folder = tmp_path / str(starts)
        folder.mkdir()
        began = time.monotonic()
        answers, codes = visited(ranks, folder, count)
        starts += 1
    assert time.monotonic() - began < LONGEST_START + 5.0
    text = (folder / "log").read_text()
    assert codes <= {0, 1}, text
    if 1 in codes:
        assert "flashlight_py.errors." in text
    assert set(answers) <= {b"", REFUSED}


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
