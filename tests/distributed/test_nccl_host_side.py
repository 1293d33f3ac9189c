"""What the host does for every verb, on real processes with a stand-in for CuPy and NCCL.

Shown here: counts, types, offsets, operations and grouping, on all ranks together. Not shown:
anything of CUDA or NCCL; the same functions run on them in tests/gpu.
"""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks, ranks_in
from tests.gpu import test_hooks, test_training, verbs
from tests.gpu.test_contact import (  # noqa: F401 - run here, with the fixture below
    test_each_group_has_a_communicator_of_its_own,
)
from tests.gpu.test_verbs import (  # noqa: F401 - run here, with the fixture below
    test_all_reduce_multiple_of_mixed_arrays,
    test_all_reduce_of_every_dtype_layout_and_op,
    test_numpy_and_cupy_arrays_go_their_own_ways_in_one_group,
    test_works_and_arrays_may_be_dropped,
)

GPU = {"env": {"STAND_IN": "1"}}
ranks = ranks_in(("shm", 2, GPU), slow=[("shm", 3, GPU)])


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex128"])
def test_broadcast_gathers_and_composed_verbs(ranks: Any, dtype: str) -> None:
    for count in (0, 1, 1000):
        ranks.run(verbs.broadcast_from_each, dtype, count)
        ranks.run(verbs.all_gather_unequal, dtype, count)
    if dtype not in ("bool", "complex128"):
        ranks.run(verbs.composed_verbs, dtype)


@pytest.mark.parametrize("dtype", ["float32", "uint16", "complex64"])
def test_reduce_scatter_keeps_this_ranks_part(ranks: Any, dtype: str) -> None:
    for rows in (0, 1, 100):
        ranks.run(verbs.reduce_scatter_parts, dtype, rows)
    for layout in verbs.LAYOUTS:
        ranks.run(verbs.by_meaning, dtype, layout)


def test_messages(ranks: Any) -> None:
    for count in (0, 1, 5000):
        ranks.run(verbs.ring_of_messages, count)


def test_a_message_of_another_shape_is_refused_on_both_sides(ranks: Any) -> None:
    told = ranks.run(verbs.message_of_another_shape)
    for text in told[:2]:
        assert "rank 0 called send(cupy float64 (3,), tag=" in text
        assert "rank 1 called recv(cupy float64 (4,), tag=" in text


def test_gathers_of_different_shapes_are_refused_everywhere(ranks: Any) -> None:
    told = ranks.run(verbs.all_gather_of_different_shapes)
    for text in told:
        assert "rank 0 called all_gather(cupy float64 (2, 3)) at " in text
        assert "rank 1 called all_gather(cupy float64 (2, 4)) at " in text


@on_ranks()
def test_an_array_is_let_go_when_the_device_is_done(rank: int, size: int) -> None:
    x = verbs.on_gpu(np.ones(3))
    held = weakref.ref(x)
    fl.all_reduce(x)
    fl.sync_distributed()
    del x
    assert held() is None


@on_ranks()
def test_a_closed_group_keeps_nothing_on_the_gpu(rank: int, size: int) -> None:
    """The array and the GPUs' backend are gone, uncollected, though the flight record stays."""
    x = verbs.on_gpu(np.ones(3))
    group = fl.new_group(range(size))
    gc.collect()
    gc.disable()
    fl.all_reduce(x, group=group)
    held, backend = weakref.ref(x), weakref.ref(group.backend(x))
    del x
    group.close()
    gone = held() is None, backend() is None
    gc.enable()
    assert gone == (True, True)


@on_ranks()
def test_an_out_of_another_length_is_an_error_on_its_rank(rank: int, size: int) -> None:
    """The others have begun by then: they have their result, and the group goes on."""
    x = verbs.on_gpu(np.full((1, 2), rank))
    for verb, how in ((fl.all_gather, {}), (fl.all_to_all, {"rows": [1] + [0] * (size - 1)})):
        rows = size if verb is fl.all_gather or rank == 0 else 0
        out = verbs.on_gpu(np.full((rows + (rank == 1), 2), -1))
        if rank == 1:
            with pytest.raises(ValueError, match=f"out has {rows + 1} rows, and {rows} arrived"):
                verb(x, out=out, **how)
            assert (out.get() == -1).all()
        else:
            assert verb(x, out=out, **how) is out
            assert out.get()[:, 0].tolist() == list(range(rows))


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adam"])
def test_training_equals_one_process_on_the_cpu(ranks: Any, kind: str) -> None:
    """Buckets, hooks and fused steps on arrays of a GPU; the kernels are compiled for the CPU."""
    same_as_on_the_cpu(ranks, kind)


def test_sharded_training_too(ranks: Any) -> None:
    """Parameters gathered while they are used; the layers and their ReLU share a launch."""
    same_as_on_the_cpu(ranks, "adam", True)
    test_training.test_states_are_those_of_the_whole(ranks)


def same_as_on_the_cpu(ranks: Any, kind: str, *how: bool) -> None:
    expected = test_training.train(0, 1, "cpu", kind)
    for got in ranks.run(test_training.train, "cuda", kind, *how):
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@on_ranks()
def test_joining_takes_as_long_as_in_the_group_around(rank: int, size: int) -> None:
    """Join GPUs in a group whose timeout is shorter than one rank takes to come."""
    verbs.cupy()
    with fl.new_group(range(size), timeout=0.3) as group:
        x = verbs.on_gpu(np.ones(3))
        if rank == 1:
            threading.Event().wait(1.0)
        group.all_reduce(x)
        assert (x.get() == size).all()


def rank_1_blocks(rank: int) -> dict[str, str]:
    return {"STAND_IN": "1", "NCCL_COMM_BLOCKING": str(rank)}


@on_ranks(("shm", 2), env=rank_1_blocks)
def test_waiting_without_end_is_refused_on_every_rank(rank: int, size: int) -> None:
    verbs.cupy()
    why = "rank 1: NCCL_COMM_BLOCKING=1 makes NCCL wait for ever"
    with pytest.raises(fl.errors.BackendUnavailableError, match=why):
        fl.all_reduce(verbs.on_gpu(np.ones(3)))


@pytest.mark.parametrize("name", test_hooks.TOLERANCE)
def test_communication_hooks_stay_on_the_gpu(ranks: Any, name: str) -> None:
    """The same state, the same bytes and nearly the same numbers as on the CPU."""
    for bits, worst in (told := ranks.run(test_hooks.both_ways, name)):
        assert bits == told[0][0]
        assert worst <= test_hooks.TOLERANCE[name]
