"""Arrays in shared memory, its size and names, and several hosts."""

import ctypes
import gc
import itertools
import logging
import mmap
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native
from flashlight_py.distributed.backends.hierarchical import cut_evenly
from flashlight_py.distributed.memory import memory_file
from tests.distributed import conformance, programs
from tests.distributed.conformance import (
    BACKENDS,
    assert_equal,
    combine_arrays,
    hosts_by_letter,
    on_ranks,
    ranks_in,
    slow,
    values,
)
from tests.distributed.harness import run_ranks
from tests.launch.launcher import run


def shared_equals_ordinary(rank: int, size: int, name: str, count: int) -> None:
    everyone = [values(r, (count,), name) for r in range(size)]
    for op in conformance.ops_of(name):
        x = fl.distributed.shared_empty(count, everyone[0].dtype)
        x[...] = everyone[rank]
        y = everyone[rank].copy()
        assert fl.all_reduce(x, op=op) is x
        fl.all_reduce(y, op=op)
        assert x.tobytes() == y.tobytes(), op
        one = [array[: conformance.PERIOD] for array in everyone]
        assert_equal(x, np.resize(combine_arrays(one, op, 1.0), count), f"{op} of {count} {name}")


@pytest.mark.parametrize("size", [2, *slow(4)])
def test_verbs_on_shared_arrays_return_the_same_bits(pool: Any, size: int) -> None:
    names, counts = ("float32", "float16", "int8", "complex128"), (0, 1, 5000, 100_001)
    cases = [*itertools.product(names, counts), ("float32", 700_000)]
    pool(size, params={"BACKEND": "shm"}).run_each(shared_equals_ordinary, cases)


@on_ranks(("shm", 2), ("shm", 3))
def test_verbs_accept_views_of_shared_arrays(rank: int, size: int) -> None:
    shared = fl.distributed.shared_empty((2, 100_000), np.float64)
    shared[...] = rank
    assert fl.all_reduce(shared[1]).base is not None  # a view, in place
    assert np.all(shared[0] == rank)
    assert np.all(shared[1] == sum(range(size)))
    # Ranks may pass different offsets.
    other = fl.distributed.shared_empty((100_000,), np.float64)
    x = [other, shared[0], np.empty(100_000)][rank % 3]
    x[...] = rank
    fl.all_reduce(x)
    assert np.all(x == sum(range(size)))


@on_ranks(("shm", 2))
def test_shared_empty_checks_arguments_and_unmaps_dropped_arrays(rank: int, size: int) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("flashlight-")

    with pytest.raises(ValueError, match="negative"):
        fl.distributed.shared_empty((2, -1))
    with pytest.raises(TypeError, match="object"):
        fl.distributed.shared_empty(3, object)
    counts = []
    for _ in range(6):
        x = fl.distributed.shared_empty(100_000)
        x[...] = 1
        fl.all_reduce(x)
        del x
        gc.collect()
        fl.barrier()
        counts.append(mapped())
    assert counts[-1] <= counts[0]  # arrays of other tests may remain at first


@on_ranks(("shm", 3), fresh=True)
def test_shared_array_has_no_name_and_outlives_the_group(rank: int, size: int) -> None:
    x = fl.distributed.shared_empty(100_000)
    x[...] = 1.0
    fl.all_reduce(x)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("flashlight-")]
    fl.distributed_shutdown()
    x += 1.0
    assert x.sum() == (size + 1) * 100_000


APART = {"env": hosts_by_letter("ab")}


