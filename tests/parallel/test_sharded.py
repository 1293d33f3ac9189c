"""One model per host: training equals data-parallel training, with one copy of all state."""

import contextlib
import gc
import mmap
import resource
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.api.memory import hosts_of
from flashlight_py.optim import optimizer as clipping
from flashlight_py.parallel import fully_sharded, shard_memory
from tests.distributed.conformance import hosts_by_letter, on_ranks, ranks_in
from tests.distributed.harness import run_ranks

HOSTS = [("hierarchical", 4, {"env": hosts_by_letter(places)}) for places in ("aaab", "abba")]
ranks = ranks_in(("shm", 3), slow=[("gloo", 3), ("hierarchical", 4), ("mpi", 3), *HOSTS])

BATCH, STEPS = 8, 3


class Net(fl.nn.Module):
    """A layer used twice, a layer that some ranks use, an unused layer, and a buffer."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.first = fl.nn.Linear(30, 40)
        self.twice = fl.nn.Linear(40, 40)
        self.some = fl.nn.Linear(40, 40)
        self.never = fl.nn.Linear(40, 7)
        self.last = fl.nn.Linear(40, 5)
        self.frozen = fl.nn.Linear(5, 5)
        self.astype(dtype)
        self.add_buffer("seen", np.zeros(1))
        for param in self.frozen.params():
            param.calc_grad = False

    def forward(self, x: Any, uses: bool = True) -> Any:
        relu = fl.autograd.functions.relu
        x = relu(self.twice(relu(self.twice(relu(self.first(x))))))
        return self.frozen(self.last(relu(self.some(x)) if uses else x))


def small_buckets() -> None:
    """Lower the limits so that parameters of a few kilobytes count as large."""
    shard_memory.LEAST_BYTES = shard_memory.MOST_BYTES = 4096
    fully_sharded.SMALL_BYTES = 0


def build(dtype: Any, kind: str, **options: Any) -> Net:
    small_buckets()
    fl.set_seed(0 if fl.get_world_rank() == 0 else 99)
    model = Net(dtype)
    fl.broadcast_parameters(model)
    if kind == "sharded":
        fl.fully_shard(model, **options)
    else:
        fl.distribute_module_grads(model)
    return model


def optimizer_of(model: Any, rule: str) -> Any:
    if rule == "adam":
        return fl.optim.AdamOptimizer(model.params(), 0.01, weight_decay=0.1)
    return fl.optim.SGDOptimizer(model.params(), 0.05, momentum=0.9)


def loss_of(model: Any, rank: int, step: int, uses: bool = True) -> Any:
    random = np.random.default_rng(100 * step + rank)
    dtype = model.first.weight.dtype
    x = random.standard_normal((BATCH, 30)).astype(dtype)
    y = random.standard_normal((BATCH, 5)).astype(dtype)
    return fl.nn.MeanSquaredError()(model.forward(fl.input(x), uses), fl.no_grad(y))


def train(rank: int, size: int, kind: str, dtype: str, rule: str, **options: Any) -> Any:
    model = build(dtype, kind, **options)
    optimizer, losses = optimizer_of(model, rule), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step, uses=rank != 0 or step != 1)
        loss.backward()
        losses.append(loss.scalar())
        optimizer.step()
    fl.barrier()
    state = optimizer.state_dict()
    states = [entry for name in state.keys() - {"lr"} for entry in state[name]]
    return losses, [param.array.copy() for param in model.params()], states


def same(got: Any, expected: Any) -> None:
    for array, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=0, atol=1e-12)


@on_ranks(("shm", 3), ("hierarchical", 4), slow=[("gloo", 3), ("mpi", 3), *HOSTS])
def test_sharded_training_equals_data_parallel_training(rank: int, size: int) -> None:
    one_host = len(hosts_of(fl.distributed.start.world.current_world().group)) == 1
    for dtype, rule in (("float64", "adam"), ("float16", "adam"), ("bfloat16", "sgd")):
        expected = train(rank, size, "plain", dtype, rule)
        for across in (False, True):
            got = train(rank, size, "sharded", dtype, rule, across_hosts=across)
            for result, reference in zip(got, expected, strict=True) if dtype == "float64" else ():
                same(result, reference)
            if one_host and fl.distributed_backend() is not fl.DistributedBackend.MPI:
                assert got[0] == expected[0], "the same bits"
                assert all(map(np.array_equal, got[1], expected[1])), "the same bits"


@on_ranks(("hierarchical", 4), slow=HOSTS)
def test_ranks_of_a_host_share_one_copy(rank: int, size: int) -> None:
    """All ranks of a host see a write; gradients of unused parameters are None."""
    model = build("float32", "sharded")
    hosts = hosts_of(fl.distributed.start.world.current_world().group)
    home = next(host for host in hosts if rank in host)
    loss_of(model, rank, 0).backward()
    assert model.never.weight.grad is None
    assert model.frozen.weight.grad is None
    assert model.first.weight.shape == (40, 30)
    fl.barrier()
    if rank == home[0]:
        model.last.bias.data[0] = model.last.bias.grad[0] = 7.0 + rank
    fl.barrier()
    assert model.last.bias.data[0] == model.last.bias.grad[0] == 7.0 + home[0]


@on_ranks()
def test_clip_grad_norm_finishes_on_all_ranks_before_a_rank_continues(rank: int, size: int) -> None:
    """The last rank scales its part when rank 0 has read the gradients, or must wait."""
    model = build("float64", "sharded")
    loss_of(model, rank, 0).backward()
    message, works, scale = np.zeros(1), [], clipping._scale

    def late(grads: Any, factor: float) -> None:
        if rank == size - 1 > 0:
            works.append(fl.irecv(message, src=0))
            with contextlib.suppress(fl.errors.CollectiveTimeoutError):
                works[0].wait(timeout=0.2)
            clipping._scale = scale
        scale(grads, factor)

    clipping._scale = late
    try:
        assert fl.optim.clip_grad_norm(model.params(), 0.1) > 0.1
        read = sum(float(np.vdot(p.grad, p.grad)) for p in model.params() if p.grad is not None)
    finally:
        clipping._scale = scale
    if rank == 0 and size > 1:
        fl.send(message, dst=size - 1)
    for work in works:
        work.wait()
    np.testing.assert_allclose(read, 0.01)
    np.testing.assert_allclose(fl.optim.clip_grad_norm(model.params(), 0.1), 0.1)


@on_ranks()
def test_clip_grad_value_limits_gradients_on_all_ranks(rank: int, size: int) -> None:
    results = []
    for name in ("plain", "sharded"):
        model = build("float64", name)
        loss_of(model, rank, 0).backward()
        fl.optim.clip_grad_value(model.params(), 1e-3)
        results.append([p.grad.copy() for p in model.params() if p.grad is not None])
        fl.barrier()
    same(*results)
    assert max(np.abs(grad).max() for grad in results[0]) == 1e-3


@on_ranks(("shm", 3))
def test_another_thread_can_evaluate_during_a_step(rank: int, size: int) -> None:
    """A thread of the last rank starts to evaluate in the middle of a step."""
    model = build("float32", "sharded")
    optimizer, x = optimizer_of(model, "sgd"), fl.input(np.ones((2, 30), np.float32))
    step, results = optimizer._step_pieces, []
    loss_of(model, rank, 0).backward()
    model.eval()

    def amid(*args: Any) -> Any:
        if not results and rank == size - 1:
            results.append(pool.submit(model, x))
            wait(results, 0.1)
        return step(*args)

    with ThreadPoolExecutor(1) as pool:
        optimizer._step_pieces = amid
        optimizer.step()
    for result in results:
        assert np.array_equal(result.result().array, model(x).array)


def joined(rank: int, size: int, kind: str) -> Any:
    model = build("float64", kind)
    optimizer = optimizer_of(model, "sgd")
    with fl.join(model, optimizer) as join:
        for step in range(1 + rank):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            join.count(BATCH - rank)
            loss.backward()
            optimizer.step()
    return [p.array.copy() for p in model.params()]


@on_ranks()
def test_sharded_module_works_with_join(rank: int, size: int) -> None:
    same(joined(rank, size, "sharded"), joined(rank, size, "plain"))


@on_ranks(("shm", 2), slow=[("hierarchical", 4)])
def test_large_gradient_is_never_stored_in_full(rank: int, size: int) -> None:
    small_buckets()
    model = fl.nn.Linear(300, 400)
    fl.fully_shard(model)
    seed = np.ones((2, 400), np.float32)
    for _ in range(2):
        result = model(fl.input(np.ones((2, 300), np.float32)))
        tracemalloc.start()
        result.backward(seed)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < model.weight.data.nbytes / 4


def resident() -> int:
    """Return the resident memory of this process in bytes, including mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":") for line in lines if line.startswith("Rss"))
    return sum(int(size.split()[0]) << 10 for size in sizes.values())


