"""The random numbers of this process: one generator per array library, one seed for all."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["generator", "set_seed"]

_seed: int | None = None
_generators: dict[str, Any] = {}


def set_seed(seed: int) -> None:
    """Restart every generator of this process from ``seed``.

    Parameter initialisation and dropout draw from them, so the same seed gives the same
    parameters. Before the first call the generators start from the system's entropy.

    Raises:
        TypeError: ``seed`` is not an integer.
        ValueError: ``seed`` is negative.
    """
    global _seed  # noqa: PLW0603 - the seed of the process is what this module is for
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"set_seed needs an integer, got {type(seed).__name__}")
    if seed < 0:
        raise ValueError(f"set_seed needs a seed of at least 0, got {seed}")
    _seed = int(seed)
    _generators.clear()


def generator(library: ModuleType = np) -> Any:
    """Return the generator (``numpy.random.Generator`` or CuPy's) for arrays of ``library``."""
    name = library.__name__
    if name not in _generators:
        _generators[name] = library.random.default_rng(_seed)
    return _generators[name]
