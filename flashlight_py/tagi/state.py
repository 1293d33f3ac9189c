"""The state of a network as a dictionary by pytagi's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import BaseLayer
from flashlight_py.tagi.states import REAL, host_copy, unmasked

# The first four entries of a layer, which pytagi's dictionaries have as well.
FOUR = ("mu_w", "var_w", "mu_b", "var_b")
STATISTICS = ("running_mean", "running_variance")


class Named(Protocol):
    """A network, as far as its state is concerned."""

    def named_layers(self) -> Iterator[tuple[str, BaseLayer]]:
        """Yield every layer, also those inside blocks, by the names that pytagi gives them."""


def state_dict(network: Named) -> dict[str, tuple[Array, ...]]:
    """Return copies of all arrays of each layer, flat, on the CPU."""
    return {
        name: (
            *(getattr(layer, which) for which in FOUR),
            *(host_copy(each) for each in layer.statistics()),
        )
        for name, layer in network.named_layers()
        if layer.has_state
    }


def load_state_dict(network: Named, state: Mapping[str, Any]) -> None:
    """Set all arrays of each layer in place, or none.

    Entries of four arrays, as pytagi's, leave running statistics as they are.

    Raises:
        ValueError: names or sizes differ, something is not finite or masked, or a variance is
            negative; names them.
    """
    layers = {name: layer for name, layer in network.named_layers() if layer.has_state}
    problems = [f"missing {name!r}" for name in layers if name not in state]
    problems += [f"unexpected {name!r}" for name in state if name not in layers]
    # All of them before the first is set: some may be no numbers.
    entries = {
        name: [
            np.asarray(unmasked(f"load_state_dict: {name!r}", values), REAL)
            for values in state[name]
        ]
        for name in layers
        if name in state
    }
    for name, arrays in entries.items():
        problems += _misfits(name, layers[name], arrays)
    if problems:
        raise ValueError(f"load_state_dict: nothing was loaded: {'; '.join(problems)}")
    for name, layer in layers.items():
        for which, values in zip(FOUR, entries[name], strict=False):
            setattr(layer, which, values)
        for home, values in zip(layer.statistics(), entries[name][len(FOUR) :], strict=False):
            home[...] = array_module(home).asarray(values).reshape(home.shape)


def _misfits(name: str, layer: BaseLayer, arrays: list[Array]) -> list[str]:
    expected = [layer.num_weights] * 2 + [layer.num_biases] * 2
    statistics = [int(each.size) for each in layer.statistics()]
    found = [int(each.size) for each in arrays]
    if found not in (expected, expected + statistics):
        return [f"{name!r} has arrays of {found} elements, expected {expected + statistics}"]
    wrong = wrong_moments((*FOUR, *STATISTICS), arrays)
    return [f"{name!r}: {'; '.join(wrong)}"] if wrong else []


def wrong_moments(names: Iterable[str], arrays: list[Array]) -> list[str]:
    """Return what cannot be among means and variances, which take turns, by their names."""
    named = list(zip(names, arrays, strict=False))
    found = [f"{name} is not finite" for name, each in named if not np.isfinite(each).all()]
    return found + [f"{name} has negative variances" for name, a in named[1::2] if (a < 0).any()]
