"""What a network has for the memory of its parameters, also when it is copied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from flashlight_py.tagi.layer import BaseLayer
from flashlight_py.tagi.parameters import ParameterBucket, on_device


class Gathered:
    """A part of :class:`flashlight_py.tagi.Sequential`."""

    device: str
    buckets: list[ParameterBucket]

    def named_layers(self) -> Iterator[tuple[str, BaseLayer]]:
        """Yield every layer, also those inside blocks, by the names that pytagi gives them."""
        raise NotImplementedError

    def gather_parameters(
        self, make: Callable[[list[BaseLayer]], list[ParameterBucket]] | None = None
    ) -> None:
        """Let the parameters lie in the buckets that ``make`` returns; None: in one.

        ``make`` is passed the layers with parameters, in the order in which a backward pass
        completes their sums.
        """
        layers = [layer for _, layer in self.named_layers() if layer.parameters_in_use][::-1]
        if make is None:
            parameters = [each for layer in layers for each in layer.parameters_in_use]
            self.buckets = [ParameterBucket(parameters, on_device(self.device))]
        else:
            self.buckets = make(layers)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the buckets: in a copy, layers would no longer be parts of these."""
        return {name: value for name, value in self.__dict__.items() if name != "buckets"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gather_parameters()

    def __copy__(self) -> Gathered:
        """Return a deep copy: parameters lie in the buckets of one network alone."""
        return copy.deepcopy(self)
