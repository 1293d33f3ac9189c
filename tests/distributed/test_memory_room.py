"""Checks of the available memory. All ranks raise if memory is short on a rank."""

import contextlib
import errno
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.api.memory import hosts_of, map_zeros
from flashlight_py.distributed.backend import BackendStore
from flashlight_py.distributed.memory import memory_file
from flashlight_py.distributed.memory.memory_file import MemoryFile, needs_names, open_memory
from flashlight_py.distributed.start.world import group_or_world
from flashlight_py.errors import DistributedError
from tests.distributed.conformance import on_ranks, raises, slow
from tests.distributed.harness import run_ranks

MOST_GROUPS = 400


def make_groups(rank: int, size: int, more: int) -> tuple[int, str]:
    """Create groups until ``more`` bytes of addresses are used; return count and error."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    groups: list[fl.ProcessGroup | None] = []
    try:
        while len(groups) < MOST_GROUPS:
            groups.append(fl.split(0))
    except (MemoryError, OSError, DistributedError) as error:
        with contextlib.suppress(DistributedError):  # another rank may be inside its next split
            fl.distributed_shutdown()
        return len(groups), f"{type(error).__name__}: {error}"
    return len(groups), ""


@pytest.mark.parametrize(
    ("backend", "more"), [("gloo", 15), ("shm", 120), *slow(("gloo", 30), ("shm", 60))]
)
def test_new_group_raises_if_memory_for_addresses_runs_out(backend: str, more: int) -> None:
    params = {"BACKEND": backend, "TIMEOUT": "5"}
    results = run_ranks(make_groups, 2, more << 20, deadline=30.0, params=params)
    first = min(results)
    assert first[0] < MOST_GROUPS
    assert "memory" in first[1].lower(), results  # the class name of NumPy's error contains it


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory_file, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize("named", [False, True])
def test_memory_file_is_private_and_temporary(folder: Path, named: bool) -> None:
    file = MemoryFile(named)
    os.pwrite(file.fd, b"secret", 0)
    status = os.fstat(file.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert len(list(folder.iterdir())) == named
    with open_memory(file.path) as fd:
        assert os.pread(fd, 6, 0) == b"secret"
    file.close()
    assert list(folder.iterdir()) == []
    with pytest.raises(OSError, match="No such file"), open_memory(file.path):
        pass
    # A name is needed if processes do not see each other.
    assert not needs_names(["a pid:[1]", "a pid:[1]", "b pid:[1]"])
    assert needs_names(["a pid:[1]", "a pid:[2]"])
    assert needs_names(["a pid:[1]", ""])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_open_memory_rejects_links_and_files_of_other_users(folder: Path) -> None:
    path, link = folder / "flashlight-other", folder / "flashlight-link"
    path.write_bytes(b"")
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"), open_memory(str(link)):
        pass
    os.chown(path, 12345, 12345)
    with pytest.raises(PermissionError, match="not a file of this user"), open_memory(str(path)):
        pass


def age(path: Path) -> None:
    """Make ``path`` older than a file that its owner is about to lock."""
    os.utime(path, (0, 0))


def test_memory_file_removes_files_of_dead_owners(folder: Path) -> None:
    living = MemoryFile(named=True)
    age(Path(living.path))
    program = (
        "import os, sys; from pathlib import Path; from flashlight_py.distributed.memory "
        "import memory_file; memory_file.DIRECTORY = Path(sys.argv[1]); "
        "print(memory_file.MemoryFile(True).path); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    left = Path(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
    assert left.exists()
    MemoryFile(named=True).close()
    assert left.exists(), "it is too young to be sure"
    age(left)
    MemoryFile(named=True).close()
    assert not left.exists()
    assert Path(living.path).exists()
    living.close()


MB = 1 << 20
MEMINFO = "MemTotal: 131072 kB\nMemAvailable:   65536 kB\nSwapFree:  {swap} kB\nHugePages_Free: 7\n"
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
STAT = "anon 5\ninactive_file 1048576\nactive_file 2097152\n"
LACK = "not enough memory"


def machine(root: Path, files: dict[str, object], swap: int = 0) -> Path:
    """Return ``root`` with 64 MB of memory and other files."""
    for name, text in {"proc/meminfo": MEMINFO.format(swap=swap), **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return root


def group(folder: str, limit: object, used: int) -> dict[str, object]:
    """Return the files of a control group (version 2) with 3 MB of file caches."""
    names = f"{folder}/memory.max", f"{folder}/memory.current", f"{folder}/memory.stat"
    return dict(zip(names, (limit, used, STAT), strict=True))


def old_group(folder: str, limit: object, used: int) -> dict[str, object]:
    names = "limit_in_bytes", "usage_in_bytes", "stat"
    stat = STAT.replace("inactive", "total_inactive").replace("\nactive", "\ntotal_active")
    values = zip(names, (limit, used, stat), strict=True)
    return {f"{folder}/memory.{name}": value for name, value in values}


NONE = {"proc/self/cgroup": "0::/"}
JOB = {"proc/self/cgroup": "0::/slurm/job_7/step"}
LIMITED = {**JOB, **group(f"{V2}/slurm", 16 * MB, 4 * MB)}
OLD = {"proc/self/cgroup": "5:cpu,memory:/docker/0a\n1:name=systemd:/docker/0a\n0::/"}


@pytest.mark.parametrize(
    ("files", "swap", "free", "limit"),
    [
        ({}, 0, 64 * MB, "MemAvailable"),
        (NONE, 1024, 65 * MB, "MemAvailable"),
        ({**NONE, **group(V2, 16 * MB, 9 * MB)}, 0, 10 * MB, f"{V2}"),
        ({**NONE, **group(V2, "max", 9 * MB)}, 0, 64 * MB, "MemAvailable"),
        ({**NONE, **group(V2, 999 * MB, 9 * MB)}, 0, 64 * MB, "MemAvailable"),
        ({**JOB, **group(f"{V2}/slurm/job_7", 8 * MB, 8 * MB)}, 0, 3 * MB, f"{V2}/slurm/job_7"),
        ({**LIMITED, **group(f"{V2}/slurm/job_7/step", 32 * MB, 1)}, 0, 15 * MB, f"{V2}/slurm"),
        ({**JOB, **group(f"{V2}/unified/slurm/job_7", 9 * MB, 8 * MB)}, 0, 4 * MB, "unified"),
        ({**OLD, **old_group(f"{V1}/docker/0a", 8 * MB, 6 * MB)}, 0, 5 * MB, f"{V1}/docker/0a"),
        ({**OLD, **old_group(V1, 8 * MB, 9 * MB)}, 9 << 20, 2 * MB, V1),
        ({**OLD, **old_group(V1, 9223372036854771712, 9)}, 0, 64 * MB, "MemAvailable"),
    ],
)
def test_available_memory_is_the_smallest_of_all_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any, swap: int, free: int, limit: str
) -> None:
    """The machine and each control group above this process count, as inside a container."""
    monkeypatch.setattr(memory_file, "ROOT", machine(tmp_path, files, swap))
    monkeypatch.setattr(memory_file, "LITTLE", 0)
    result, words = memory_file.available()
    assert (result, limit in words) == (free, True), words
    assert memory_file.available(ranks=4)[0] == min(result, (64 * MB + 1024 * swap) // 4)
    memory_file.require_memory(free * 9 // 10, "an array")
    with pytest.raises(MemoryError, match=f"an array: {free:,} bytes are needed, and {free:,} are"):
        memory_file.require_memory(free, "an array")


@pytest.mark.parametrize(
    ("files", "is_known"),
    [
        ({"proc/meminfo": "MemTotal: 999 kB\nMemFree: 9 kB\n"}, False),  # of an old kernel
        ({"proc/meminfo": "MemAvailable:\n"}, False),
        ({"proc/meminfo": ""}, False),
        ({"proc/meminfo": "\n" + MEMINFO.format(swap=0) + "\n"}, True),
        ({"proc/self/cgroup": "\nnonsense\n"}, True),
        *(({**LIMITED, f"{V2}/slurm/memory.{name}": ""}, True) for name in ("max", "current")),
        ({**LIMITED, f"{V2}/slurm/memory.stat": "inactive_file many\n"}, True),
    ],
)
def test_available_memory_ignores_unreadable_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, object], is_known: bool
) -> None:
    monkeypatch.setattr(memory_file, "ROOT", machine(tmp_path, files))
    expected = (64 * MB, "MemAvailable of /proc/meminfo") if is_known else (sys.maxsize, "no limit")
    result, words = memory_file.available()
    assert (result, expected[1] in words) == (expected[0], True), words


def test_require_memory_caches_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups without a limit, or with more memory than the machine, are not read again."""
    files = {**LIMITED, **group(f"{V2}/slurm/job_7", "max", 1), **group(V2, 999 * MB, 1)}
    monkeypatch.setattr(memory_file, "ROOT", machine(tmp_path, files))
    memory_file.available()
    reads: list[str] = []
    read_text = Path.read_text

    def counted(path: Path) -> str:
        reads.append(str(path.relative_to(tmp_path)))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", counted)
    memory_file.require_memory(63 * MB, "an array")
    memory_file.ordinary_empty((31, MB), np.dtype(np.uint8), ranks=2)
    assert reads == []
    with pytest.raises(MemoryError, match="15,728,640 are available"):
        memory_file.require_memory(64 * MB, "an array")
    slurm = [f"{V2}/slurm/memory.{name}" for name in ("stat", "current")]
    assert reads == ["proc/meminfo", *slurm]
    (tmp_path / f"{V2}/slurm/memory.max").write_text("max")
    with pytest.raises(MemoryError, match="67,108,864 are available"):
        memory_file.require_memory(1025 * MB, "an array")  # large requests read the limits again


