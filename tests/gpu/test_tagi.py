"""TAGI networks learn the same on 1, 2 and 4 GPU ranks and in one process on the CPU."""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.gpu import verbs

pytestmark = pytest.mark.gpu

SAMPLES, STEPS = 24, 10
NETWORKS = {
    "dense": lambda: fl.tagi.Sequential(
        fl.tagi.Linear(6, 32), fl.tagi.ReLU(), fl.tagi.Linear(32, 3)
    ),
    "mixture": lambda: fl.tagi.Sequential(
        fl.tagi.Linear(6, 32), fl.tagi.MixtureReLU(), fl.tagi.BatchNorm2d(32), fl.tagi.Linear(32, 3)
    ),
}


def train(rank: int, size: int, device: str, network: str) -> dict[str, Any]:
    """Train on this rank's share, one full batch per step; return the state."""
    fl.set_seed(rank)
    if device == "cuda":
        verbs.cupy()
        device = fl.distributed.use_local_device()
    net = NETWORKS[network]()
    net.to_device(device)
    model = fl.tagi.DDPSequential(net, average=False, sync=True)
    random = np.random.default_rng(1)
    x, y = random.standard_normal((SAMPLES, 6)), random.standard_normal((SAMPLES, 3))
    updater = fl.tagi.OutputUpdater(net.device)
    for _ in range(STEPS):
        model(x[rank::size])
        updater.update(model.output_z_buffer, y[rank::size], 0.3, model.input_delta_z_buffer)
        model.backward()
        model.step()
    return model.state_dict()


@pytest.mark.parametrize("network", NETWORKS)
def test_tagi_on_gpus_learns_like_one_process_on_the_cpu(ranks: Any, network: str) -> None:
    expected = train(0, 1, "cpu", network)
    for result in ranks.run(train, "cuda", network):
        for name, arrays in expected.items():
            for one, other in zip(result[name], arrays, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4, err_msg=name)