@on_ranks(("shm", 2))
def test_fully_shard_moves_parameters_one_by_one(rank: int, size: int) -> None:
    """Each array is freed when its values have moved, and nothing is copied."""
    small_buckets()
    model = fl.nn.Sequential(*[fl.nn.Linear(1024, 1024, bias=False) for _ in range(6)])
    one = model[0].weight.data.nbytes
    results: list[int] = []
    gc.collect()
    for param in model.params():
        # outside of the heap, so that it is freed at once
        private = np.frombuffer(mmap.mmap(-1, one), np.float32).reshape(1024, 1024)
        private[...] = param.data
        weakref.finalize(private, lambda: results.append(resident()))
        param.data = private
    del private
    before = resident()
    tracemalloc.start()
    fl.fully_shard(model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < one
    assert len(results) == 6, "nobody else has them"
    assert max(results) < before + 3 * one, "of six"


BACKWARD, STEP = "backward of a sharded module", "optimizer.step of a sharded module"


@on_ranks(("shm", 3), fresh=True)
def test_skipped_step_on_one_rank_raises_mismatch_error(rank: int, size: int) -> None:
    fully_sharded.SMALL_BYTES = 0
    model = fl.nn.Linear(3, 2)
    fl.fully_shard(model)
    optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1)

    def one_pass() -> None:
        optimizer.zero_grad()
        model(fl.input(np.ones((2, 3), np.float32))).mean().backward()

    one_pass()
    with pytest.raises(fl.errors.MismatchError) as caught:
        one_pass() if rank == 1 else optimizer.step()
    assert BACKWARD in str(caught.value)
    assert STEP in str(caught.value)


