"""What only shared memory has: arrays in it, its size, its names, several hosts beside it."""

import ctypes
import gc
import itertools
import logging
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native
from flashlight_py.distributed.backends.hierarchical_calls import cut_evenly
from tests.distributed import conformance
from tests.distributed.conformance import assert_equal, combined, in_places, on_ranks, values
from tests.distributed.harness import run_ranks
from tests.launch.launcher import run

SHM = {"BACKEND": "shm"}


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
        expected = np.resize(combined(one, op, 1.0), count)
        assert_equal(x, expected, f"{op} of {count} {name}")


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_an_array_in_shared_memory_has_the_same_bits(pool: Any, size: int) -> None:
    names, counts = ("float32", "float16", "int8", "complex128"), (0, 1, 5000, 100_001, 700_000)
    pool(size, params=SHM).run_each(shared_equals_ordinary, itertools.product(names, counts))


@on_ranks(("shm", 2), ("shm", 3))
def test_views_and_arrays_in_different_places(rank: int, size: int) -> None:
    whole = fl.distributed.shared_empty((2, 100_000), np.float64)
    whole[...] = rank
    assert fl.all_reduce(whole[1]).base is not None  # a view, in place
    assert np.all(whole[0] == rank)
    assert np.all(whole[1] == sum(range(size)))
    # Ranks that pass different places are reduced all the same.
    other = fl.distributed.shared_empty((100_000,), np.float64)
    x = [other, whole[0], np.empty(100_000)][rank % 3]
    x[...] = rank
    fl.all_reduce(x)
    assert np.all(x == sum(range(size)))


@on_ranks(("shm", 2), fresh=True)
def test_a_shared_array_outlives_the_group(rank: int, size: int) -> None:
    x = fl.distributed.shared_empty(1000)
    x[...] = 1.0
    fl.all_reduce(x)
    fl.distributed_shutdown()
    x += 1.0
    assert x.sum() == 3000.0


@on_ranks(("shm", 2))
def test_shared_arrays_that_are_dropped_are_unmapped(rank: int, size: int) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("flashlight-")

    counts = []
    for _ in range(20):
        x = fl.distributed.shared_empty(100_000)
        x[...] = 1
        fl.all_reduce(x)
        del x
        gc.collect()
        fl.barrier()
        counts.append(mapped())
    assert counts[-1] <= counts[0]  # at first there may be arrays of other tests


@on_ranks(("shm", 2), ("gloo", 2))
def test_shared_empty_checks_what_it_is_given(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        fl.distributed.shared_empty((2, -1))
    with pytest.raises(TypeError, match="object"):
        fl.distributed.shared_empty(3, object)
    assert fl.distributed.shared_empty((2, 3), np.int16).shape == (2, 3)


@on_ranks(("shm", 3), fresh=True)
def test_no_file_has_a_name_once_all_have_mapped_it(rank: int, size: int) -> None:
    x = fl.distributed.shared_empty(100_000)
    fl.all_reduce(x)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("flashlight-")]


def describe(rank: int, size: int) -> tuple[str, str]:
    return fl.distributed.describe(), fl.distributed_backend().name


@pytest.mark.parametrize(
    ("size", "world", "said", "name"),
    [
        (2, {}, "shared memory (all ranks share this host's memory)", "SHM"),
        (2, {"params": {"BACKEND": "gloo"}}, "Gloo over TCP (BACKEND is gloo)", "GLOO"),
        (2, {"env": in_places("ab")}, "Gloo over TCP (no two ranks share memory)", "GLOO"),
        (3, {"env": conformance.two_hosts}, "2 hosts with 2, 1 ranks", "GLOO"),
    ],
)
def test_describe_says_which_way_and_why(
    pool: Any, size: int, world: Any, said: str, name: str
) -> None:
    for rank, (text, backend) in enumerate(pool(size, **world).run(describe)):
        assert f"rank {rank} of {size}" in text
        assert said in text
        assert backend == name


