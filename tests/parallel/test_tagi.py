"""TAGI on several ranks equals TAGI on one rank with all samples; rewrapped networks."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.doctor import mpirun_command
from flashlight_py.tagi import (
    LSTM,
    BatchNorm2d,
    Conv2d,
    DDPConfig,
    DDPSequential,
    LayerBlock,
    Linear,
    MixtureReLU,
    OutputUpdater,
    ReLU,
    ResNetBlock,
    Sequential,
)
from tests.distributed.conformance import on_ranks, ranks_in
from tests.launch.launcher import run, write
from tests.tables import for_each, pairs

BACKENDS = ["gloo", "shm"]
ranks = ranks_in(
    *(("single", 1), ("gloo", 3), ("shm", 2)), slow=[("shm", 4), ("hierarchical", 4), ("mpi", 3)]
)
TRAIN = 10  # steps
# Samples of each rank, in turn: the second batch is smaller, and some ranks get no sample.
SHARES = {
    1: [(7,), (3,)],
    2: [(4, 3), (2, 0)],
    3: [(3, 3, 1), (0, 2, 1)],
    4: [(2, 2, 2, 1), (1, 1, 1, 0)],
}


def dense() -> Sequential:
    return Sequential(Linear(6, 16), ReLU(), Linear(16, 16), ReLU(), Linear(16, 3))


def residual() -> Sequential:
    """Return nested blocks of layers, which pytagi's DDP leaves out."""
    inner = ResNetBlock(LayerBlock(Linear(8, 8), ReLU(), Linear(8, 8)))
    outer = ResNetBlock(LayerBlock(Linear(6, 8), ReLU(), inner), LayerBlock(Linear(6, 8)))
    return Sequential(outer, ReLU(), Linear(8, 3))


def convolutional() -> Sequential:
    """Return LSTM, convolutions and dense layers for images of 3 x 2 pixels."""
    return Sequential(
        Conv2d(1, 4, 2, in_width=3, in_height=2),
        MixtureReLU(),
        Linear(8, 8),
        LSTM(4, 3, 2),
        Linear(6, 3),
    )


def normalised() -> Sequential:
    return Sequential(Linear(6, 16), BatchNorm2d(16), ReLU(), Linear(16, 3), BatchNorm2d(3))


def batch(step: int, samples: int) -> tuple[Any, Any]:
    random = np.random.default_rng(step)
    x = random.standard_normal((samples, 6), np.float32)
    return x, np.tanh(x @ random.standard_normal((6, 3), np.float32))


def train(
    model: Any, steps: range, share: Callable[[int], slice], total: Callable[[int], int]
) -> None:
    updater = OutputUpdater("cpu")
    for step in steps:
        x, y = (array[share(step)] for array in batch(step, total(step)))
        model(x)
        updater.update(model.output_z_buffer, y, 0.3, model.input_delta_z_buffer)
        model.backward()
        model.step()


def shares(rank: int, size: int, step: int) -> slice:
    counts = SHARES[size][step % 2]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def total(size: int, step: int) -> int:
    return sum(SHARES[size][step % 2])


def alone(make: Callable[[], Sequential], size: int, steps: int = TRAIN) -> Any:
    """Train in one process with all samples, starting like rank 0."""
    fl.set_seed(0)
    net = make()
    train(net, range(steps), lambda _: slice(None), lambda step: total(size, step))
    return net.state_dict()


def together(rank: int, size: int, make: Callable[[], Sequential], options: dict[str, Any]) -> Any:
    fl.set_seed(rank)  # like pytagi's examples: every rank draws other parameters
    model = DDPSequential(make(), average=False, **options)
    train(
        model, range(TRAIN), lambda step: shares(rank, size, step), lambda step: total(size, step)
    )
    return model.state_dict()


def check_same_bits(states: list[Any]) -> None:
    for state in states[1:]:
        for name, arrays in states[0].items():
            for one, other in zip(arrays, state[name], strict=True):
                assert one.tobytes() == other.tobytes(), name


def check_close(state: Any, expected: Any, tolerance: float = 1e-6) -> None:
    assert list(state) == list(expected)
    for name, arrays in expected.items():
        for one, other in zip(state[name], arrays, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (residual, {}),
        (residual, {"bucket_bytes": 1}),
        (convolutional, {"bucket_bytes": 1500}),
        (normalised, {"sync": True}),
    ],
)
def test_ranks_train_like_one_process(
    ranks: Any, make: Callable[[], Sequential], options: dict[str, Any]
) -> None:
    states = ranks.run(together, make, options)
    check_same_bits(states)
    check_close(states[0], alone(make, len(states)), 2e-6)


