"""The host side of every verb, on real processes with stand-ins for CuPy and NCCL.

Tested: counts, types, offsets, operations and grouping, on all ranks together. Not tested: CUDA and
NCCL. tests/gpu runs the same functions on real GPUs.
"""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks, ranks_in
from tests.gpu import verbs

# ruff: noqa: F401 - tests that run here with the fixture below
from tests.gpu.test_contact import test_each_group_has_its_own_communicator
from tests.gpu.test_training import (
    test_hooks_give_equal_results_for_cupy_and_numpy_arrays,
    test_state_dicts_of_shards_equal_the_full_state,
    test_training_on_gpus_equals_a_cpu_process,
)
from tests.gpu.test_verbs import (
    test_all_reduce_multiple_mixes_arrays,
    test_all_reduce_supports_every_dtype_layout_and_op,
    test_broadcast_and_all_gather_return_correct_arrays,
    test_group_sends_numpy_and_cupy_arrays_with_different_backends,
    test_operation_completes_if_its_work_and_array_are_deleted,
    test_reduce_scatter_returns_the_part_of_the_rank,
    test_verbs_of_several_ranks_return_correct_arrays,
    test_verbs_raise_on_every_rank_if_shapes_differ,
)

GPU = {"env": {"STAND_IN": "1"}}
ranks = ranks_in(("shm", 2, GPU), slow=[("shm", 3, GPU)])


@on_ranks()
def test_array_is_released_after_the_collective_has_ended(rank: int, size: int) -> None:
    x = verbs.on_gpu(np.ones(3))
    held = weakref.ref(x)
    fl.all_reduce(x)
    fl.sync_distributed()
    del x
    assert held() is None


@on_ranks()
def test_closed_group_releases_its_gpu_memory(rank: int, size: int) -> None:
    """The array and the backend are freed without the garbage collector."""
    x = verbs.on_gpu(np.ones(3))
    group = fl.new_group(range(size))
    gc.collect()
    gc.disable()
    fl.all_reduce(x, group=group)
    held, backend = weakref.ref(x), weakref.ref(group.backend(x))
    del x
    group.close()
    are_released = held() is None, backend() is None
    gc.enable()
    assert are_released == (True, True)


@on_ranks()
def test_wrong_length_of_out_raises_on_its_rank_only(rank: int, size: int) -> None:
    """The other ranks have started by then. They have results, and the group remains usable."""
    x = verbs.on_gpu(np.full((1, 2), rank))
    for verb, options in ((fl.all_gather, {}), (fl.all_to_all, {"rows": [1] + [0] * (size - 1)})):
        rows = size if verb is fl.all_gather or rank == 0 else 0
        out = verbs.on_gpu(np.full((rows + (rank == 1), 2), -1))
        if rank == 1:
            with pytest.raises(
                ValueError, match=f"expected out with {rows} rows, .* got {rows + 1}"
            ):
                verb(x, out=out, **options)
            assert (out.get() == -1).all()
        else:
            assert verb(x, out=out, **options) is out
            assert out.get()[:, 0].tolist() == list(range(rows))


@on_ranks()
def test_connecting_gpus_uses_the_timeout_of_the_parent_group(rank: int, size: int) -> None:
    """Connect GPUs in a group whose timeout is shorter than the delay of one rank."""
    verbs.cupy()
    with fl.new_group(range(size), timeout=0.3) as group:
        x = verbs.on_gpu(np.ones(3))
        if rank == 1:
            threading.Event().wait(0.6)
        group.all_reduce(x)
        assert (x.get() == size).all()


def rank_1_blocks(rank: int) -> dict[str, str]:
    return {"STAND_IN": "1", "NCCL_COMM_BLOCKING": str(rank)}


@on_ranks(("shm", 2), env=rank_1_blocks)
def test_nccl_comm_blocking_is_rejected_on_every_rank(rank: int, size: int) -> None:
    verbs.cupy()
    why = "rank 1: NCCL_COMM_BLOCKING must be unset, got 1: NCCL would ignore timeouts"
    with pytest.raises(fl.errors.BackendUnavailableError, match=why):
        fl.all_reduce(verbs.on_gpu(np.ones(3)))
