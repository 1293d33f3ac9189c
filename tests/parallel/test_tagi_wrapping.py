"""What DDPSequential makes of a network, and when the network must be wrapped anew."""

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.tagi import Conv2d, DDPSequential, Linear, OutputUpdater, Sequential
from tests.distributed.conformance import on_ranks, ranks_in
from tests.distributed.harness import RankPool, mpirun_command
from tests.launch.launcher import run, write
from tests.parallel.test_tagi import check_same_bits, dense, normalised, train

ranks = ranks_in(("gloo", 3), ("shm", 3), ("hierarchical", 4), slow=[("mpi", 3)])


@on_ranks(("shm", 2))
def test_networks_differ_by_their_settings_not_by_what_they_have_seen(rank: int, size: int) -> None:
    for stride in (1, 2):
        net = Sequential(Conv2d(1, 2, 2, stride=stride if rank else 1), Linear(4, 2))
        if rank == 0:
            net(np.zeros((1, 1, 3, 2)))
        if stride == 1:
            DDPSequential(net)
            continue
        with pytest.raises(fl.errors.MismatchError, match=r"stride=1(.|\n)*stride=2"):
            DDPSequential(net)


def wrapped_twice(rank: int, size: int) -> Any:
    fl.set_seed(rank)
    net = normalised()
    DDPSequential(net, sync=True)
    model = DDPSequential(net, average=False)
    with fl.join(model):  # messages of the first one's statistics would have no answer
        train(model, range(2 + rank), lambda step: slice(rank, rank + 2), lambda _: 4)
    return model.state_dict()


def test_a_network_may_be_wrapped_again_without_sync(pool: Any) -> None:
    check_same_bits(pool(2).run(wrapped_twice))


def passed_by(rank: int, size: int) -> Any:
    fl.set_seed(rank)
    net = dense()
    DDPSequential(net, average=False)
    own = copy.deepcopy(net)  # is no part of it
    train(own, range(1), lambda _: slice(rank, rank + 2), lambda _: 4)
    net(np.ones((2, 6)))
    OutputUpdater().update(net.output_z_buffer, np.ones(6), 0.1, net.input_delta_z_buffer)
    with pytest.raises(RuntimeError, match="trained by a DDPSequential; call its backward"):
        net.backward()
    return own.state_dict()


def test_the_network_s_own_backward_pass_is_refused(pool: Any) -> None:
    """Its sums would be this rank's alone, and the ranks' parameters differ from then on."""
    one, other = pool(2).run(passed_by)
    assert not np.array_equal(one["Linear.0"][0], other["Linear.0"][0])


def wrapped_too_early(rank: int, size: int, folder: str) -> str:
    model = DDPSequential(dense())
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params={"FILE_PATH": folder})
    with pytest.raises(RuntimeError, match="there are 2 ranks, and there were 1") as caught:
        train(model, range(1), lambda _: slice(None), lambda _: 4)
    fl.distributed_shutdown()
    return str(caught.value)


def test_a_network_that_was_wrapped_before_there_were_ranks_is_refused(tmp_path: Path) -> None:
    with RankPool(2, init=None) as ranks:
        ranks.run(wrapped_too_early, str(tmp_path))


def stepped_by_the_network(rank: int, size: int) -> Any:
    fl.set_seed(rank)
    model = DDPSequential(dense(), average=False)
    x = np.linspace(-1, 1, 18).reshape(3, 6)[rank : 2 * rank + 1]  # 1 sample, and 2
    model(x)
    OutputUpdater().update(
        model.output_z_buffer, np.ones(3 * len(x)), 0.1, model.input_delta_z_buffer
    )
    model.backward()
    model.eval()
    model(np.ones((300, 6)))  # nothing of a step
    model.model.step()
    return model.state_dict()


def test_the_network_s_own_step_has_the_bound_of_all_samples(pool: Any) -> None:
    check_same_bits(pool(2).run(stepped_by_the_network))


class Trap(fl.tagi.ReLU):
    """A layer that can raise on its way back."""

    fails = False

    def backward(self, *args: Any) -> Any:
        if self.fails:
            raise ValueError("on purpose amid them")
        return super().backward(*args)


@on_ranks()
def test_a_failed_backward_pass(rank: int, size: int) -> None:
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
    parameters = np.concatenate([x.ravel() for each in net.state_dict().values() for x in each])
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


def test_a_script_of_pytagi_runs_with_other_imports(tmp_path: Path) -> None:
    """It knows MPI, and nothing of distributed_init: the config says that there are several."""
    pytest.importorskip("mpi4py")
    script = write(tmp_path, SCRIPT_OF_PYTAGI)
    done = run([*mpirun_command(2), sys.executable, "-W", "error", script])
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