@on_ranks(("shm", 2))
def test_local_statistics_differ_until_they_are_averaged(rank: int, size: int) -> None:
    model = DDPSequential(normalised(), average=False)
    train(model, range(3), lambda step: shares(rank, size, step), lambda step: total(size, step))
    first, second = fl.all_gather_object(model.state_dict()["BatchNorm2d.1"])
    model.average_statistics()
    means = model.state_dict()["BatchNorm2d.1"]
    for statistic, other in zip(first[:4], second[:4], strict=True):
        np.testing.assert_array_equal(statistic, other)  # parameters
    for statistic, other, mean in zip(first[4:], second[4:], means[4:], strict=True):
        assert not np.array_equal(statistic, other)
        np.testing.assert_allclose(mean, (statistic + other) / 2, rtol=1e-6)
        np.testing.assert_array_equal(*fl.all_gather_object(mean))


@on_ranks(("shm", 2))
def test_averages_equal_pytagi(rank: int, size: int) -> None:
    """Sums over all samples are divided by the number of ranks, with and without config."""
    sums = []
    for average in (False, True):
        fl.set_seed(0)
        model = DDPSequential(dense(), average=average)
        train(model, range(1), lambda _: slice(3 * rank, 3 * rank + 3), lambda _: 3 * size)
        sums.append([bucket.sums[: 2 * bucket.size].copy() for bucket in model.model.buckets])
    for total, mean in zip(*sums, strict=True):
        np.testing.assert_allclose(mean, total / 2, rtol=1e-5, atol=1e-9)
    check_same_bits(fl.all_gather_object(model.state_dict()))


@on_ranks(("shm", 2))
@for_each("samples bound wrapped", [(255, 2.0, True), (256, 3.0, True), (256, 3.0, False)])
def test_step_bound_uses_the_samples_of_all_ranks(
    rank: int, size: int, samples: int, bound: float, wrapped: bool
) -> None:
    """The bound is the number of standard deviations by which a step moves a weight.

    It is the same for a step of the network itself, and after an evaluation.
    """
    fl.set_seed(0)
    model = DDPSequential(Sequential(Linear(6, 3, gain_weight=0.01)), average=False)
    before = model.state_dict()["Linear.0"]
    half = samples // 2
    share = slice(0, half) if rank == 0 else slice(half, samples)
    updater = OutputUpdater("cpu")
    x, y = (array[share] for array in batch(0, samples))
    model(x)
    updater.update(model.output_z_buffer, 1000 * y, 1e-6, model.input_delta_z_buffer)
    model.backward()
    if not wrapped:
        model.eval()
        model(np.ones((3, 6)))  # not part of a step
    (model if wrapped else model.model).step()
    moved = np.abs(model.state_dict()["Linear.0"][0] - before[0])
    result = float((moved / np.sqrt(before[1])).max())
    assert result == pytest.approx(1 / bound, rel=1e-2)
    check_same_bits(fl.all_gather_object(model.state_dict()))


def joined(rank: int, size: int, schedule: tuple[int, ...], average: bool, sync: bool) -> Any:
    fl.set_seed(rank)
    model = DDPSequential(normalised() if sync else dense(), average=average, sync=sync)
    with fl.join(model):
        train(
            model,
            range(schedule[rank]),
            lambda _: slice(3 * rank, 3 * rank + 3),
            lambda _: 3 * size,
        )
    return model.state_dict()


def joined_alone(schedule: tuple[int, ...], make: Callable[[], Sequential]) -> Any:
    fl.set_seed(0)
    net, updater = make(), OutputUpdater("cpu")
    for step in range(max(schedule)):
        x, y = batch(step, 3 * len(schedule))
        rows = [
            row
            for rank, steps in enumerate(schedule)
            for row in range(3 * rank, 3 * rank + 3)
            if step < steps
        ]
        net(x[rows])
        updater.update(net.output_z_buffer, y[rows], 0.3, net.input_delta_z_buffer)
        net.backward()
        net.step()
    return net.state_dict()


JOINED = pairs(BACKENDS, (False, True), [(4, 2), (0, 3), (2, 2), (3, 1, 0)])


@pytest.mark.parametrize(("backend", "sync", "schedule"), JOINED)
def test_ddp_sequential_works_with_join(
    pool: Any, backend: str, schedule: tuple[int, ...], sync: bool
) -> None:
    world = pool(len(schedule), params={"BACKEND": backend})
    states = world.run(joined, schedule, False, sync)
    check_same_bits(states)
    check_close(states[0], joined_alone(schedule, normalised if sync else dense), 2e-6)


