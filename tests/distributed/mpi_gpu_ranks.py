"""What runs on the ranks in the tests of CuPy arrays through MPI, with a stand-in for CuPy."""

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import ALL_TO_ALL, GATHER, RECV, SCATTER
from tests.cupy_stand_in import LOG, StandInArray
from tests.distributed.conformance import values
from tests.gpu.verbs import on_gpu


def every_move(rank: int, size: int, name: str, rows: int) -> None:
    """The verbs that move arrays and are not in ``tests.gpu.verbs``."""
    mine = on_gpu(np.zeros(1))
    backend = current_world().group.backend(mine)
    everyone = [values(r, (size * rows, 3), name) for r in range(size)]
    part = slice(rank * rows, (rank + 1) * rows)
    for root in range(size):
        whole = backend.start(Call(GATHER, on_gpu(everyone[rank]), root=root)).wait()
        assert (whole is None) == (rank != root)
        if whole is not None:
            np.testing.assert_array_equal(whole.get(), np.concatenate(everyone))
        given = on_gpu(everyone[root].reshape(size, rows, 3)) if rank == root else None
        into = on_gpu(np.zeros((rows, 3), everyone[0].dtype))
        assert backend.start(Call(SCATTER, given, root=root, out=into)).wait() is into
        np.testing.assert_array_equal(into.get(), everyone[root][part])
    got = backend.start(Call(ALL_TO_ALL, on_gpu(everyone[rank]))).wait()
    expected = np.concatenate([x[part] for x in everyone])
    np.testing.assert_array_equal(got.get(), expected)
    got = backend.start(Call(ALL_TO_ALL, on_gpu(everyone[rank]), rows=[rows] * size)).wait()
    np.testing.assert_array_equal(got.get(), expected)
    assert isinstance(got, StandInArray)


def how_it_goes(rank: int, size: int) -> tuple[str, str, list[tuple[str, ...]]]:
    """One all_reduce: its backend, what describe says, and what was done to the GPU for it."""
    x = on_gpu(np.full(1000, 1.0))
    LOG.clear()
    fl.all_reduce(x)
    assert np.all(x.get() == size)
    log = [entry for entry in LOG if entry[0] != "record"]
    return fl.distributed_backend(x).name, fl.distributed.describe(), log


def brought_home_unasked(rank: int, size: int) -> None:
    x = on_gpu(np.full(1000, float(rank)))
    fl.all_reduce(x, async_op=True)
    fl.sync_distributed()
    assert np.all(x.get() == sum(range(size)))


def fail_unnoticed(rank: int, size: int) -> None:
    for _ in range(3):
        fl.all_reduce(on_gpu(np.ones(3 + rank)), async_op=True)
    for _ in range(3):
        with pytest.raises(fl.errors.MismatchError):
            fl.sync_distributed()
    fl.sync_distributed()


def receive_openly(rank: int, size: int) -> None:
    """From any rank, and fewer rows than there is room for."""
    if rank:
        fl.send(on_gpu(np.full((rank, 2), float(rank))), 0, tag=4)
        return
    seen = set()
    for _ in range(size - 1):
        x = on_gpu(np.zeros((size, 2)))
        backend = current_world().group.backend(x)
        found = backend.start(Call(RECV, x, tag=4, partial=True)).wait()
        assert x.get()[: found.rows].tolist() == [[found.source] * 2] * found.source
        assert not x.get()[found.rows :].any()
        seen.add(found.source)
    assert seen == set(range(1, size))
