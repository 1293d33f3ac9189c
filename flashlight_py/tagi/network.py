"""The layers of a network by pytagi's names, and its state as a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import BaseLayer
from flashlight_py.tagi.states import REAL, host_copy, unmasked

# The first four entries of a layer, which pytagi's dictionaries have as well.
FOUR = ("mu_w", "var_w", "mu_b", "var_b")
STATISTICS = ("running_mean", "running_variance")


class Network:
    """The base of networks: layers, and what they have learnt."""

    layers: list[BaseLayer]

    def named_layers(self) -> Iterator[tuple[str, BaseLayer]]:
        """Yield every layer, also those inside blocks, by the names that pytagi gives them."""
        for number, layer in enumerate(self.layers):
            yield from layer.named_layers(str(number))

    def state_dict(self) -> dict[str, tuple[Array, ...]]:
        """Return all that the network has learnt: copies of flat arrays, on the CPU.

        By pytagi's names, such as ``"Linear.0"`` and ``"Conv2d.main.3.0"`` in a block: means and
        variances of the weights, then of the biases; of a layer that keeps running statistics,
        also these.
        """
        return {
            name: (
                *(getattr(layer, which) for which in FOUR),
                *(host_copy(each) for each in layer.statistics()),
            )
            for name, layer in self.named_layers()
            if layer.has_state
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict()`` returned, of this library's or pytagi's; any sequences.

        Entries of four arrays, as pytagi's, leave running statistics as they are.

        Raises:
            ValueError: names or sizes are not this network's, something is not finite or masked, or
                a variance is negative; names them. Nothing was changed.
        """
        layers = {name: layer for name, layer in self.named_layers() if layer.has_state}
        problems = [f"missing {name!r}" for name in layers if name not in state_dict]
        problems += [f"unexpected {name!r}" for name in state_dict if name not in layers]
        # All of them before the first is set: some may be no numbers.
        entries = {
            name: [
                np.asarray(unmasked(f"load_state_dict: {name!r}", values), REAL)
                for values in state_dict[name]
            ]
            for name in layers
            if name in state_dict
        }
        for name, arrays in entries.items():
            layer, found = layers[name], [int(each.size) for each in arrays]
            expected = [layer.num_weights] * 2 + [layer.num_biases] * 2
            statistics = [int(each.size) for each in layer.statistics()]
            if found not in (expected, expected + statistics):
                expected += statistics
                problems += [f"{name!r} has arrays of {found} elements, expected {expected}"]
            elif wrong := wrong_moments((*FOUR, *STATISTICS), arrays):
                problems += [f"{name!r}: {'; '.join(wrong)}"]
        if problems:
            raise ValueError(f"load_state_dict: nothing was loaded: {'; '.join(problems)}")
        for name, layer in layers.items():
            for which, values in zip(FOUR, entries[name], strict=False):
                setattr(layer, which, values)
            for home, values in zip(layer.statistics(), entries[name][len(FOUR) :], strict=False):
                home[...] = array_module(home).asarray(values).reshape(home.shape)


def wrong_moments(names: Iterable[str], arrays: list[Array]) -> list[str]:
    """Return what cannot be among means and variances, which take turns, by their names."""
    named = list(zip(names, arrays, strict=False))
    found = [f"{name} is not finite" for name, each in named if not np.isfinite(each).all()]
    return found + [f"{name} has negative variances" for name, a in named[1::2] if (a < 0).any()]