@pytest.mark.parametrize(
    ("ranks", "reason", "name"),
    [
        (("hierarchical", 2), "shared memory (all ranks share this host's memory)", "SHM"),
        (("gloo", 2), "Gloo over TCP (BACKEND is gloo)", "GLOO"),
        (("hierarchical", 2, APART), "Gloo over TCP (no two ranks share memory)", "GLOO"),
        (("hierarchical", 3), "2 hosts with 2, 1 ranks", "GLOO"),
    ],
    indirect=["ranks"],
)
@on_ranks()
def test_describe_names_backend_and_reason(rank: int, size: int, reason: str, name: str) -> None:
    text = fl.distributed.describe()
    assert f"rank {rank} of {size}" in text
    assert reason in text
    assert fl.distributed_backend().name == name


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [([0, 1, 2], "Gloo over TCP (no two ranks"), *slow(([1], "2 hosts with 2, 1 rank"))],
)
@on_ranks(("shm", 3), fresh=True, init=None)
def test_missing_shared_memory_on_a_host_warns_once(
    rank: int, size: int, tmp_path: Path, hidden: list[int], reason: str
) -> None:
    """Some ranks start without the extension."""
    records: list[logging.LogRecord] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("flashlight_py").addHandler(listener)
    load = _native.load_extension
    why = "the shm backend is not available: a test hides it"

    def load_others(name: str) -> Any:
        if name == "shm":
            raise fl.errors.BackendUnavailableError(why)
        return load(name)

    if rank in hidden:
        _native.load_extension = load_others
    init_args = fl.DistributedInit.FILE_SYSTEM, rank, size, {"FILE_PATH": str(tmp_path / "meet")}
    fl.distributed_init(*init_args)
    assert fl.all_reduce(np.array(rank)) == sum(range(size))
    fl.new_group([0, 1])  # it does not repeat the warning of its parent
    text, warnings = fl.distributed.describe(), [record.getMessage() for record in records]
    fl.distributed_shutdown()
    apart = f"rank 1 shares no memory with rank 0 of its host: {why}"
    assert reason in text
    assert apart in text
    assert len(warnings) == (rank == 0), warnings
    for words in ("Gloo is used instead of shared memory", apart):
        assert all(words in warning for warning in warnings)


@on_ranks(("shm", 2), fresh=True, env=hosts_by_letter("ab"), init=None)
def test_backend_shm_raises_if_memory_is_not_shared(rank: int, size: int, tmp_path: Path) -> None:
    params = {"FILE_PATH": str(tmp_path / "meet"), "BACKEND": "shm"}
    with pytest.raises(fl.errors.BackendUnavailableError, match="all ranks must share memory"):
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)


def test_cut_evenly_covers_the_array() -> None:
    for count in (0, 1, 7, 1000):
        for leaders in (1, 2, 3, 8):
            parts = cut_evenly(range(count), leaders)
            assert len(parts) == leaders
            assert [i for part in parts for i in part] == list(range(count))


SMALL_DEV_SHM = """
set -e
mount -t tmpfs -o size={size} tmpfs /dev/shm
for rank in 0 1; do
  {each} "{python}" -c "
import logging, sys, numpy as np, flashlight_py as fl
logging.basicConfig(level=logging.WARNING)
fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, $rank, 2, {{'FILE_PATH': '{path}'}})
x = np.full(100_000, $rank + 1.0)
fl.all_reduce(x)
y = fl.distributed.shared_empty(1_000_000)
y[...] = $rank + 1.0
fl.all_reduce(y)
assert np.all(x == 3) and np.all(y == 3)
# One write: the lines of ranks that share a pipe must not be mixed.
sys.stdout.write(fl.distributed.describe().splitlines()[1] + chr(10))
fl.distributed_shutdown()
" &
done
wait
ls -A /dev/shm
"""
# Containers of one pod share /dev/shm, but do not see each other's processes.
CONTAINER = "unshare --pid --fork --mount-proc"


@pytest.mark.parametrize(
    ("size", "prefix", "backend", "warning"),
    [
        ("64k", CONTAINER, "Gloo over TCP", "Gloo is used instead of shared memory"),
        ("6m", CONTAINER, "shared memory", "shared_empty(1000000,) returns ordinary memory"),
        *slow(("64k", "", "shared memory", None), ("64m", CONTAINER, "shared memory", None)),
    ],
)
def test_small_dev_shm_matters_in_containers_only(
    tmp_path: Path, size: str, prefix: str, backend: str, warning: str | None
) -> None:
    done = in_namespaces(SMALL_DEV_SHM, tmp_path, size=size, each=prefix)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 2, f"left in /dev/shm: {lines[2:]}"
    assert all(backend in line for line in lines), (lines, done.stderr)
    assert (warning or "") in done.stderr
    assert ("--shm-size" in done.stderr) == (warning is not None)


