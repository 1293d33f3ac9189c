"""Jobs that go on after a rank has died: every sample is used once, and no bit is different."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.launch.launcher import launch, write

SAMPLES, BATCH, EPOCHS = 50, 4, 2

# Every rank notes what it has used. After each step rank 0 keeps the state, as a checkpoint would,
# and a barrier makes sure that no rank begins the next step before.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import flashlight_py as fl

fl.distributed_init()
rank, size = fl.get_world_rank(), fl.get_world_size()
folder, kind, samples, batch, epochs = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
checkpoint = folder / "checkpoint"
restarts = int(os.environ["FLASHLIGHT_RESTART_COUNT"])

if kind == "batches":
    rows = fl.dataset.TensorDataset([np.arange(samples)])
    sampler = fl.ShardedDataset(rows, batch, seed=5)
    parts = lambda: ([int(i) for i in x] for (x,) in fl.dataset.PrefetchDataset(sampler, 1, 2))
else:
    sampler = fl.DistributedSampler(samples, seed=5)
    parts = lambda: ([i] for i in sampler)
if checkpoint.exists():
    sampler.load_state_dict(json.loads(checkpoint.read_text()))

for epoch in range(sampler.epoch, epochs):
    sampler.set_epoch(epoch)
    left = samples - sampler.consumed
    common = len(sampler) if kind == "batches" else left // size  # steps that all ranks take
    for step, part in enumerate(parts()):
        if restarts == 0 and epoch == 1 and step == 3 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if step < common:
            fl.all_reduce(np.ones(1))
        with (folder / f"used-{restarts}-{rank}").open("a") as file:
            file.write("".join(f"{epoch} {index}\\n" for index in part))
        if rank == 0:
            hidden = folder / "hidden"
            hidden.write_text(json.dumps(sampler.state_dict()))
            hidden.rename(checkpoint)
        if step < common:
            fl.barrier()
    fl.barrier()
print("finished", size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batches", "indices"])
def test_every_sample_of_the_epoch_is_used_once(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    program = write(tmp_path, PROGRAM)
    done = launch("-n", 4, "--min-n", 3, program, folder, kind, SAMPLES, BATCH, EPOCHS, code=0)
    assert "rank 2 of 4" in done.stderr
    assert "was killed by SIGKILL" in done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] finished 3" for rank in range(3)]
    used = [line for file in folder.glob("used-*") for line in file.read_text().splitlines()]
    assert sorted(used) == sorted(f"{epoch} {i}" for epoch in range(EPOCHS) for i in range(SAMPLES))
    assert len(list(folder.glob("used-*"))) == 7


# A job that dies at random steps and is started again ends as one that did not --------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "ResumableTraining.py"
RANKS, STEPS, DEATHS = 2, 100, 2

# The example itself, with a rank that kills itself in the backward pass of a random step.
DYING = """
import os, runpy, signal, sys
import numpy as np
import flashlight_py as fl

example, seed, ranks, steps, deaths = sys.argv[1], *map(int, sys.argv[2:6])
attempt = int(os.environ["FLASHLIGHT_RESTART_COUNT"])
random = np.random.default_rng([seed, attempt])
victim, moment = int(random.integers(ranks)), int(random.integers(steps // (deaths + 1)))
calls, backward = 0, fl.Variable.backward

def dying(self, *arguments, **options):
    global calls
    if attempt < deaths and calls == moment and int(os.environ["RANK"]) == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    calls += 1
    return backward(self, *arguments, **options)

fl.Variable.backward = dying
sys.argv = [example, *sys.argv[6:]]
runpy.run_path(example, run_name="__main__")
"""


def parameters(file: Path) -> dict[str, bytes]:
    with np.load(file) as saved:
        return {name: saved[name].tobytes() for name in saved.files}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_restarts_change_nothing(tmp_path: Path, seed: int) -> None:
    job = ("--epochs", 2, "--save-every", 5)
    launch(
        *("-n", RANKS, EXAMPLE, *job),
        *("--folder", tmp_path / "whole", "--result", tmp_path / "whole.npz"),
        code=0,
    )
    dying = write(tmp_path, DYING)
    again = launch(
        *("-n", RANKS, "--max-restarts", DEATHS, dying, EXAMPLE, seed, RANKS, STEPS, DEATHS, *job),
        *("--folder", tmp_path / "again", "--result", tmp_path / "again.npz"),
        code=0,
    )
    assert again.stderr.count("was killed by SIGKILL") == DEATHS
    assert parameters(tmp_path / "again.npz") == parameters(tmp_path / "whole.npz")
