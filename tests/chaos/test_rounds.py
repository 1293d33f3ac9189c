"""A rank dies, stops, raises or exits during a verb, and the other ranks raise soon.

A sample of the rounds of ``python -m tests.chaos``. The ordinary run contains each backend,
the slow run each pair of a backend and a fault. Also, a rank dies in the middle of a step of a
sharded module.
"""

import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded
from tests.chaos.rounds import BACKENDS, FATES, Round, play
from tests.chaos.verbs import VERBS
from tests.distributed.harness import run_outcomes
from tests.distributed.rendezvous_helpers import Ranks

# Each call creates a group of some ranks, which is slow.
SAMPLED = [verb for verb in VERBS if verb != "split"]


def sample(backend: str, fate: str) -> list[str]:
    """Return rounds in which every verb meets some fault on some backend. A stopped rank costs a
    timeout."""
    number = list(BACKENDS).index(backend) * len(FATES) + list(FATES).index(fate)
    step = len(SAMPLED) if fate == "stop" else 2 * len(FATES)
    return [
        *SAMPLED[number % step :: step],
        *(["split"] if (backend, fate) == ("shm", "kill") else []),
    ]


ORDINARY = [("gloo", "kill"), ("hierarchical", "exception"), ("shm", "interrupt")]
PAIRS = [
    pytest.param(*pair, marks=() if pair in ORDINARY else pytest.mark.slow)
    for pair in product(BACKENDS, FATES)
]


@pytest.mark.parametrize(("backend", "fate"), PAIRS)
def test_survivors_raise_in_time_and_clean_up(ranks: Ranks, backend: str, fate: str) -> None:
    for verb in sample(backend, fate):
        game = Round(backend, verb, fate, seed=1)
        assert play(ranks, game).wrong == [], game.command


def step_until(rank: int, size: int, fate: str, folder: str) -> Any:
    """Let rank 1 suffer its fault in the middle of step 2, and return the errors of the other
    ranks."""
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
            os.kill(os.getpid(), signal.SIGKILL if fate == "kill" else signal.SIGSTOP)

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
    (Path(folder) / "checked").read_text()  # loading restores the parameters of both ranks
    if fate == "stop":
        os.kill(int(pids[1]), signal.SIGKILL)
    assert fl.load(Path(folder) / "saved", model).step == 2
    model(x)
    return all(
        np.array_equal(param.array, old) for param, old in zip(model.params(), saved, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["kill", "stop"])
def test_sharded_step_raises_torn_state_error_if_a_rank_dies(fate: str, tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "checked")
    outcomes = run_outcomes(
        step_until, 3, fate, str(tmp_path), params={"TIMEOUT": 3}, deadline=15.0
    )
    assert [outcomes[rank].value for rank in (0, 2)] == [True, True]
