"""Overlap of communication and computation without unnecessary waits.

A rank that is held back keeps a collective unfinished for as long as the test needs, so the test
measures no time.
"""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from tests.distributed.conformance import on_ranks
from tests.gpu import verbs
from tests.gpu.conftest import world

pytestmark = pytest.mark.gpu

ELEMENTS = 4 << 20


@pytest.fixture
def ranks(pool: Any) -> Any:
    return pool(2, **world(2))


def aside() -> fl.ProcessGroup:
    """Return a group whose barrier synchronises processes without GPUs; the world's barrier waits
    for GPUs.

    The world's barrier would also be compared with the pending collective.
    """
    return fl.new_group(range(2))


def warmed_up(rank: int) -> Any:
    """Return this rank's array. The first collective of a kind connects, which blocks the host."""
    x = verbs.on_gpu(np.full(ELEMENTS, rank + 1.0))
    fl.all_reduce(x.copy())
    fl.sync_distributed()
    return x


def element_of_a_product() -> float:
    cupy = verbs.cupy()
    product = cupy.ones((500, 500)) @ cupy.ones((500, 500))
    cupy.cuda.get_current_stream().synchronize()
    return float(product[0, 0].get())


@on_ranks()
def test_all_reduce_overlaps_computation_without_blocking_the_host(rank: int, size: int) -> None:
    cupy = verbs.cupy()
    x = warmed_up(rank)
    # CUDA loads a kernel at its first use, and may wait for running kernels. Here that would be a
    # deadlock: the collective waits for rank 1, and rank 1 waits for this rank.
    element_of_a_product()
    with aside() as processes:
        if rank == 1:
            processes.barrier()
            assert float(fl.all_reduce(x)[0].get()) == 3.0
            return
        work = fl.all_reduce(x, async_op=True)
        assert element_of_a_product() == 500.0  # the computation ends ...
        assert not work.is_completed()  # ... while the collective cannot have
        work.wait()  # the host goes on, and the stream does not
        after = cupy.cuda.Event(disable_timing=True)
        after.record()
        assert not after.done
        processes.barrier()
        after.synchronize()
        assert work.is_completed()
        assert float(x[0].get()) == 3.0


@on_ranks()
def test_verbs_use_the_current_stream(rank: int, size: int) -> None:
    """The array is still being written on the user's stream when the collective is called."""
    cupy = verbs.cupy()
    warmed_up(rank)
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(20):
        with stream:
            x = cupy.zeros(ELEMENTS)
            for _ in range(50):
                x += rank + 1.0
            fl.all_reduce(x)
            x *= 2.0
            assert float(x.sum().get()) == 2.0 * 50 * 3.0 * ELEMENTS


@on_ranks()
def test_backward_does_not_block_the_host_on_other_ranks(rank: int, size: int) -> None:
    """Rank 1 is held back before its pass, and rank 0's host completes its pass."""
    verbs.cupy()
    device = fl.distributed.use_local_device()
    fl.set_seed(0)
    model = fl.nn.Sequential(*(fl.nn.Linear(1500, 1500, dtype="float64") for _ in range(4)))
    model.to(device)
    fl.distribute_module_grads(model)
    x = fl.input(verbs.on_gpu(np.full((8, 1500), rank + 1.0)))
    with aside() as processes:
        for hold in (False, True):  # the first pass connects
            if hold and rank == 1:
                processes.barrier()
            for parameter in model.params():
                parameter.grad = None
            F.sum(model(x) * model(x)).backward()
            if hold and rank == 0:
                processes.barrier()  # a pass that waits for rank 1 would never reach this line
    first: Any = model.params()[0].grad
    copied = first.copy()
    fl.broadcast(copied, root=0)
    np.testing.assert_array_equal(first.get(), copied.get())
