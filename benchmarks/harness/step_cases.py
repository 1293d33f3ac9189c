"""Training steps that are timed, and the contenders of each."""

import argparse
import itertools
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from harness.conductor import Case, Conductor, Contender
from harness.environments import PEERS, python_of
from harness.launchers import Library
from harness.options import ours
from harness.roles.array_functions import FUNCTIONS
from harness.roles.perceptron import Recipe
from harness.statistics import Measurement
from harness.step_targets import (
    BATCH_8,
    CAPTURED,
    CLASSES,
    DDP,
    EAGER,
    HAND_WRITTEN,
    JAX,
    LEAVES,
    SEED,
    SIMPLE,
    TWENTY,
    WAYS,
    on_ranks,
    reducing,
)

__all__ = [
    "WORKS",
    "Pythons",
    "Work",
    "case_of",
    "contenders",
    "grid_work",
    "measure_functions",
    "pythons_of",
]

ROLE = "flashlight_step"
ARRAYS = 6  # maximum, of the size of the parameters, in one library
ACTIVATIONS = 16  # arrays of the size of all layers' results, with the batches

Pythons = Mapping[str, Path]


@dataclass(frozen=True)
class Work:
    """A step; ``also`` names further contenders or variants."""

    title: str
    recipe: Recipe
    also: frozenset[str] = frozenset()
    peers: bool = True


def _works() -> list[Work]:
    seed = Recipe((10, 100, 1))
    classes = Recipe((64, 128, 10), 16, loss="cross entropy")
    works = [
        Work(SEED, seed, frozenset({"distributed", "compiled", "simple"})),
        Work(f"{SEED}, forward pass only", replace(seed, trains=False)),
        Work(BATCH_8, replace(seed, batch=8), frozenset({"simple"})),
        Work(CLASSES, classes, frozenset({"compiled", "simple"})),
    ]
    for title, recipe in ((SEED, seed), (CLASSES, classes)):
        works.append(Work(f"{title}, Adam", replace(recipe, rule="adam")))
        works.append(Work(f"{title}, float64", replace(recipe, dtype="float64")))
    for widths, batch in (((64, 128, 10), 64), ((256,) * 4, 256)):
        name = f"{'-'.join(map(str, widths))}, batch {batch}"
        works.append(Work(name, Recipe(widths, batch), frozenset({"leaves"}), peers=False))
    works.append(Work(TWENTY, Recipe((64,) * 21, 16, starts=5)))
    return works


WORKS = _works()


def grid_work(width: int, batch: int, layers: int) -> Work:
    """Return the step of layers of one width, which only NumPy runs next to this package."""
    title = f"width {width}, batch {batch}, {layers} layers"
    return Work(title, Recipe((width,) * (layers + 1), batch), peers=False)


def case_of(work: Work, ranks: int) -> Case:
    """Return the case for the conductor."""
    recipe = work.recipe
    size = np.dtype(recipe.dtype).itemsize
    memory = ARRAYS * recipe.weights + ACTIVATIONS * recipe.batch * sum(recipe.widths)
    most_ranks = ranks if "distributed" in work.also else 1
    measurement = Measurement(work.title, recipe.dtype, size * recipe.weights, most_ranks)
    return Case(measurement, {"recipe": asdict(recipe)}, size * memory)


def measure_functions(conductor: Conductor, shapes: list[tuple[int, int]]) -> list[Measurement]:
    """Return the times of functions of arrays for each shape."""
    library, measurements = ours("array_functions"), []
    kinds = {HAND_WRITTEN: "by hand", EAGER: "eager", CAPTURED: "captured"}
    for name, shape in itertools.product(FUNCTIONS, shapes):
        title = f"{name}, {shape[0]} x {shape[1]}"
        steps = Measurement(title, "float32", 4 * shape[0] * shape[1], 1)
        task = {"function": name, "shape": shape}
        measurements.append(
            conductor.measure(
                Case(steps, task, 5 * steps.nbytes),
                [
                    Contender(title_of_kind, library, 1, {"kind": kind})
                    for title_of_kind, kind in kinds.items()
                ],
            )
        )
    return measurements


def pythons_of(options: argparse.Namespace, absent: dict[str, str]) -> Pythons:
    """Return the interpreters of the selected peers; add missing peers to ``absent``."""
    pythons = {}
    for name in filter(None, options.peers.split(",")):
        python = python_of(PEERS[name], options.environments)
        if isinstance(python, str):
            absent[PEERS[name].title] = python
        else:
            pythons[name] = python
    return pythons


def contenders(work: Work, ranks: list[int], pythons: Pythons) -> list[Contender]:
    """Return the contenders, the reference first."""
    by_hand = Library(HAND_WRITTEN, "numpy_step", Path(sys.executable))
    entrants = [Contender(HAND_WRITTEN, by_hand, 1, {"kind": "plain"})]
    if "simple" in work.also:
        simple = Library(SIMPLE, "numpy_simple_step", Path(sys.executable))
        entrants.append(Contender(SIMPLE, simple, 1, {"kind": "plain"}))
    for kind, title in WAYS.items():
        entrants.append(Contender(title, ours(ROLE), 1, {"kind": kind}))
        if "leaves" in work.also:
            entrants.append(Contender(title + LEAVES, ours(ROLE), 1, {"kind": f"{kind} leaves"}))
        if "distributed" in work.also:
            task = {"kind": f"{kind} distributed"}
            counts = sorted({1, *ranks})
            entrants += [Contender(reducing(title, n), ours(ROLE), n, task) for n in counts]
    return entrants + (_peers(work, ranks, pythons) if work.peers else [])


def _peers(work: Work, ranks: list[int], pythons: Pythons) -> list[Contender]:
    entrants = []
    if "jax" in pythons:
        entrants.append(
            Contender(JAX, Library("JAX", "jax_step", pythons["jax"]), 1, {"kind": "jit"})
        )
    if "torch" in pythons:
        torch = Library("torch", "torch_step", pythons["torch"])
        entrants.append(Contender("torch, eager", torch, 1, {"kind": "plain"}))
        # torch.compile needs a C++ compiler; without one only it fails.
        compiled = replace(torch, title="torch, compiled")
        if "compiled" in work.also:
            entrants.append(Contender(compiled.title, compiled, 1, {"kind": "compiled"}))
        if "distributed" in work.also:
            task = {"kind": "distributed"}
            entrants += [Contender(on_ranks(DDP, n), torch, n, task) for n in ranks]
    return entrants
