"""One array per host: who loads it, who can write to it, and when its memory is gone."""

import gc
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.memory import topology
from tests.distributed.conformance import BACKENDS, on_ranks, ranks_in
from tests.distributed.harness import run_ranks

ranks = ranks_in(("shm", 2), ("gloo", 3), ("hierarchical", 4), slow=[("mpi", 3)])
MB = 1 << 20


def mappings(array: np.ndarray) -> list[tuple[str, str]]:
    """The permissions and the inode of each mapping that ``array`` lies in."""
    first = array.__array_interface__["data"][0]
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end, allowed, inode = re.match(  # type: ignore[union-attr]
            r"(\w+)-(\w+) (\S+) \S+ \S+ (\d+)", line
        ).groups()
        if int(start, 16) <= first < int(end, 16):
            found.append((allowed, inode))
    return found


def check(rank: int, size: int) -> tuple[bool, list[tuple[str, str]]]:
    """Use arrays of every kind; returns whether this rank has loaded, and where one lies."""
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
    assert fl.all_reduce(batches) == 6 * size  # of the group, which goes on
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
        assert rank in (0, 2)  # the first one of a host
    with pytest.raises((TypeError, fl.errors.RankFailedError), match="Python objects"):
        fl.host_array(lambda: np.array([object()]))


def used_as_data(size: int) -> int:
    """Take all samples through every container; returns how many this rank has seen."""
    x = fl.host_array(lambda: np.arange(24.0).reshape(6, 4))
    rows = fl.dataset.TensorDataset([x, x[:, 0]])
    sharded = fl.ShardedDataset(rows, size, seed=1)
    sharded_rows = [len(a) for a, _ in fl.dataset.PrefetchDataset(sharded, 1, 2)]
    assert fl.all_reduce(sum(sharded_rows)) == 6
    own = fl.DistributedDataContainer(rows)
    assert all(sample.base is not None for sample, _ in own)  # views: nothing is copied
    assert fl.all_reduce(len(own)) == 6
    batches = fl.dataset.BatchDataset(rows, 4)
    y = [fl.nn.Linear(4, 1, dtype="float64")(fl.input(batch)) for batch, _ in batches]
    return sum(len(each.array) for each in y)


def test_one_rank_of_each_host_loads_and_all_map_the_same_memory(ranks: Any) -> None:
    found = ranks.run(check)
    hosts = [[0, 1], [2, 3]] if ranks.size == 4 else [list(range(ranks.size))]
    loaded = [rank for rank, (has_loaded, _) in enumerate(found) if has_loaded]
    assert loaded == [host[0] for host in hosts]
    for host in hosts:
        places = [found[rank][1] for rank in host]
        assert [[allowed for allowed, _ in place] for place in places] == [["r--s"]] * len(host)
        assert len({inode for ((_, inode),) in places}) == 1


def test_one_process_needs_no_init() -> None:
    has_loaded, _ = check(0, 1)
    assert has_loaded
    with pytest.raises(TypeError, match="load must be a function"):
        fl.host_array(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Python objects"):
        fl.host_array(lambda x: None, shape=3, dtype=object)
    with pytest.raises(ValueError, match="negative"):
        fl.host_array(lambda x: None, shape=(2, -1))


def test_a_cupy_array_is_refused(strict: Any) -> None:
    with pytest.raises(TypeError, match=r"array\.get\(\)"):
        fl.host_array(lambda: strict.zeros(3))


def test_a_file_is_copied_without_being_kept(tmp_path: Path) -> None:
    rows = np.arange(5 * MB, dtype=np.int32).reshape(-1, 512)
    rows.tofile(tmp_path / "rows")
    file = np.memmap(tmp_path / "rows", np.int32, "r", shape=rows.shape)
    x = fl.host_array(lambda: file[1:])
    np.testing.assert_array_equal(x, rows[1:])
    assert resident(mappings_of(str(tmp_path / "rows"))) < MB


def mappings_of(name: str) -> list[str]:
    """What the kernel says of each mapping of the file or memory ``name``."""
    parts = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return [part for part in parts if name in part.splitlines()[0]]


def resident(parts: list[str], what: str = "Rss") -> int:
    return sum(int(re.search(rf"\n{what}: +(\d+) kB", part)[1]) * 1024 for part in parts)  # type: ignore[index]


def test_memory_is_freed_with_the_last_view() -> None:
    gc.collect()  # what earlier tests left would be freed at any moment
    before = len(mappings_of("flashlight-"))
    view = fl.host_array(lambda: np.ones((3, 4)))[1]
    assert len(mappings_of("flashlight-")) == before + 1
    assert view.sum() == 4
    del view
    assert len(mappings_of("flashlight-")) == before


@pytest.mark.slow
@on_ranks(("shm", 2), lost=0)
def test_the_loading_rank_is_killed(rank: int, size: int) -> None:
    with pytest.raises(fl.errors.PeerLostError, match="lost rank 0"):
        fl.host_array(lambda: os.kill(os.getpid(), signal.SIGKILL))


@on_ranks(("shm", 2), fresh=True)
def test_a_name_in_dev_shm_is_gone_when_all_have_mapped_it(rank: int, size: int) -> None:
    """Memory is shared by a name, as containers of a pod do."""
    topology.process_space = lambda: ""  # type: ignore[assignment]
    x = fl.host_array(lambda: np.full(1000, 3.0))
    fl.barrier()
    assert x.sum() == 3000
    assert fl.distributed.get_local_size() == size
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("flashlight-")]


def outlives_the_group(rank: int, size: int, megabytes: int) -> float:
    """Return the megabytes that this rank's part of the shared memory counts for."""
    x = fl.host_array(lambda out: out.fill(1), shape=(megabytes, MB // 4))
    assert x.sum(dtype=np.float64) == megabytes * MB // 4
    fl.barrier()
    share = resident(mappings_of("flashlight-"), "Pss") / MB
    fl.barrier()
    fl.distributed_shutdown()
    assert x[-1, -1] == 1
    return share


@pytest.mark.slow
def test_eight_ranks_hold_one_copy() -> None:
    shares = run_ranks(outlives_the_group, 8, 64, **BACKENDS["shm"][1])
    assert sum(shares) < 64 * 1.05 + 8  # beside it, the group's own segment