def test_reserve_restores_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "ROOT", machine(tmp_path, {}))
    monkeypatch.setattr(memory_file, "_CHUNK_BYTES", MB)
    monkeypatch.setattr(memory_file, "LITTLE", 0)
    fd = os.memfd_create("test")
    memory_file.reserve(fd, 3 * MB, "a file")
    left = iter([64 * MB, 3 * MB])
    monkeypatch.setattr(memory_file, "available", lambda ranks: (next(left), "the test"))
    with pytest.raises(MemoryError, match="3,145,728 are available"):
        memory_file.reserve(fd, 8 * MB, "a file")
    status = os.fstat(fd)
    os.close(fd)
    assert (status.st_size, status.st_blocks * 512) == (3 * MB, 3 * MB)


def test_reserve_raises_before_a_small_file_system_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    system = os.fstatvfs(fd)
    with pytest.raises(OSError, match=r"a file: [0-9,]* bytes are needed, [0-9,]* free") as caught:
        memory_file.reserve(fd, system.f_blocks * system.f_frsize + 1, "a file")
    blocks = os.fstat(fd).st_blocks
    os.close(fd)
    assert (caught.value.errno, blocks) == (errno.ENOSPC, 0)


@contextlib.contextmanager
def little_memory(folder: Path) -> Iterator[None]:
    """Make this rank believe that its machine has 64 MB."""
    before, memory_file.ROOT = memory_file.ROOT, machine(folder, {})
    try:
        yield
    finally:
        memory_file.ROOT = before


