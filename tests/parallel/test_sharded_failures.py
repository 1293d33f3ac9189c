"""Ranks that get out of step with a sharded module: every rank knows, before anything is wrong."""

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded
from tests.distributed.conformance import on_ranks, ranks_in
from tests.distributed.harness import run_outcomes, run_ranks
from tests.parallel.test_sharded import Net, build, small_buckets

ranks = ranks_in(("single", 1), ("hierarchical", 4))

BACKWARD, STEP = "backward of a sharded module", "optimizer.step of a sharded module"


def one_leaves_out_a_step(rank: int, size: int) -> None:
    fully_sharded.SMALL_BYTES = 0
    model = fl.nn.Linear(3, 2)
    fl.fully_shard(model)
    optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1)
    for turn in range(3):
        optimizer.zero_grad()
        model(fl.input(np.ones((2, 3), np.float32))).mean().backward()
        if rank != 1 or turn:
            optimizer.step()


def test_a_rank_that_leaves_out_a_step_is_a_mismatch() -> None:
    world = {"params": {"BACKEND": "shm", "TIMEOUT": 20.0}}
    for outcome in run_outcomes(one_leaves_out_a_step, 3, **world):
        report = outcome.report()
        for what in ("MismatchError", BACKWARD, STEP):
            assert what in report
        assert "TornStateError" not in report


class Large(fl.nn.Module):
    """More than threads need; it takes no memory until it is written to."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.large = fl.Variable(np.zeros(16 << 20, np.float32), calc_grad=True)
        self.small = fl.Variable(np.full(3, rank, np.float32), calc_grad=True)

    def forward(self, x: Any) -> Any:
        return self.small * x


@contextlib.contextmanager
def starved(is_so: bool) -> Iterator[None]:
    """Have this process get no memory for large arrays; threads start all the same."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + (48 << 20)
    if is_so:
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def without_memory(rank: int, size: int, fails: int, again: bool) -> None:
    """A rank that gets no memory ends the call on all at once; all modules stay as they were."""
    model = Large(rank)
    if again:
        fl.fully_shard(model)
    before = [(param.data, param.placement) for param in model.params()]
    begin = time.monotonic()
    with starved(rank == fails):
        with pytest.raises(
            (fl.errors.DistributedError, OSError), match="annot allocate memory"
        ) as e:
            fl.fully_shard(model)
        assert "contextlib" not in str(e.value), (
            "the program's line, not the one of a context manager"
        )
        assert time.monotonic() - begin < 15
        kinds = MemoryError if rank == fails else fl.errors.MismatchError
        if not again and fails:
            with pytest.raises(kinds, match="Unable to allocate"):
                fl.broadcast_parameters(model)
    for param, (data, placement) in zip(model.params(), before, strict=True):
        assert param.data is data
        assert param.placement is placement
    fl.fully_shard(model)
    assert model.small.placement is not None
    assert model.small.data[0] == 0, "rank 0's"


def two_and_one(rank: int) -> dict[str, str]:
    return {"FLASHLIGHT_MEMORY_DOMAIN": str(rank == 2)}


@pytest.mark.parametrize(("fails", "env"), [(0, None), (1, two_and_one), (2, two_and_one)])
def test_a_rank_without_memory(fails: int, env: Any) -> None:
    run_ranks(without_memory, 3, fails, env is None, env=env)


@on_ranks()
def test_arrays_in_another_order_are_refused(rank: int, size: int) -> None:
    """BLAS would take another way than for the same arrays of a rank's own."""
    small_buckets()
    model = Net("float32")
    weight = model.some.weight
    for has in (rank == size - 1, True):
        if has:
            weight.array = np.asfortranarray(weight.array)
        kept = [param.data for param in model.params()]
        error = ValueError if has else fl.errors.MismatchError
        with pytest.raises(error, match=r"some\.weight has strides.*ascontiguousarray"):
            fl.fully_shard(model)
        for param, data in zip(model.params(), kept, strict=True):
            assert param.placement is None
            assert param.data is data
        weight.array = np.ascontiguousarray(weight.array)
    fl.fully_shard(model)
    assert weight.placement is not None


@on_ranks()
def test_what_cannot_be_done_with_a_sharded_module_is_refused(rank: int, size: int) -> None:
    model = build("float32", "sharded")
    for refused in (
        lambda: model.astype("float64"),
        lambda: fl.all_reduce_parameters(model),
        lambda: fl.all_reduce_gradients(model),
        lambda: fl.distribute_module_grads(model),
        lambda: fl.PeriodicAveraging(model, 2),
        lambda: fl.DistributedOptimizer(fl.optim.SGDOptimizer(model.params(), 0.1)),
        lambda: setattr(model.first.weight, "array", np.zeros((40, 30), np.float32)),
    ):
        with pytest.raises(ValueError, match="shard"):
            refused()
