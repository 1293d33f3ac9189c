"""Communication hooks on CuPy arrays: equal on all ranks, and close to NumPy's results."""

from typing import Any

import pytest

import flashlight_py as fl
from tests.distributed import hook_steps
from tests.gpu import verbs

pytestmark = pytest.mark.gpu

# NCCL scales before it adds, and adds float16 differently. The other results differ by rounding
# only.
TOLERANCE = {"Float16Compression": 4e-3, "PowerSGDCompression": 1e-10}


def both_ways(rank: int, size: int, name: str) -> tuple[list[bytes], float]:
    """Run three steps on CuPy and on NumPy arrays; return CuPy's bits and the difference."""
    hooks = [hook_steps.make(name) for _ in range(2)]
    bits, worst = [], 0.0
    for step in range(3):
        arrays = hook_steps.gradients(rank, step, "float64")
        on_gpu = [verbs.on_gpu(array) for array in arrays]
        hook_steps.reduce(hooks[0], on_gpu)
        hook_steps.reduce(hooks[1], arrays)
        got = hook_steps.flat([fl.device.to_device(array, "cpu") for array in on_gpu])
        expected = hook_steps.flat(arrays)
        bits.append(got.tobytes())
        worst = max(worst, float(abs(got - expected).max() / abs(expected).max()))
        hooks[0].load_state_dict(hooks[0].state_dict())
    assert hooks[0].bytes_per_step == hooks[1].bytes_per_step
    return bits, worst


@pytest.mark.parametrize("name", TOLERANCE)
def test_hooks_give_equal_results_for_cupy_and_numpy_arrays(ranks: Any, name: str) -> None:
    results = ranks.run(both_ways, name)
    assert all(bits == results[0][0] for bits, _ in results)
    assert max(worst for _, worst in results) <= TOLERANCE[name]
