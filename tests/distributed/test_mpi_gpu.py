"""CuPy arrays through MPI, on real ranks with a stand-in for CuPy.

Shown here: which way each verb takes, what it gives, and that the stream is waited for first. Not
shown: anything of CUDA, or of an MPI library that reaches a GPU's memory.
"""

from typing import Any

import pytest

from tests.distributed import mpi_gpu_ranks
from tests.gpu import verbs

pytest.importorskip("mpi4py")


@pytest.fixture(params=["staged", pytest.param("aware", marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, pool: Any) -> Any:
    params = {"BACKEND": "mpi", "MPI_CUDA_AWARE": int(request.param == "aware")}
    return pool(3, init="mpi", params=params, env={"STAND_IN": "1"})


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float32", "complex64"])
def test_all_reduce_of_every_layout_and_op(ranks: Any, dtype: str) -> None:
    for layout in verbs.LAYOUTS:
        ranks.run(verbs.all_reduce_every_op, dtype, layout)


def test_the_other_verbs(ranks: Any) -> None:
    for count in (0, 1, 1000):
        ranks.run(verbs.broadcast_from_each, "float32", count)
        ranks.run(verbs.all_gather_unequal, "float32", count)
        ranks.run(verbs.reduce_scatter_parts, "float32", count)
        ranks.run(verbs.ring_of_messages, count)
        ranks.run(mpi_gpu_ranks.every_move, "float32", count)
    for layout in verbs.LAYOUTS:
        ranks.run(verbs.by_meaning, "float32", layout)
    ranks.run(mpi_gpu_ranks.receive_openly)


def test_arrays_of_both_kinds_side_by_side(ranks: Any) -> None:
    for contiguous in (False, True):
        ranks.run(verbs.all_reduce_multiple_mixed, contiguous, True)
    ranks.run(verbs.halves_at_the_ends, "float32")
    assert ranks.run(verbs.side_by_side) == [["MPI", "MPI"]] * 3
    ranks.run(mpi_gpu_ranks.brought_home_unasked)
    ranks.run(verbs.dropped_work_is_safe)


def test_sync_distributed_raises_each_failure_of_cupy_arrays_once(ranks: Any) -> None:
    ranks.run(mpi_gpu_ranks.fail_unnoticed)


def test_a_message_of_another_shape_is_refused_on_both_sides(ranks: Any) -> None:
    told = ranks.run(verbs.message_of_another_shape)
    assert "rank 1 called recv(" in told[0]
    assert "rank 0 called send(" in told[1]


def test_arrays_are_staged_through_pinned_memory(pool: Any) -> None:
    world = pool(3, init="mpi", params={"BACKEND": "mpi"}, env={"STAND_IN": "1"})
    for kind, text, log in world.run(mpi_gpu_ranks.how_it_goes):
        assert kind == "MPI"
        assert "CuPy arrays: MPI (" in text
        assert "staged through pinned memory" in text
        assert [step for step, _ in log] == ["to the host", "to the device", "synchronize"]


def test_an_aware_library_is_given_the_arrays_themselves(pool: Any) -> None:
    params = {"BACKEND": "mpi", "MPI_CUDA_AWARE": 1}
    world = pool(3, init="mpi", params=params, env={"STAND_IN": "1"})
    for kind, text, log in world.run(mpi_gpu_ranks.how_it_goes):
        assert kind == "MPI"
        assert "memory of the GPU" in text
        assert {step for step, _ in log} == {"synchronize"}