def hide_shm(rank: int, size: int, path: str, hidden: list[int]) -> tuple[str, list[str]]:
    """Join without the extension on some ranks; return what is described and what is warned of."""
    records: list[logging.LogRecord] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("flashlight_py").addHandler(listener)
    load = _native.load
    why = "the shm backend is not available: a test hides it"

    def load_others(name: str) -> Any:
        if name == "shm":
            raise fl.errors.BackendUnavailableError(why)
        return load(name)

    if rank in hidden:
        _native.load = load_others
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, {"FILE_PATH": path})
    assert fl.all_reduce(np.array(rank)) == sum(range(size))
    fl.new_group([0, 1])  # it warns of nothing that its parent has warned of
    text = fl.distributed.describe()
    fl.distributed_shutdown()
    return text, [record.getMessage() for record in records]


@pytest.mark.parametrize(
    ("hidden", "way"), [([0, 1, 2], "Gloo over TCP (no two ranks"), ([1], "2 hosts with 2, 1 rank")]
)
def test_a_host_whose_ranks_could_share_memory_and_do_not_is_warned_of_once(
    tmp_path: Path, hidden: list[int], way: str
) -> None:
    found = run_ranks(hide_shm, 3, str(tmp_path / "meet"), hidden, init=None)
    apart = "rank 1 shares no memory with rank 0 of its host: the shm backend is not available: a"
    for rank, (text, warnings) in enumerate(found):
        assert way in text
        assert apart in text
        assert len(warnings) == (rank == 0), warnings
    assert "using Gloo instead of shared memory" in found[0][1][0]
    assert apart in found[0][1][0]


@on_ranks(("shm", 2), fresh=True, env=in_places("ab"), init=None)
def test_shm_that_cannot_be_is_refused_on_every_rank(rank: int, size: int, tmp_path: Path) -> None:
    params = {"FILE_PATH": str(tmp_path / "meet"), "BACKEND": "shm"}
    with pytest.raises(fl.errors.BackendUnavailableError, match="do not all share memory"):
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)


def test_parts_cover_an_array() -> None:
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
# Containers of one pod: they share /dev/shm, and do not see each other's processes.
CONTAINER = "unshare --pid --fork --mount-proc"


@pytest.mark.parametrize(
    ("size", "each", "way", "warning"),
    [
        ("64k", "", "shared memory", None),
        ("64k", CONTAINER, "Gloo over TCP", "using Gloo instead of shared memory"),
        ("6m", CONTAINER, "shared memory", "shared_empty(1000000,) returns ordinary memory"),
        ("64m", CONTAINER, "shared memory", None),
    ],
)
def test_a_small_dev_shm_matters_to_containers_alone_and_is_gone_around(
    tmp_path: Path, size: str, each: str, way: str, warning: str | None
) -> None:
    """In a mount namespace of its own, with a /dev/shm as small as a container's may be."""
    done = in_namespaces(SMALL_DEV_SHM, tmp_path, size=size, each=each)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 2, f"left in /dev/shm: {lines[2:]}"
    assert all(way in line for line in lines), (lines, done.stderr)
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


def test_a_process_of_another_container_that_ends_is_noticed(tmp_path: Path) -> None:
    done = in_namespaces(DIE_IN_A_CONTAINER, tmp_path, each=CONTAINER)
    assert "shared memory" in done.stdout, done
    assert "lost rank 1 (its process has ended)" in done.stdout
    assert done.stdout.strip().endswith("True")


