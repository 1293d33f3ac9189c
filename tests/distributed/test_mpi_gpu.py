"""CuPy arrays over MPI, on real ranks with a stand-in for CuPy.

Tested: the path of each verb, its result, and the wait for the stream. Not tested: CUDA, or an MPI
library that accesses GPU memory.
"""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import RECV
from tests.cupy_stand_in import LOG
from tests.distributed.conformance import on_ranks, slow
from tests.gpu import verbs
from tests.gpu.verbs import on_gpu


@on_ranks()
def test_results_are_copied_back_without_a_wait(rank: int, size: int) -> None:
    x = on_gpu(np.full(1000, float(rank)))
    fl.all_reduce(x, async_op=True)
    fl.sync_distributed()
    assert np.all(x.get() == sum(range(size)))


@on_ranks()
def test_sync_distributed_raises_each_failure_of_cupy_arrays_once(rank: int, size: int) -> None:
    for _ in range(3):
        fl.all_reduce(on_gpu(np.ones(3 + rank)), async_op=True)
    for _ in range(3):
        with pytest.raises(fl.errors.MismatchError):
            fl.sync_distributed()
    fl.sync_distributed()


def receive_openly(rank: int, size: int) -> None:
    """Receive from any rank, and fewer rows than the array has."""
    if rank:
        fl.send(on_gpu(np.full((rank, 2), float(rank))), 0, tag=4)
        return
    seen = set()
    for _ in range(size - 1):
        x = on_gpu(np.zeros((size, 2)))
        backend = current_world().group.backend(x)
        result = backend.start(Call(RECV, x, tag=4, partial=True)).wait()
        assert x.get()[: result.rows].tolist() == [[result.source] * 2] * result.source
        assert not x.get()[result.rows :].any()
        seen.add(result.source)
    assert seen == set(range(1, size))


pytest.importorskip("mpi4py")


@pytest.fixture(params=["staged", *slow("aware")])
def ranks(request: pytest.FixtureRequest, pool: Any) -> Any:
    params = {"BACKEND": "mpi", "MPI_CUDA_AWARE": int(request.param == "aware")}
    return pool(3, init="mpi", params=params, env={"STAND_IN": "1"})


@pytest.mark.parametrize("dtype", ["bool", "float16"])
def test_all_reduce_of_every_layout_and_op(ranks: Any, dtype: str) -> None:
    for layout in verbs.LAYOUTS:
        ranks.run(verbs.all_reduce_every_op, dtype, layout)


def test_other_verbs_return_the_expected_arrays(ranks: Any) -> None:
    for count in (0, 1, 1000):
        ranks.run(verbs.broadcast_from_each, "float32", count)
        ranks.run(verbs.all_gather_unequal, "float32", count)
        ranks.run(verbs.reduce_scatter_parts, "float32", count)
        ranks.run(verbs.ring_of_messages, count)
    for layout in verbs.LAYOUTS:
        ranks.run(verbs.by_meaning, "float32", layout)
    ranks.run(verbs.composed_verbs, "float32")
    ranks.run(receive_openly)


def test_numpy_and_cupy_arrays_can_be_used_in_turn(ranks: Any) -> None:
    for contiguous in (False, True):
        ranks.run(verbs.all_reduce_multiple_mixed, contiguous, True)
    assert ranks.run(verbs.side_by_side) == [["MPI", "MPI"]] * 3
    ranks.run(verbs.dropped_work_is_safe)


def test_message_of_another_shape_raises_on_both_ends(ranks: Any) -> None:
    texts = ranks.run(verbs.message_of_another_shape)
    assert "rank 1 called recv(" in texts[0]
    assert "rank 0 called send(" in texts[1]


@pytest.mark.parametrize(
    ("ranks", "words", "steps"),
    [
        ("staged", "staged through pinned memory", ["to the host", "to the device", "synchronize"]),
        ("aware", "memory of the GPU", ["synchronize"]),
    ],
    indirect=["ranks"],
)
@on_ranks()
def test_arrays_are_staged_if_necessary(rank: int, size: int, words: str, steps: list[str]) -> None:
    """One all_reduce: check describe() and the operations on the GPU."""
    x = on_gpu(np.full(1000, 1.0))
    LOG.clear()
    fl.all_reduce(x)
    assert np.all(x.get() == size)
    assert fl.distributed_backend(x).name == "MPI"
    text = fl.distributed.describe()
    assert "CuPy arrays: MPI (" in text
    assert words in text
    done = [step for step, *_ in LOG if step != "record"]
    # An aware library waits for the stream at least once.
    assert done == steps if len(steps) > 1 else {*done} == {*steps}
