"""Checkpoints of this package hold networks of fl.tagi."""

from pathlib import Path

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.tagi import nn
from tests.tagi.helpers import equal, network

LAYERS = "Linear(3, 5), ReLU(), BatchNorm2d(5), Linear(5, 2, bias=False)"


def test_a_checkpoint_of_a_network_that_diverged_is_refused(tmp_path: Path) -> None:
    net, other = network(LAYERS), network(LAYERS, 1)
    net.layers[2].statistics()[1][...] = np.inf
    path = fl.save(tmp_path, net)
    expected = other.state_dict()
    with pytest.raises(
        ValueError, match=r"'BatchNorm2d\.2': running_variance is not finite"
    ) as found:
        fl.load(tmp_path, other)
    assert str(found.value).startswith(f"load: the module of {path}: ")
    equal(other.state_dict(), expected)


def test_another_network_s_checkpoint_is_refused(tmp_path: Path) -> None:
    fl.save(tmp_path, network(LAYERS))
    other = network(LAYERS.replace("5", "6"))
    expected = other.state_dict()
    with pytest.raises(ValueError, match=r"nothing was loaded: 'Linear\.0' has arrays of \[15, 15"):
        fl.load(tmp_path, other)
    with pytest.raises(ValueError, match=r"nothing was loaded: unexpected"):
        fl.load(tmp_path, nn.Sequential(nn.Linear(3, 5)))
    equal(other.state_dict(), expected)
