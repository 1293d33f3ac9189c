"""First contact with the real NCCL: the library, a communicator for each group, and its end."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.nccl.library import load_nccl, version_text
from tests.distributed.conformance import first_error, on_ranks
from tests.distributed.harness import run_outcomes
from tests.gpu import verbs
from tests.gpu.conftest import world

pytestmark = pytest.mark.gpu

# Bytes that CUDA and NCCL may cache, far less than one communicator.
KEPT = 32 << 20


def libraries() -> set[str]:
    """Return the NCCL libraries that this process has opened."""
    maps = Path("/proc/self/maps").read_text()
    return {line.split()[-1] for line in maps.splitlines() if "libnccl.so" in line}


def opened(rank: int, size: int) -> tuple[set[str], int, int]:
    from cupy.cuda import nccl  # the attribute exists only after this import

    fl.all_reduce(verbs.on_gpu(np.ones(3)))
    return libraries(), load_nccl().version, nccl.get_version()


def test_process_loads_one_nccl_library_of_a_supported_version(ranks: Any) -> None:
    for result, ours, cupys in ranks.run(opened):
        assert len(result) == 1, "CuPy and this package use different files"
        assert ours == cupys >= 21400


def described(rank: int, size: int) -> str:
    fl.all_reduce(verbs.on_gpu(np.ones(1)))
    return str(fl.distributed.describe())


def test_describe_names_nccl_version_and_device(ranks: Any) -> None:
    if ranks.size == 1:
        pytest.skip("a world of one needs no NCCL")
    for text in ranks.run(described):
        version = re.escape(version_text(load_nccl().version))
        assert re.search(rf"NCCL {version}.*CUDA device \d", text)


def three_worlds(rank: int, size: int, meeting: Path, params: dict[str, Any]) -> list[float]:
    """Join, reduce and leave, three times in one process."""
    sums = []
    for number in range(3):
        path = {"FILE_PATH": str(meeting / str(number)), **params}
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, path)
        x = verbs.on_gpu(np.full(1000, rank + 1.0))
        fl.all_reduce(x)
        sums.append(float(x[-1]))
        fl.all_reduce(x, async_op=True)  # shutdown must end the running call
        fl.distributed_shutdown()
    return sums


@pytest.mark.parametrize(("size", "params"), [(1, {}), (2, {}), (2, {"BACKEND": "nccl"}), (4, {})])
def test_process_can_join_several_worlds(size: int, params: dict[str, Any], tmp_path: Path) -> None:
    outcomes = run_outcomes(
        three_worlds, size, tmp_path, params, init=None, env=world(size)["env"], deadline=100.0
    )
    assert all(outcome.ok for outcome in outcomes), "\n".join(o.report() for o in outcomes)
    assert [outcome.value for outcome in outcomes] == [[size * (size + 1) / 2] * 3] * size


@on_ranks()
def test_each_group_has_its_own_communicator(rank: int, size: int) -> None:
    """Start collectives of three groups in turn, and wait only after all have started."""
    everyone, halves = fl.new_group(list(range(size))), fl.split(rank % 2)
    assert halves is not None
    arrays = [verbs.on_gpu(np.full(50_000, rank + 1.0)) for _ in range(3)]
    for _ in range(5):
        numbers = [float(array[0]) for array in arrays]
        works = [
            fl.all_reduce(array, async_op=True, group=group)
            for array, group in zip(arrays, (None, everyone, halves), strict=True)
        ]
        for work in works:
            work.wait()
        sums = [float(array[-1]) for array in arrays]
        half = range(rank % 2, size, 2)
        if numbers == [rank + 1.0] * 3:
            assert sums == [size * (size + 1) / 2] * 2 + [sum(r + 1.0 for r in half)]
        for array in arrays:
            array.fill(rank + 1.0)
    for group in (everyone, halves):
        group.close()
    x = verbs.on_gpu(np.ones(3))
    fl.all_reduce(x)
    assert float(x[0]) == size


def groups_come_and_go(rank: int, size: int) -> list[int]:
    """Return the free bytes of the device after each of several groups."""
    cupy = verbs.cupy()
    free = []
    for _ in range(6):
        group = fl.new_group(list(range(size)))
        fl.all_reduce(verbs.on_gpu(np.ones(1 << 20)), group=group)
        fl.sync_distributed()
        group.close()
        fl.barrier()
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.cuda.Device().synchronize()
        fl.barrier()
        free.append(int(cupy.cuda.runtime.memGetInfo()[0]))
        fl.barrier()
    return free


def test_closed_group_frees_its_memory(ranks: Any) -> None:
    for free in ranks.run(groups_come_and_go):
        assert free[1] - free[-1] <= KEPT, free


def both_on_one(rank: int, size: int) -> str:
    return first_error(lambda: fl.all_reduce(verbs.on_gpu(np.ones(3))))


def test_init_rejects_two_ranks_on_one_gpu() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() > 1:
        pytest.skip("needs a machine with one GPU")
    for outcome in run_outcomes(both_on_one, 2, deadline=60.0):
        assert "ranks 0 and 1 are on the same GPU" in str(outcome.value), outcome.report()
        assert "NCCL_HOSTID" in str(outcome.value)
