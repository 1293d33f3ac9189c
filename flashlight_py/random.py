"""Random numbers of this process: one generator per array library, with a common seed."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from flashlight_py.checks import check_integer
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.structure import thread_state

_seed: int | None = None
_generators: dict[str, Any] = {}
_entropy: Sequence[int] | None = None  # seed that use() has set for NumPy's generator, or None
_kept: dict[str, Any] = {}  # by library: the generator that use() has replaced
# One dict per active noting() block, the innermost last: used generators and initial states.
_notes: list[dict[str, tuple[Any, Any]]] = []


def set_seed(seed: int) -> None:
    """Restart every generator of this process from ``seed``.

    Parameter initialisation and dropout use these generators, so equal seeds give equal parameters.
    Before the first call the generators are seeded by the operating system.

    Raises:
        TypeError: If ``seed`` is not an integer.
        ValueError: If ``seed`` is negative.
    """
    global _seed  # noqa: PLW0603 - the seed of the process is what this module is for
    _seed = check_integer("set_seed", "seed", seed)
    use(None)
    _generators.clear()


def generator(library: ModuleType = np) -> Any:
    """Return the generator (``numpy.random.Generator`` or CuPy's) for arrays of ``library``."""
    name = library.__name__
    if name not in _generators:
        seed = _entropy if name == np.__name__ and _entropy is not None else _seed
        _generators[name] = library.random.default_rng(seed)
    original = used = _generators[name]
    if thread_state.recorder is not None and name == np.__name__:
        used = thread_state.recorder.drawing(original)
    for noted in _notes:
        if name not in noted:
            noted[name] = original, _copied_state(used)
    return used


@contextlib.contextmanager
def noting() -> Iterator[dict[str, tuple[Any, Any]]]:
    """Record the states of generators, so that ``replaying`` can repeat the block's random numbers.

    NumPy's generator is always recorded, CuPy's only if the block calls ``generator(cupy)``.
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
    """Make this block draw the numbers of a ``noting`` block again, then restore the generators."""
    before = dict(_generators)
    now = [(original, _copied_state(original)) for original, _ in noted.values()]
    try:
        for name, (original, state) in noted.items():
            _generators[name] = original
            _put_back(original, state)
        yield
    finally:
        for original, state in now:
            _put_back(original, state)
        _generators.clear()
        _generators.update(before)


def _copied_state(generator: Any) -> Any:
    """Return a copy of the generator's state on the same device, without waiting for a GPU."""
    bits = generator.bit_generator
    return bits.state if isinstance(bits, np.random.BitGenerator) else bits._state.copy()


def _put_back(generator: Any, state: Any) -> None:
    bits = generator.bit_generator
    if isinstance(bits, np.random.BitGenerator):
        bits.state = state
    else:
        bits._state[...] = state


def use(entropy: Sequence[int] | None) -> None:
    """Replace NumPy's generator by a new one with the seed ``entropy``. None restores the old one.

    ``entropy`` has integers of at least 0. The replaced generator keeps its state, and
    ``state_dict`` returns that state.
    """
    global _entropy  # noqa: PLW0603 - as in set_seed
    if thread_state.recorder is not None:
        thread_state.recorder.leave("the generator of random numbers is set, as by set_seed(),")
    stream = _generators.pop(np.__name__, None)
    if _entropy is None and stream is not None:
        _kept[np.__name__] = stream
    if entropy is None:
        _generators.update(_kept)
        _kept.clear()
    _entropy = entropy


def state_dict() -> dict[str, Any]:
    """Return the seed and a copy of the state of each generator that was used."""
    if thread_state.recorder is not None:
        thread_state.recorder.leave("the state of the random generator is read,")
    states = {name: state_of(generator) for name, generator in {**_generators, **_kept}.items()}
    return {"seed": _seed, "generators": states}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Set the generators to ``state``, a result of ``state_dict``, to draw the same numbers again.

    Raises:
        ModuleNotFoundError: If a CuPy generator was saved and CuPy is not installed.
    """
    global _seed  # noqa: PLW0603 - as in set_seed
    use(None)
    _generators.clear()
    for name, of_generator in state["generators"].items():
        set_state_of(generator(importlib.import_module(name)), of_generator)
    _seed = state["seed"]


def state_of(generator: Any) -> dict[str, Any]:
    """Return a copy of the state of a NumPy or CuPy ``Generator``, or raise TypeError."""
    bits = getattr(generator, "bit_generator", None)
    if isinstance(bits, np.random.BitGenerator):
        return dict(bits.state)
    device_state: Any = getattr(bits, "_state", None)  # CuPy has no public attribute for the state
    if not is_cupy(device_state):
        raise TypeError(
            "expected a numpy.random.Generator or cupy.random.Generator, got "
            f"{type(generator).__name__}"
        )
    return {"bit_generator": type(bits).__name__, "state": device_state.get()}


def set_state_of(generator: Any, state: Mapping[str, Any]) -> None:
    """Set ``generator`` to a state that ``state_of`` returned, in place.

    Raises:
        ValueError: If the state belongs to another type of generator.
    """
    bits = generator.bit_generator
    if state["bit_generator"] != type(bits).__name__:
        raise ValueError(
            f"random: expected the state of a {type(bits).__name__} generator, got the state of a "
            f"{state['bit_generator']} generator. Create the generator as when the state was saved"
        )
    if isinstance(bits, np.random.BitGenerator):
        bits.state = dict(state)
    else:
        bits._state.set(state["state"])


def keep_mask(seed: Array, first: int, rows: int, columns: int, block: int, ratio: float) -> Array:
    """Return a Boolean mask [rows, columns] that is False with probability ``ratio``.

    The mask has rows ``first``, ``first + 1``, ... of a random matrix. ``seed`` is an array of one
    int64, so that each replay of a captured step can use a new seed. csrc/nn/random.inc computes
    the same numbers. Every ``block`` adjacent elements of a row have a common hash key.
    """
    xp = array_module(seed)
    column = xp.arange(columns, dtype=np.uint64)
    row = xp.arange(first, first + rows, dtype=np.uint64)[:, None]
    inside = column % np.uint64(block)
    key = row * np.uint64(columns) + (column - inside)
    key = key * np.uint64(0x9E3779B97F4A7C15) + seed.astype(np.uint64)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h = (key ^ (key >> np.uint64(31))).astype(np.uint32)
    h = h + inside.astype(np.uint32) * np.uint32(0x9E3779B9)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    h = h ^ (h >> np.uint32(16))
    return (h >> np.uint32(8)) >= np.uint32(round(ratio * 2**24))  # type: ignore[no-any-return]
