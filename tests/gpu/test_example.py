"""examples/DistributedTraining.py has the same losses on GPUs and on the CPU."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.conftest import one_gpu_for_several
from tests.launch.launcher import run

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parents[2] / "examples" / "DistributedTraining.py"
OPTIONS = ("--epochs", "4", "--samples", "512", "--batch-size", "8")
SHARING = " ".join(f"{name}={value}" for name, value in one_gpu_for_several("$RANK").items())


def losses(size: int, device: str) -> list[float]:
    """Train on ``size`` ranks that the launcher starts, and return the loss of each epoch."""
    import cupy

    program = [sys.executable, str(PROGRAM), *OPTIONS, "--device", device]
    command = [sys.executable, "-m", "flashlight_py.launch", "-n", str(size), "--no-python"]
    if device == "cuda" and cupy.cuda.runtime.getDeviceCount() < size:
        command += ["sh", "-c", f'{SHARING} exec "$@"', "sh"]
    done = run([*command, *program], code=0, timeout=25)
    return [float(text) for text in re.findall(r"Mean Squared Error: (\S+)", done.stdout)]


@pytest.mark.parametrize("size", [1, 2])
def test_example_has_the_losses_of_the_cpu(size: int) -> None:
    expected, result = losses(size, "cpu"), losses(size, "cuda")
    assert len(result) == 4
    np.testing.assert_allclose(result, expected, rtol=1e-4)
