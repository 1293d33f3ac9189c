"""Save and load on several ranks: all use one checkpoint, and all raise if one fails."""

import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import CheckpointError, MismatchError, PeerLostError
from tests.checkpoint.runs import Run
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import run_outcomes, run_ranks
from tests.tables import for_each

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def next_numbers(rank: int, size: int, folder: Path, save: bool) -> list[float]:
    """Save or load, and draw from a generator and from the generator of the library."""
    seed = rank if save else 100 + rank
    generator = np.random.default_rng(seed)
    fl.set_seed(seed)
    if save:
        assert fl.save(folder, rng=generator).name == "000001-step-0"
    else:  # only rank 0's path is used: the other ranks need no access to the folder
        fl.load(folder if rank == 0 else Path("/nowhere"), rng=generator)
    return [*generator.random(3), *fl.random.generator().random(3)]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_load_restores_random_states(pool: Any, tmp_path: Path, before: int, after: int) -> None:
    saved = pool(before).run(next_numbers, tmp_path, True)
    loaded = pool(after).run(next_numbers, tmp_path, False)
    for rank, numbers in enumerate(loaded):
        expected = np.random.default_rng(100 + rank).random(3).tolist()
        assert numbers == saved[rank] if rank < before else numbers[:3] == expected


@on_ranks(("shm", 2))
def test_load_uses_the_same_checkpoint_on_all_ranks(rank: int, size: int, tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path, 1)
    path = run.save(tmp_path, 2)
    if rank == 0:
        (path / "manifest.json").unlink()
    result = run.load(tmp_path)
    assert (result.step, len(result.skipped)) == (1, 1)


@on_ranks(("shm", 2))
def test_save_and_load_raise_mismatch_error_if_arguments_differ(
    rank: int, size: int, tmp_path: Path
) -> None:
    run, folder = Run(), tmp_path / "none"
    with pytest.raises(MismatchError, match=r"step \(rank\(s\) 0: 0; rank\(s\) 1: 1\)"):
        run.save(folder, step=rank)
    run.position.consumed = rank
    with pytest.raises(MismatchError, match="sampler"):
        run.save(folder, step=0)
    assert not folder.exists()
    run.position.consumed = 0
    run.save(folder, step=0)
    with pytest.raises(MismatchError, match="parts"):
        fl.load(folder, module=run.model, optimizer=run.optimizer if rank else None)


class Unwilling(Run):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("no state today")

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("not this one")


@on_ranks(("shm", 2))
def test_all_ranks_raise_if_save_or_load_fails_on_one_rank(
    rank: int, size: int, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    module: Any = Unwilling() if rank == 1 else Run().model
    with pytest.raises(CheckpointError, match="rank 1 failed: KeyError: 'no state today'"):
        fl.save(folder, module=module)
    fl.save(folder, module=Run().model)
    with pytest.raises(ValueError, match="not this one"):
        fl.load(folder, module=module)
    with pytest.raises(ValueError, match="expected optimizer in"):
        fl.load(folder, optimizer=Run().optimizer)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match="rank 0 failed: "):
        fl.save(file / "below", module=Run().model)
    with pytest.raises(CheckpointError, match="expected the folder of a run"):
        fl.load(file)
    assert fl.load(folder / "empty") is None
    assert fl.all_reduce(np.ones(1)).tolist() == [size]  # the group remains usable


def use_some(rank: int, size: int, folder: Path) -> list[int]:
    sampler = fl.DistributedSampler(20, seed=3)
    indices = iter(sampler)
    used = [next(indices) for _ in range(3)]
    fl.save(folder, sampler=sampler)
    return used


def use_the_rest(rank: int, size: int, folder: Path) -> list[int]:
    sampler = fl.DistributedSampler(20, seed=3)
    fl.load(folder, sampler=sampler)
    return list(sampler)


def test_sampler_state_continues_with_fewer_ranks(pool: Any, tmp_path: Path) -> None:
    used = list(chain.from_iterable(pool(3).run(use_some, tmp_path)))
    rest = list(chain.from_iterable(pool(2).run(use_the_rest, tmp_path)))
    assert len(used) == 9
    assert sorted(used + rest) == list(range(20))


# Calls on a single rank
# -----------------------------------------------------------------------------


def loads_until_a_rank_dies(rank: int, size: int, folder: Path) -> str:
    """Fake ``broadcast``, because only this ends a rank between two steps of ``load``."""
    run = Run(seed=rank)
    run.save(folder, 1)
    if rank == 1:
        broadcast_object = fl.distributed.ProcessGroup.broadcast_object

        def last(*args: Any) -> Any:
            broadcast_object(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        fl.distributed.ProcessGroup.broadcast_object = last  # type: ignore[method-assign]
    with pytest.raises(PeerLostError) as caught:
        run.load(folder)
    return str(caught.value)


def test_load_names_a_rank_that_dies_during_the_call(tmp_path: Path) -> None:
    outcome, _ = run_outcomes(loads_until_a_rank_dies, 2, tmp_path)
    assert outcome.ok, outcome.report()
    assert "lost rank 1 (its process has ended)" in outcome.value


@on_ranks(("shm", 2), ("hierarchical", 4), slow=[("mpi", 2)])
@for_each("verb", ["save", "load"])
def test_save_or_load_on_one_rank_raises_mismatch_error(
    rank: int, size: int, tmp_path: Path, verb: str
) -> None:
    first = {"save": lambda: fl.save(tmp_path, step=1), "load": lambda: fl.load(tmp_path, rng=True)}
    words = rf"rank 0 called {verb}\(collective, to be called on every rank\) at "
    with pytest.raises(MismatchError, match=words):
        fl.all_reduce(np.zeros(3)) if rank else first[verb]()
    assert list(tmp_path.iterdir()) == []


def saves_after_the_others_left(rank: int, size: int, folder: Path) -> str:
    if rank == 1:
        # Like a program that ends without a shutdown.
        fl.distributed.start.initialize._close_at_exit()
        return ""
    with pytest.raises(PeerLostError) as caught:
        fl.save(folder, step=1)
    return str(caught.value)


def test_save_raises_if_the_other_ranks_have_exited(tmp_path: Path) -> None:
    output, _ = run_ranks(saves_after_the_others_left, 2, tmp_path)
    assert output.startswith(
        "[save] rank 0 of 2: in save(collective, to be called on every rank): "
    )
    assert "lost rank 1 (it ended normally or closed this group after " in output