DIE_IN_A_CONTAINER = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
for rank in 0 1; do
  {each} "{python}" -c "
import os, time, numpy as np, flashlight_py as fl
fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, $rank, 2, {{'FILE_PATH': '{path}'}})
fl.barrier()
if $rank == 1:
    os._exit(0)
started = time.monotonic()
try:
    fl.all_reduce(np.zeros(3))
except fl.errors.PeerLostError as error:
    print(fl.distributed.describe().splitlines()[1], error, time.monotonic() - started < 2)
" &
done
wait
"""


def test_end_of_a_process_in_another_container_is_detected(tmp_path: Path) -> None:
    done = in_namespaces(DIE_IN_A_CONTAINER, tmp_path, each=CONTAINER)
    assert "shared memory" in done.stdout, done
    assert "lost rank 1 (its process has ended)" in done.stdout
    assert done.stdout.strip().endswith("True")


def in_namespaces(script: str, folder: Path, **words: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a new mount namespace, or skip the test if that is not allowed."""
    script = script.format(python=sys.executable, path=folder / "meet", **words)
    unshare = ["unshare", "-m", "--pid", "--fork", "true"]
    tried = subprocess.run(unshare, capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"needs to unshare namespaces: {tried.stderr.decode().strip()}")
    return run(["unshare", "-m", "bash", "-c", script])


_LIBC = ctypes.CDLL(None, use_errno=True)
_MEMFD_SECRET = 447  # on all architectures
_PR_SET_DUMPABLE = 4
_CAP_SYS_PTRACE = 19
_CAPABILITY_VERSION = 0x20080522

# Long enough for a read from the other process, and for several chunks of the other method.
COUNT = 600_000
# The first calls of a kind take turns in the two methods.
TURNS = 3