def model(width: int) -> Any:
    """Return a linear layer that is equal on all ranks."""
    fl.set_seed(1)
    return fl.nn.Linear(width, width)


def fill(out: Any) -> None:
    """Fail unless there is enough memory."""
    assert str(memory_file.ROOT) == "/"


# Allocations of more than 64 MB on a host of two ranks, with the name in the error.
TAKES: dict[str, Callable[[], object]] = {
    "shared_empty": lambda: fl.shared_empty((9, MB)),
    "host_array": lambda: fl.host_array(fill, shape=(17, MB)),
    "gradient buckets": lambda: fl.distribute_module_grads(model(3000)),
    "in fully_shard": lambda: fl.fully_shard(model(3000)),
}


@pytest.mark.parametrize("name", TAKES)
@on_ranks(("shm", 2), ("hierarchical", 4))
def test_all_ranks_raise_memory_error(rank: int, size: int, name: str, tmp_path: Path) -> None:
    """Memory is short on all ranks, or on the second of two ranks."""
    assert len(hosts_of(group_or_world(None))) == size // 2
    is_poor = size == 2 or rank >= 2
    lacking = little_memory(tmp_path / str(rank)) if is_poor else contextlib.nullcontext()
    is_of_host = is_poor and name == "in fully_shard"  # in the group of the ranks of a host
    rank_text = f"rank {rank % 2} of 2" if is_of_host else f"rank {rank} of {size}"
    words = LACK, name, rank_text, "MemAvailable", *["rank 2"] * (not is_poor)
    with lacking, raises(fl.errors.OutOfMemoryError, *words) as caught:
        TAKES[name]()
    assert isinstance(caught.value, MemoryError)
    assert not re.search(r"rank \d: rank", str(caught.value)), str(caught.value)
    assert fl.all_reduce(np.ones(3)).tolist() == [size] * 3  # the group remains usable
    x = fl.shared_empty(100_000)
    x[...] = 1
    assert fl.all_reduce(x)[-1] == size