class Large(fl.nn.Module):
    """A size larger than threads need; memory is only used when it is written to."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.large = fl.Variable(np.zeros(16 << 20, np.float32), calc_grad=True)
        self.small = fl.Variable(np.full(3, rank, np.float32), calc_grad=True)

    def forward(self, x: Any) -> Any:
        return self.small * x


@contextlib.contextmanager
def starved(is_so: bool) -> Iterator[None]:
    """Let this process allocate no large arrays, while threads can still start."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + (48 << 20)
    if is_so:
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


MEMORY = [(0, ""), (1, "aab")]  # of the slow tests: rank that has no memory, and host of each rank


def without_memory(rank: int, size: int, fails: int, again: bool) -> None:
    """Check that all ranks raise if one cannot allocate, and that no module has changed."""
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


@pytest.mark.parametrize(
    ("fails", "places"), [(2, "aab"), *(pytest.param(*c, marks=pytest.mark.slow) for c in MEMORY)]
)
def test_fully_shard_raises_on_all_ranks_if_one_has_no_memory(fails: int, places: str) -> None:
    env = hosts_by_letter(places) if places else None
    run_ranks(without_memory, 3, fails, env is None, env=env)


@on_ranks(("single", 1), slow=[("hierarchical", 4)])
def test_fully_shard_raises_value_error_for_fortran_order(rank: int, size: int) -> None:
    """BLAS would use another algorithm than for a rank's own array."""
    small_buckets()
    model = Net("float32")
    weight = model.some.weight
    for has in (rank == size - 1, True):
        if has:
            weight.array = np.asfortranarray(weight.array)
        kept = [param.data for param in model.params()]
        error = ValueError if has else fl.errors.MismatchError
        words = r"some\.weight .* must be" + has * " .*, got strides .*ascontiguousarray"
        with pytest.raises(error, match=words):
            fl.fully_shard(model)
        for param, data in zip(model.params(), kept, strict=True):
            assert param.placement is None
            assert param.data is data
        weight.array = np.ascontiguousarray(weight.array)
    fl.fully_shard(model)
    assert weight.placement is not None


@on_ranks(("single", 1), ("shm", 3))
def test_unsupported_operations_on_a_sharded_module_raise(rank: int, size: int) -> None:
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