def in_namespaces(script: str, folder: Path, **words: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a mount namespace of its own; skips where that is not allowed."""
    script = script.format(python=sys.executable, path=folder / "meet", **words)
    unshare = ["unshare", "-m", "--pid", "--fork", "true"]
    tried = subprocess.run(unshare, capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"needs to unshare namespaces: {tried.stderr.decode().strip()}")
    return run(["unshare", "-m", "bash", "-c", script])


# Memory that other processes cannot read goes through shared memory -------------------------------


_LIBC = ctypes.CDLL(None, use_errno=True)
_MEMFD_SECRET = 447  # on all architectures
_PR_SET_DUMPABLE = 4
_CAP_SYS_PTRACE = 19
_CAPABILITY_VERSION = 0x20080522

# Long enough to be read from the other's memory, and for several pieces of the other way.
COUNT = 600_000
# Calls of one kind take turns, to begin with, in how they move the data.
TURNS = 3


def secret(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return an array that no other process can read, and the kernel neither."""
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
    except OSError:  # the kernel lacks it, or this user may lock no memory
        return False
    return True


def filled(array: Any, rank: int) -> Any:
    array[...] = np.arange(array.size) % 1000 + rank
    return array


def broadcast(group: Any, x: Any, rank: int) -> Any:
    y = x if rank == 1 else np.empty(COUNT, np.int32)
    return group.broadcast(y, root=1), filled(np.empty_like(x), 1)


def reduce(group: Any, x: Any, rank: int) -> Any:
    y = group.reduce(x.copy() if rank == 0 else x, root=0)
    return (y, y) if rank else (y, expected_sum(group.size))


def expected_sum(size: int) -> Any:
    return sum(filled(np.empty(COUNT, np.int32), rank) for rank in range(size))


def reduce_scatter(group: Any, x: Any, rank: int) -> Any:
    return group.reduce_scatter(x), np.split(expected_sum(group.size), group.size)[rank]


def all_gather(group: Any, x: Any, rank: int) -> Any:
    each = [filled(np.empty_like(x), r) for r in range(group.size)]
    return group.all_gather(x), np.concatenate(each)


def scatter(group: Any, x: Any, rank: int) -> Any:
    whole = x.reshape(group.size, -1)
    parts = filled(np.empty_like(x), 1).reshape(group.size, -1)
    return group.scatter(whole if rank == 1 else None, 1), parts[rank]


def all_to_all(group: Any, x: Any, rank: int) -> Any:
    each = [np.split(filled(np.empty_like(x), r), group.size)[rank] for r in range(group.size)]
    return group.all_to_all(x), np.concatenate(each)


def message(group: Any, x: Any, rank: int) -> Any:
    got = np.empty(COUNT, np.int32)
    if rank == 1:
        group.send(x, 0)
    elif rank == 0:
        return group.recv(got, 1), filled(np.empty_like(x), 1)
    return got, got


def exchange(group: Any, x: Any, rank: int) -> Any:
    got = np.empty(COUNT, np.int32)
    left, right = (rank - 1) % group.size, (rank + 1) % group.size
    return group.sendrecv(x, right, out=got, src=left), filled(np.empty_like(x), left)


VERBS: list[Callable[[Any, Any, int], Any]] = [
    *(broadcast, reduce, reduce_scatter, all_gather, scatter, all_to_all, message, exchange)
]


@pytest.mark.skipif(not can_keep_secrets(), reason="needs memfd_secret (Linux 5.14, x86 or ARM)")
@on_ranks(("shm", 2), ("shm", 3))
def test_secret_memory_is_moved_by_every_verb(rank: int, size: int) -> None:
    """Call each verb in a new group, as one that has failed to read once does not try again."""
    x = filled(secret(COUNT) if rank == 1 or size == 3 else np.empty(COUNT, np.int32), rank)
    for verb in VERBS:
        with fl.new_group(range(size)) as group:
            for turn in range(TURNS):
                got, expected = verb(group, x, rank)
                assert np.array_equal(np.ravel(got), np.ravel(expected)), (verb, turn)
            group.barrier()


def give_up_reading_by_right() -> None:
    """Root may read every process; from here on this one is as any other user's."""
    words = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    assert _LIBC.capget(header, words) == 0
    for index in range(3):
        words[index] &= ~(1 << _CAP_SYS_PTRACE)
    assert _LIBC.capset(header, words) == 0


@pytest.mark.skipif(platform.system() != "Linux", reason="needs prctl and capset")
@on_ranks(("shm", 2), fresh=True)
def test_a_process_that_becomes_undumpable_is_not_lost(rank: int, size: int) -> None:
    give_up_reading_by_right()
    fl.barrier()
    for turn in range(5 * TURNS):
        if turn == TURNS and rank == 1:
            assert _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
        got = fl.all_gather(np.full(COUNT, rank, np.int32))
        assert (got.reshape(size, -1) == np.arange(size)[:, None]).all(), turn
