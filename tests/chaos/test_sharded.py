"""A rank ends, in every way, in the middle of a step of a sharded module: the others find out.

And what does not fit once per rank trains where it fits once per host.
"""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded
from tests.distributed.harness import run_outcomes

FATES = ["kill", "exit", "raise", "stop"]


def meet(fate: str) -> None:
    if fate == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "exit":
        os._exit(3)
    if fate == "raise":
        raise KeyError("a rank's program")
    os.kill(os.getpid(), signal.SIGSTOP)


def step_until(rank: int, size: int, fate: str, folder: str) -> Any:
    """Rank 1 meets its fate in the middle of step 2; the others report what they raise."""
    fully_sharded.SMALL_BYTES = 0
    fl.set_seed(0)
    model = fl.nn.Sequential(fl.nn.Linear(200, 200), fl.nn.ReLU(), fl.nn.Linear(200, 10))
    fl.fully_shard(model)
    optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
    pids = fl.all_gather(np.array([os.getpid()]))
    change, x = optimizer._step_pieces, fl.input(np.ones((4, 200), np.float32))

    def pass_of() -> None:
        optimizer.zero_grad()
        model(x).backward(np.ones((4, 10), np.float32))
        optimizer.step()

    for _ in range(2):
        pass_of()
    fl.save(Path(folder) / "saved", model, step=2)
    saved = [param.array.copy() for param in model.params()]
    if rank == 1:

        def ends(*piece: Any) -> None:
            change(*piece)
            meet(fate)

        optimizer._step_pieces = ends  # type: ignore[method-assign, assignment]
    with pytest.raises(fl.errors.DistributedError):
        pass_of()
    for use in (lambda: model(x), model.state_dict, optimizer.step):
        with pytest.raises(fl.errors.TornStateError, match="checkpoint"):
            use()
    fl.distributed_shutdown()
    if rank == 2:
        (Path(folder) / "checked").write_text("yes")
        return True
    (Path(folder) / "checked").read_text()  # as loading makes the parameters whole for both
    if fate == "stop":
        os.kill(int(pids[1]), signal.SIGKILL)
    assert fl.load(Path(folder) / "saved", model).step == 2
    model(x)
    return all(
        np.array_equal(param.array, old) for param, old in zip(model.params(), saved, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_a_rank_that_ends_in_a_step_leaves_no_wrong_parameters(fate: str, tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "checked")
    outcomes = run_outcomes(
        step_until, 3, fate, str(tmp_path), params={"TIMEOUT": 3}, deadline=15.0
    )
    assert [outcomes[rank].value for rank in (0, 2)] == [True, True]


def limit_private_memory(room: int) -> None:
    """Let this process have ``room`` bytes more than it has; what it shares does not count."""
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (taken + room, resource.RLIM_INFINITY))


def large(rank: int, size: int, way: str) -> None:
    """Train 96 MiB of parameters by Adam, with 32 MiB for each rank beside what is shared."""
    model = fl.nn.Sequential(*(fl.nn.Linear(2048, 2048) for _ in range(6)))
    if way == "sharded":
        fl.fully_shard(model)
    np.ones((256, 256), np.float32).dot(np.ones((256, 256), np.float32))
    limit_private_memory(32 << 20)
    if way == "plain":
        fl.distribute_module_grads(model)
    optimizer = fl.optim.AdamOptimizer(model.params(), 0.001)
    x = fl.input(np.ones((4, 2048), np.float32))
    for _ in range(2):
        optimizer.zero_grad()
        model(x).backward(np.ones((4, 2048), np.float32))
        optimizer.step()


@pytest.mark.slow
def test_what_fits_once_per_host_trains() -> None:
    """1,536 MiB, if each of 4 ranks had all; 384 and 4 x 32 are there, a third."""
    outcomes = run_outcomes(large, 4, "plain", params={"TIMEOUT": 20}, deadline=120.0)
    assert "MemoryError" in str([outcome.error_classes for outcome in outcomes])
    assert all(outcome.ok for outcome in run_outcomes(large, 4, "sharded", deadline=120.0))
