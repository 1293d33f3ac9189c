"""The random numbers of a run: each rank has its own, so each rank's are saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashlight_py import random
from flashlight_py.random import set_state_of, state_of


def check_generators(what: str, rng: object) -> None:
    """Refuse what is no ``rng`` argument.

    Raises:
        TypeError: it is not None, True, a generator, or a list, tuple or dict of generators.
    """
    if rng is None:
        return
    try:
        generator_states(rng)
    except TypeError as error:
        raise TypeError(f"{what}: rng: {error}") from error


def generator_states(rng: object) -> dict[str, Any]:
    """Return the states of the package's own generators, and of those in ``rng``."""
    own = {name: state_of(each) for name, each in _named(rng).items()}
    return {"package": random.state_dict(), "given": own}


def set_generator_states(rng: object, states: Mapping[str, Any]) -> None:
    """Let the package's generators, and those in ``rng``, go on from ``states``; in place.

    Raises:
        ValueError: other generators were saved than are given.
    """
    named, saved = _named(rng), states["given"]
    if named.keys() != saved.keys():
        raise ValueError(
            f"load: the rng that was saved has the generators {sorted(saved)}, the one given has "
            f"{sorted(named)}; give the same"
        )
    for name, generator in named.items():
        set_state_of(generator, saved[name])
    random.load_state_dict(states["package"])


def _named(rng: object) -> dict[str, Any]:
    if rng is True:
        return {}
    if isinstance(rng, Mapping):
        return {str(name): each for name, each in rng.items()}
    several = list(rng) if isinstance(rng, list | tuple) else [rng]
    return {str(number): each for number, each in enumerate(several)}
