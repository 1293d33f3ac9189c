"""A captured step under a launcher that starts its ranks again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.launch.launcher import launch, write

# Trains from the last checkpoint on; a rank kills itself when it is about to replay step 12.
PROGRAM = """
import os, signal, sys
import numpy as np
import flashlight_py as fl

folder, is_captured = sys.argv[1], sys.argv[2] == "captured"
fl.distributed_init()
fl.set_seed(0)
layers = fl.nn.Linear(4, 9), fl.nn.ReLU(), fl.nn.Dropout(0.2), fl.nn.Linear(9, 1)
model = fl.nn.Sequential(*layers)
fl.broadcast_parameters(model)
fl.distribute_module_grads(model)
optimizer = fl.optim.AdamOptimizer(model.params(), 0.01)
criterion = fl.nn.MeanSquaredError()

def step(x, y):
    optimizer.zero_grad()
    criterion(model(fl.input(x)), fl.no_grad(y)).backward()
    optimizer.step()

if is_captured:
    step = fl.capture(step)
checkpoint = fl.load(folder, module=model, optimizer=optimizer, rng=True)
first = 0 if checkpoint is None else checkpoint.step
is_again = os.environ["FLASHLIGHT_RESTART_COUNT"] != "0"
assert is_again == (is_captured and first == 10)
for number in range(first, 20):
    random = np.random.default_rng([fl.get_world_rank(), number])
    if is_captured and number == 12 and fl.get_world_rank() == 1 and not is_again:
        assert step.replays == 9
        os.kill(os.getpid(), signal.SIGKILL)
    step(random.random((5, 4), np.float32), random.random((5, 1), np.float32))
    if number == 9:
        fl.save(folder, module=model, optimizer=optimizer, rng=True, step=10)
assert not is_captured or step.replays == 7
if fl.get_world_rank() == 0:
    np.savez(f"{folder}.npz", **model.state_dict())
"""


def test_a_job_started_again_captures_again(tmp_path: Path) -> None:
    script = write(tmp_path, PROGRAM)
    found = []
    for way in ("eager", "captured"):
        done = launch("-n", 2, "--max-restarts", 1, script, tmp_path / way, way)
        assert done.returncode == 0, done.stderr
        assert ("was killed by SIGKILL" in done.stderr) == (way == "captured")
        with np.load(f"{tmp_path / way}.npz") as saved:
            found.append({name: saved[name].tobytes() for name in saved.files})
    assert found[0] == found[1]
