"""The random numbers of this process: one generator per array library, one seed for all."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from flashlight_py.device import is_cupy
from flashlight_py.structure import here

_seed: int | None = None
_generators: dict[str, Any] = {}
_entropy: Sequence[int] | None = None  # of what is in NumPy's place; see use()
_kept: dict[str, Any] = {}  # what it is in the place of
# What blocks of noting() have seen so far, the innermost last: generators as they were before.
_notes: list[dict[str, tuple[Any, Any]]] = []


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
    use(None)
    _generators.clear()


def generator(library: ModuleType = np) -> Any:
    """Return the generator (``numpy.random.Generator`` or CuPy's) for arrays of ``library``."""
    name = library.__name__
    if name not in _generators:
        seed = _entropy if name == np.__name__ and _entropy is not None else _seed
        _generators[name] = library.random.default_rng(seed)
    found = drawing = _generators[name]
    if here.recorder is not None and name == np.__name__:
        drawing = here.recorder.drawing(found)
    for noted in _notes:
        if name not in noted:
            noted[name] = found, _copied_state(drawing)
    return drawing


@contextlib.contextmanager
def noting() -> Iterator[dict[str, tuple[Any, Any]]]:
    """Note what the block draws, so that ``replaying`` what is noted draws it again.

    A generator of a GPU's arrays must be asked for (``generator``) within the block.
    """
    noted: dict[str, tuple[Any, Any]] = {}
    _notes.append(noted)
    try:
        generator()
        yield noted
    finally:
        _notes[:] = [other for other in _notes if other is not noted]


@contextlib.contextmanager
def replaying(noted: Mapping[str, tuple[Any, Any]]) -> Iterator[None]:
    """Let the block draw what a block of ``noting`` drew; afterwards all go on as before."""
    before = dict(_generators)
    now = [(found, _copied_state(found)) for found, _ in noted.values()]
    try:
        for name, (found, state) in noted.items():
            _generators[name] = found
            _put_back(found, state)
        yield
    finally:
        for found, state in now:
            _put_back(found, state)
        _generators.clear()
        _generators.update(before)


def _copied_state(generator: Any) -> Any:
    """Return the state, where it is: a GPU is not waited for."""
    bits = generator.bit_generator
    return bits.state if isinstance(bits, np.random.BitGenerator) else bits._state.copy()


def _put_back(generator: Any, state: Any) -> None:
    bits = generator.bit_generator
    if isinstance(bits, np.random.BitGenerator):
        bits.state = state
    else:
        bits._state[...] = state


def use(entropy: Sequence[int] | None) -> None:
    """Let what draws for NumPy arrays draw from a stream of its own; None: as before.

    Each call begins another stream, from ``entropy``: integers, at least 0. The package's own
    generator stays where it is meanwhile, and ``state_dict`` has its state.
    """
    global _entropy  # noqa: PLW0603 - as in set_seed
    if here.recorder is not None:
        here.recorder.leave("the generator of random numbers is set, as by set_seed(),")
    stream = _generators.pop(np.__name__, None)
    if _entropy is None and stream is not None:
        _kept[np.__name__] = stream
    if entropy is None:
        _generators.update(_kept)
        _kept.clear()
    _entropy = entropy


def state_dict() -> dict[str, Any]:
    """Return the seed, and the state of each generator that has been used: dicts and copies."""
    if here.recorder is not None:
        here.recorder.leave("the state of the random generator is read,")
    own = {**_generators, **_kept}
    states = {name: state_of(generator) for name, generator in own.items()}
    return {"seed": _seed, "generators": states}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Go on where ``state_dict`` was taken: the same numbers follow as followed then.

    Raises ModuleNotFoundError if a generator of CuPy's was saved, and CuPy is not installed.
    """
    global _seed  # noqa: PLW0603 - as in set_seed
    use(None)
    _generators.clear()
    for name, of_generator in state["generators"].items():
        set_state_of(generator(importlib.import_module(name)), of_generator)
    _seed = state["seed"]


def state_of(generator: Any) -> dict[str, Any]:
    """Return the state of a NumPy or CuPy ``Generator``, a dict of its own; else a TypeError."""
    bits = getattr(generator, "bit_generator", None)
    if isinstance(bits, np.random.BitGenerator):
        return dict(bits.state)
    device_state: Any = getattr(bits, "_state", None)  # CuPy has no public name for it
    if not is_cupy(device_state):
        raise TypeError(
            f"expected a numpy.random.Generator or a cupy.random.Generator, got "
            f"{type(generator).__name__}"
        )
    return {"bit_generator": type(bits).__name__, "state": device_state.get()}


def set_state_of(generator: Any, state: Mapping[str, Any]) -> None:
    """Let ``generator`` go on from ``state``, which ``state_of`` returned, in place.

    Raises ValueError if the state is of a generator of another kind.
    """
    bits = generator.bit_generator
    if state["bit_generator"] != type(bits).__name__:
        raise ValueError(
            f"the state is of a {state['bit_generator']} generator, this one is a "
            f"{type(bits).__name__}; make it as it was made when the state was saved"
        )
    if isinstance(bits, np.random.BitGenerator):
        bits.state = dict(state)
    else:
        bits._state.set(state["state"])