def secret(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return an array that neither another process nor the kernel can read."""
    file = _LIBC.syscall(_MEMFD_SECRET, 0)
    if file < 0:
        raise OSError(ctypes.get_errno(), "memfd_secret")
    os.ftruncate(file, 4 * count)
    room = mmap.mmap(file, 4 * count)
    os.close(file)
    return np.frombuffer(room, np.int32)


def can_keep_secrets() -> bool:
    try:
        secret(1024)
    except OSError:  # missing in the kernel, or no locked memory for this user
        return False
    return True


def keep_secret(array: Any, layout: str) -> Any:
    """Copy the values to memory that no other process can read."""
    hidden = secret(max(1, array.size))[: array.size].reshape(array.shape)
    hidden[...] = array
    return hidden


SECRETLY = (*programs.TABLE_VERBS, *programs.MESSAGES)


@pytest.mark.skipif(not can_keep_secrets(), reason="needs memfd_secret (Linux 5.14, x86 or ARM)")
@pytest.mark.parametrize("verbs", [("all_reduce", "gather", "sendrecv"), *slow((SECRETLY,))])
@on_ranks(("shm", 2), slow=[("shm", 3)])
def test_verbs_accept_secret_memory(rank: int, size: int, verbs: tuple[str, ...]) -> None:
    """Each verb uses a new group, because a group that failed to read once does not try again."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 or size == 3:
            patch.setattr(programs, "with_layout", keep_secret)
        for verb in verbs:
            calls = programs.every_verb(size, "int32", [COUNT], [verb], [1])
            programs.run_program(rank, size, calls * TURNS)
    x = np.full(COUNT, rank, np.int32)
    for _ in range(TURNS):
        if rank == 1:
            fl.send(keep_secret(x, ""), 0)
        elif rank == 0:
            assert np.all(fl.recv(x, 1) == 1)


def give_up_reading_by_right() -> None:
    """Drop root's right to read every process."""
    words = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    assert _LIBC.capget(header, words) == 0
    for index in range(3):
        words[index] &= ~(1 << _CAP_SYS_PTRACE)
    assert _LIBC.capset(header, words) == 0


@pytest.mark.skipif(platform.system() != "Linux", reason="needs prctl and capset")
@on_ranks(("shm", 2), fresh=True)
def test_undumpable_process_is_not_lost(rank: int, size: int) -> None:
    give_up_reading_by_right()
    fl.barrier()
    for turn in range(5 * TURNS):
        if turn == TURNS and rank == 1:
            assert _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
        got = fl.all_gather(np.full(COUNT, rank, np.int32))
        assert (got.reshape(size, -1) == np.arange(size)[:, None]).all(), turn


ranks = ranks_in(("shm", 2), ("gloo", 3), ("hierarchical", 4), slow=[("mpi", 3)])
MB = 1 << 20


def mappings(array: np.ndarray) -> list[tuple[str, str]]:
    first = array.__array_interface__["data"][0]
    results = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end, allowed, inode = re.match(  # type: ignore[union-attr]
            r"(\w+)-(\w+) (\S+) \S+ \S+ (\d+)", line
        ).groups()
        if int(start, 16) <= first < int(end, 16):
            results.append((allowed, inode))
    return results


def check(rank: int, size: int) -> tuple[bool, list[tuple[str, str]]]:
    """Use arrays of every kind; return whether this rank has loaded, and the inode of an array."""
    calls = []

    def load() -> np.ndarray:
        calls.append(rank)
        return np.arange(6.0).reshape(2, 3)[:, ::-1]

    x = fl.host_array(load)
    assert x.tolist() == [[2, 1, 0], [5, 4, 3]]
    assert x.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        x.flags.writeable = True

    def fill(out: np.ndarray) -> None:
        assert not out.any()
        out[...] = 7

    assert fl.host_array(fill, shape=(3, 2), dtype=np.int16).tolist() == [[7, 7]] * 3
    kind = [("name", "S4"), ("value", "<f8", (2,))]
    rows = fl.host_array(lambda: np.array([(b"one", (1, 2))], kind))
    assert rows["value"].tolist() == [[1, 2]]
    assert fl.host_array(lambda: 3.5) == 3.5
    assert fl.host_array(lambda: np.zeros((0, 3))).shape == (0, 3)
    raise_together(rank)
    batches = used_as_data(size)
    assert fl.all_reduce(batches) == 6 * size  # the group remains usable
    return bool(calls), mappings(x)


def raise_together(rank: int) -> None:
    def fail() -> None:
        raise KeyError("no such file")

    with pytest.raises((KeyError, fl.errors.RankFailedError)) as caught:
        fl.host_array(fail)
    if isinstance(caught.value, fl.errors.RankFailedError):
        assert "rank 0" in str(caught.value)
        assert "KeyError: 'no such file'" in str(caught.value)
        assert caught.value.rank == 0
    else:
        assert rank in (0, 2)  # the first rank of a host
    with pytest.raises((TypeError, fl.errors.RankFailedError), match="Python objects"):
        fl.host_array(lambda: np.array([object()]))


def used_as_data(size: int) -> int:
    """Take all samples through every container; return the number of samples of this rank."""
    x = fl.host_array(lambda: np.arange(24.0).reshape(6, 4))
    rows = fl.dataset.TensorDataset([x, x[:, 0]])
    sharded = fl.ShardedDataset(rows, size, seed=1)
    sharded_rows = [len(a) for a, _ in fl.dataset.PrefetchDataset(sharded, 1, 2)]
    assert fl.all_reduce(sum(sharded_rows)) == 6
    container = fl.DistributedDataContainer(rows)
    assert all(sample.base is not None for sample, _ in container)  # views: nothing is copied
    assert fl.all_reduce(len(container)) == 6
    batches = fl.dataset.BatchDataset(rows, 4)
    y = [fl.nn.Linear(4, 1, dtype="float64")(fl.input(batch)) for batch, _ in batches]
    return sum(len(item.array) for item in y)


def test_host_array_loads_once_per_host_and_shares_memory(ranks: Any) -> None:
    result = ranks.run(check)
    hosts = [[0, 1], [2, 3]] if ranks.size == 4 else [list(range(ranks.size))]
    loaded = [rank for rank, (has_loaded, _) in enumerate(result) if has_loaded]
    assert loaded == [host[0] for host in hosts]
    for host in hosts:  # one mapping of the same file
        places = [result[rank][1] for rank in host]
        assert {allowed for ((allowed, _),) in places} == {"r--s"}
        assert len({inode for ((_, inode),) in places}) == 1


def test_host_array_works_without_init(strict: Any) -> None:
    has_loaded, _ = check(0, 1)
    assert has_loaded
    with pytest.raises(TypeError, match="load must be a function"):
        fl.host_array(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Python objects"):
        fl.host_array(lambda x: None, shape=3, dtype=object)
    with pytest.raises(ValueError, match="negative"):
        fl.host_array(lambda x: None, shape=(2, -1))
    with pytest.raises(TypeError, match=r"array\.get\(\)"):
        fl.host_array(lambda: strict.zeros(3))


def test_host_array_copies_a_memory_mapped_file(tmp_path: Path) -> None:
    rows = np.arange(5 * MB, dtype=np.int32).reshape(-1, 512)
    rows.tofile(tmp_path / "rows")
    file = np.memmap(tmp_path / "rows", np.int32, "r", shape=rows.shape)
    x = fl.host_array(lambda: file[1:])
    np.testing.assert_array_equal(x, rows[1:])
    assert resident(mappings_of(str(tmp_path / "rows"))) < MB


def mappings_of(name: str) -> list[str]:
    """Return the kernel's description of each mapping of ``name``."""
    parts = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return [part for part in parts if name in part.splitlines()[0]]


def resident(parts: list[str], field: str = "Rss") -> int:
    return sum(int(re.search(rf"\n{field}: +(\d+) kB", part)[1]) * 1024 for part in parts)  # type: ignore[index]


def test_host_array_memory_is_freed_with_the_last_view() -> None:
    gc.collect()  # arrays of earlier tests could be freed at any time
    before = len(mappings_of("flashlight-"))
    view = fl.host_array(lambda: np.ones((3, 4)))[1]
    assert len(mappings_of("flashlight-")) == before + 1
    assert view.sum() == 4
    del view
    assert len(mappings_of("flashlight-")) == before


@pytest.mark.slow
@on_ranks(("shm", 2), lost=0)
def test_host_array_raises_if_the_loading_rank_is_killed(rank: int, size: int) -> None:
    with pytest.raises(fl.errors.PeerLostError, match="lost rank 0"):
        fl.host_array(lambda: os.kill(os.getpid(), signal.SIGKILL))


@on_ranks(("shm", 2), fresh=True)
def test_host_array_removes_its_name_in_dev_shm(rank: int, size: int) -> None:
    """Memory is shared by name, as between containers of a pod."""
    memory_file.process_space = lambda: ""  # type: ignore[assignment]
    x = fl.host_array(lambda: np.full(1000, 3.0))
    fl.barrier()
    assert x.sum() == 3000
    assert fl.distributed.get_local_size() == size
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("flashlight-")]


def outlives_the_group(rank: int, size: int, megabytes: int) -> float:
    """Return the megabytes of shared memory that count for this rank."""
    x = fl.host_array(lambda out: out.fill(1), shape=(megabytes, MB // 4))
    assert x.sum(dtype=np.float64) == megabytes * MB // 4
    fl.barrier()
    share = resident(mappings_of("flashlight-"), "Pss") / MB
    fl.barrier()
    fl.distributed_shutdown()
    assert x[-1, -1] == 1
    return share


@pytest.mark.slow
def test_eight_ranks_share_one_copy_of_a_host_array() -> None:
    shares = run_ranks(outlives_the_group, 8, 64, **BACKENDS["shm"][1])
    assert sum(shares) < 64 * 1.05 + 8  # in addition to the segment of the group