def test_join_averages_over_the_ranks_with_data(pool: Any) -> None:
    """With one rank left, the averages are its own sums."""
    states = pool(2).run(joined, (0, 3), True, False)
    check_same_bits(states)
    check_close(states[0], joined_alone((0, 3), dense))


@on_ranks(("shm", 2))
def test_mismatch_error_names_the_layer_or_argument(rank: int, size: int) -> None:
    net = Sequential(Linear(6, 16), ReLU(), Linear(16, 3 + rank))
    with pytest.raises(fl.errors.MismatchError) as caught:
        DDPSequential(net)
    message = str(caught.value)
    assert "the networks differ in layer 2 (rank(s) 0: Linear.2: (3, 16)" in message
    assert "rank(s) 1: Linear.2: (4, 16)" in message
    fl.barrier()
    with pytest.raises(fl.errors.MismatchError, match=r"average \("):
        DDPSequential(dense(), average=rank == 0)
    fl.barrier()


@on_ranks(("shm", 2))
def test_ddp_sequential_raises_for_misuse_before_it_sends(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match=r"expected a fl\.tagi\.Sequential, got Linear"):
        DDPSequential(Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_bytes must be positive"):
        DDPSequential(dense(), bucket_bytes=0)
    with pytest.raises(ValueError, match="expected a network with parameters"):
        DDPSequential(Sequential(ReLU()))
    with pytest.raises(ValueError, match="got rank 5 of 9"):
        DDPSequential(dense(), DDPConfig(rank=5, world_size=9))
    with pytest.raises(ValueError, match="must be empty or have one entry per rank, got"):
        DDPSequential(dense(), DDPConfig([0]))  # raises on every rank
    with pytest.raises(ValueError, match="backend must be one of"):
        DDPConfig(backend="pigeon")
    model = DDPSequential(dense(), DDPConfig(rank=rank, world_size=size), average=False)
    with pytest.raises(RuntimeError, match="no deltas since the last forward pass"):
        model.backward()
    model.eval()
    model(np.ones((2, 6)))
    model.train()
    model(np.ones((2, 6)))
    with pytest.raises(ValueError, match=r"mu_obs: expected shape \(2, 3\)"):
        OutputUpdater().update(model.output_z_buffer, np.ones(5), 0.1, model.input_delta_z_buffer)
    model.model.to_device("cpu")
    OutputUpdater().update(model.output_z_buffer, np.ones(6), 0.1, model.input_delta_z_buffer)
    with pytest.raises(RuntimeError, match="moved after DDPSequential was created"):
        model.backward()
    model.barrier()


def interrupted(rank: int, size: int, folder: str, first: int, last: int) -> Any:
    fl.set_seed(100 + rank)
    model = DDPSequential(residual(), average=False)
    if first:
        assert fl.load(folder, model) is not None
    rows = slice(12 // size * rank, 12 // size * (rank + 1))
    train(model, range(first, last), lambda _: rows, lambda _: 12)
    if not first:
        fl.save(folder, model, step=last)
    return model.state_dict()


def test_training_continues_with_another_number_of_ranks(pool: Any, tmp_path: Path) -> None:
    unbroken = pool(1).run(interrupted, str(tmp_path / "whole"), 0, 6)
    pool(2).run(interrupted, str(tmp_path / "half"), 0, 3)
    for size in (1, 3):
        states = pool(size).run(interrupted, str(tmp_path / "half"), 3, 6)
        check_same_bits(states)
        check_close(states[0], unbroken[0], 2e-6)


@on_ranks(("shm", 2))
def test_networks_are_compared_by_settings_not_by_values(rank: int, size: int) -> None:
    for stride in (1, 2):
        net = Sequential(Conv2d(1, 2, 2, stride=stride if rank else 1), Linear(4, 2))
        if rank == 0:
            net(np.zeros((1, 1, 3, 2)))
        if stride == 1:
            DDPSequential(net)
            continue
        with pytest.raises(fl.errors.MismatchError, match=r"stride=1(.|\n)*stride=2"):
            DDPSequential(net)


@on_ranks(("shm", 2))
def test_network_can_be_wrapped_again_without_sync(rank: int, size: int) -> None:
    fl.set_seed(rank)
    net = normalised()
    DDPSequential(net, sync=True)
    model = DDPSequential(net, average=False)
    with fl.join(model):  # the first wrapper would send statistics that no rank expects
        train(model, range(2 + rank), lambda step: slice(rank, rank + 2), lambda _: 4)
    check_same_bits(fl.all_gather_object(model.state_dict()))


@on_ranks(("shm", 2))
def test_backward_of_a_wrapped_network_raises(rank: int, size: int) -> None:
    """Its sums would cover this rank only, and the ranks' parameters would diverge."""
    fl.set_seed(rank)
    net = dense()
    DDPSequential(net, average=False)
    unwrapped = copy.deepcopy(net)  # the copy is not wrapped
    train(unwrapped, range(1), lambda _: slice(rank, rank + 2), lambda _: 4)
    net(np.ones((2, 6)))
    OutputUpdater().update(net.output_z_buffer, np.ones(6), 0.1, net.input_delta_z_buffer)
    with pytest.raises(RuntimeError, match="a DDPSequential wraps this network"):
        net.backward()
    one, other = fl.all_gather_object(unwrapped.state_dict()["Linear.0"][0])
    assert not np.array_equal(one, other)


@on_ranks(("shm", 2), fresh=True, init=None)
def test_network_wrapped_before_init_raises(rank: int, size: int, tmp_path: Path) -> None:
    model = DDPSequential(dense())
    fl.distributed_init(
        fl.DistributedInit.FILE_SYSTEM, rank, size, params={"FILE_PATH": str(tmp_path)}
    )
    with pytest.raises(RuntimeError, match=r"expected 1 ranks, as when .* got 2"):
        train(model, range(1), lambda _: slice(None), lambda _: 4)
    fl.distributed_shutdown()


class Trap(fl.tagi.ReLU):
    """A layer that can raise in its backward pass."""

    fails = False

    def backward(self, *args: Any) -> Any:
        if self.fails:
            raise ValueError("on purpose amid them")
        return super().backward(*args)


@on_ranks(("gloo", 3), ("shm", 3), ("hierarchical", 4), slow=[("mpi", 3)])
def test_failed_backward_raises_on_all_ranks(rank: int, size: int) -> None:
    fl.set_seed(0)
    trap = Trap()
    net = fl.tagi.Sequential(fl.tagi.Linear(3, 8), trap, fl.tagi.Linear(8, 8), fl.tagi.Linear(8, 2))
    model, updater = fl.tagi.DDPSequential(net, bucket_bytes=300), fl.tagi.OutputUpdater("cpu")
    for failing_rank, words in ((None, ""), (1, "no deltas"), (0, "on purpose"), (None, "")):
        model(np.full((4, 3), 1.0 + rank, np.float32))
        if rank != failing_rank or words != "no deltas":
            targets = np.ones((4, 2), np.float32)
            updater.update(model.output_z_buffer, targets, 0.3, model.input_delta_z_buffer)
        trap.fails = rank == failing_rank
        if failing_rank is None:
            model.backward()
            model.step()
            continue
        error = (ValueError, RuntimeError) if rank == failing_rank else fl.errors.MismatchError
        with pytest.raises(error, match=words):
            model.backward()
        trap.fails = False
    parameters = np.concatenate([x.ravel() for entry in net.state_dict().values() for x in entry])
    assert (fl.all_gather(parameters[None]) == parameters).all()


SCRIPT_OF_PYTAGI = """
import numpy as np
from mpi4py import MPI
import flashlight_py.tagi as pytagi
from flashlight_py.tagi.nn import DDPConfig, DDPSequential, Linear, OutputUpdater, Sequential

comm = MPI.COMM_WORLD
rank, world_size = comm.Get_rank(), comm.Get_size()
pytagi.manual_seed(42 + rank)
config = DDPConfig(device_ids=[], backend="nccl", rank=rank, world_size=world_size)
model = DDPSequential(Sequential(Linear(4, 2)), config, average=True)
model(np.full(8, rank + 1, np.float32))
OutputUpdater(model.get_device_with_index()).update(
    model.output_z_buffer, np.ones(4), np.full(4, 0.1), model.input_delta_z_buffer
)
model.backward()
model.step()
model.barrier()
weights = comm.gather(model.model.state_dict()["Linear.0"][0].tobytes(), root=0)
if rank == 0:
    print("equal" if len(set(weights)) == 1 else "apart")
"""


@pytest.mark.slow
def test_pytagi_script_runs_with_our_imports(tmp_path: Path) -> None:
    """The script uses MPI without distributed_init; its config contains the number of ranks."""
    pytest.importorskip("mpi4py")
    script = write(tmp_path, SCRIPT_OF_PYTAGI)
    done = run([*mpirun_command(2), sys.executable, "-W", "error", script])
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