@on_ranks(("single", 1), ("shm", 2))
def test_require_memory_allows_all_without_limits(rank: int, size: int, tmp_path: Path) -> None:
    """Rank 0's limits are unknown. Small arrays do not get slower by the check of large arrays."""
    exchanges: list[bytes] = []
    exchange = BackendStore.exchange

    def counted(store: BackendStore, payload: bytes) -> list[bytes]:
        exchanges.append(payload)
        return exchange(store, payload)

    with little_memory(tmp_path / str(rank)), pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            (memory_file.ROOT / "proc/meminfo").write_text("MemFree: 9 kB\n")
        patch.setattr(BackendStore, "exchange", counted)
        fl.shared_empty((16, MB))[-1] = rank
        del exchanges[:]
        fl.shared_empty(1)
        assert len(exchanges) == (2 if size > 1 else 0)
    assert fl.all_reduce(np.ones(1)) == size


@on_ranks(("single", 1), ("shm", 2))
def test_impossible_sizes_are_rejected_before_an_allocation(rank: int, size: int) -> None:
    takes: list[Callable[[], object]] = [
        lambda: fl.shared_empty(10**15, np.float64),
        lambda: fl.host_array(zeros, shape=10**15, dtype=np.float64),
        lambda: map_zeros(group_or_world(None), 10**15, "zeros"),
    ]
    for take in takes:
        with pytest.raises(MemoryError, match="000,000,000,000,000 bytes are needed"):
            take()
    assert fl.all_reduce(np.ones(1)) == size


def zeros(out: Any) -> None:
    """Leave the array unchanged."""


@on_ranks(("gloo", 2))
def test_all_ranks_raise_out_of_memory_over_gloo(rank: int, size: int, tmp_path: Path) -> None:
    lacking = little_memory(tmp_path) if rank == 1 else contextlib.nullcontext()
    words = f"rank {rank} of 2: ", f"{LACK}. rank 1: an array of float32 (17, 1048576): 71,303,168 "
    with lacking, raises(fl.errors.OutOfMemoryError, *words):
        fl.shared_empty((17, MB))
    assert fl.all_reduce(np.ones(1)) == size


@on_ranks(("shm", 2))
def test_available_memory_excludes_unwritten_pages(rank: int, size: int, tmp_path: Path) -> None:
    """Memory that suffices for parameters and gradients does not suffice for the state of Adam."""
    sharded = model(2500)
    with little_memory(tmp_path / str(rank)):
        fl.fully_shard(sharded)
        fl.optim.SGDOptimizer(sharded.params(), 1e-3, momentum=0.5)
        with pytest.raises(fl.errors.OutOfMemoryError, match="state of an optimizer"):
            fl.optim.AdamOptimizer(sharded.params(), 1e-3)


def test_workers_raise_out_of_memory_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlight_py.parallel.workers import WorkerMemory

    monkeypatch.setattr(memory_file, "ROOT", machine(tmp_path, {}))
    memory = WorkerMemory()
    with pytest.raises(MemoryError, match="arrays for the workers of DataParallel"):
        memory.put([np.empty((17, MB), np.float32)])
    assert os.fstat(memory.fd).st_size == 0
    memory.close()
