"""Save: every rank sends what is its own, rank 0 writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.checkpoint.directory import clear, publish
from flashlight_py.checkpoint.parts import (
    DeferredFailure,
    Stateful,
    check_agreement,
    check_generators,
    check_parts,
    everyone,
    generator_states,
    given_parts,
)
from flashlight_py.checkpoint.tensors import from_bytes, pack, pieces, to_bytes
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.distributed.groups.world import group_or_world


def save(
    path: str | os.PathLike[str],
    module: Stateful | None = None,
    *,
    optimizer: Stateful | None = None,
    sampler: Stateful | None = None,
    schedule: Stateful | None = None,
    rng: Any = None,
    step: int = 0,
    extra: Any = None,
    keep: int = 3,
    group: ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint into the directory ``path``; keep the newest ``keep`` of them.

    Collective, blocking. Rank 0 alone writes, and its module, optimizer, sampler, schedule and
    extra are what is saved: on the other ranks they are the same in data-parallel training. Random
    numbers are saved of every rank. When this returns, on any rank, the checkpoint is on the disk
    of rank 0; if the machine stops before, the ones of before are still there, and whole.

    A checkpoint is a directory ``<number>-step-<step>`` with ``state.safetensors``, which other
    tools can read, and ``manifest.json``, with lengths and digests. It gets its name by a rename
    once all of it is on the disk. No pickle is in it. CuPy arrays are brought to the host. Only
    one job at a time may save into a directory.

    Args:
        path: the directory, made if there is none; that of rank 0 counts.
        module: has ``state_dict()`` and ``load_state_dict()``, as have the next three; arrays of
            any shape, dtype boolean, integer, floating up to 64 bits, bfloat16 or complex.
        optimizer: such as ``fl.optim.AdamOptimizer`` or ``fl.DistributedOptimizer``.
        sampler: such as ``fl.DistributedSampler``; equally far on all ranks.
        schedule: such as ``fl.optim.CosineAnnealingLR``.
        rng: True for the package's random numbers (dropout, initialisation), or generators of
            NumPy or CuPy (one, or a list, tuple or dict of them), whose state is saved as well.
        step: of the training, at least 0; the same on every rank.
        extra: whatever else: dicts, lists, tuples, arrays, numbers, strings, None.
        keep: how many checkpoints stay, at least 1.
        group: the ranks that save together, default the world. The others wait while rank 0
            writes: that must not take longer than the group's timeout.

    Returns:
        The path of the new checkpoint.

    Raises:
        TypeError: an argument is of the wrong kind, or holds what cannot be saved.
        ValueError: ``step`` or ``keep`` is too small.
        MismatchError: the ranks pass different steps, other arguments, or samplers that are not
            equally far; on every rank, and nothing is written.
        CheckpointError: rank 0 cannot write, such as where the disk is full; on every rank.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> import tempfile
        >>> model, folder = fl.nn.Linear(3, 2), tempfile.mkdtemp()
        >>> fl.save(folder, module=model, step=10).name
        '000001-step-10'
        >>> fl.load(folder, module=model).step
        10
    """
    parts = given_parts(module=module, optimizer=optimizer, sampler=sampler, schedule=schedule)
    _check(parts, rng, step, keep)
    step = int(step)  # NumPy's integers are taken too; JSON knows Python's only
    members = group_or_world(group)
    states, own_numbers = _collected(members, parts, rng, step, extra)
    tree = {**states, "extra": extra, "ranks": _random_numbers(members, own_numbers)}
    names = [*parts, *(["rng"] if rng else [])]
    return _written(members, Path(path), step, keep, names, tree)


def _check(parts: Mapping[str, Stateful], rng: Any, step: int, keep: int) -> None:
    whole_number("save", "step", step)
    whole_number("save", "keep", keep, least=1)
    check_parts("save", parts)
    check_generators("save", rng)


def _collected(
    members: ProcessGroup, parts: Mapping[str, Stateful], rng: Any, step: int, extra: Any
) -> tuple[dict[str, Any], Array]:
    """Return the states of the parts, and this rank's random numbers as a file; all ranks agree.

    Raises:
        TypeError, ValueError, CheckpointError: as ``DeferredFailure.end``, on every rank.
        MismatchError: the ranks save different things.
    """
    states: dict[str, Any] = {}
    numbers = np.empty(0, np.uint8)
    settings = {"step": step, "parts": sorted(parts), "rng": bool(rng)}
    with DeferredFailure("save", members) as attempt:
        states = {name: part.state_dict() for name, part in parts.items()}
        numbers = to_bytes(generator_states(rng)) if rng else numbers
        settings["sampler"] = json.dumps(pack(states.get("sampler"))[0], sort_keys=True)
        pack({"extra": extra})  # names what cannot be saved
    of_ranks = everyone("save", members, [attempt.failure, settings])
    attempt.end([failure for failure, _ in of_ranks])
    check_agreement("save", members, [given for _, given in of_ranks])
    return states, numbers


def _random_numbers(members: ProcessGroup, own: Array) -> list[Any]:
    """Return the random numbers of all ranks, on rank 0; empty where they are not saved."""
    lengths = everyone("save", members, own.size)
    joined = members.gather(own)
    if joined is None or not any(lengths):
        return []
    ends = accumulate(lengths)
    return [from_bytes(joined[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def _written(
    members: ProcessGroup, path: Path, step: int, keep: int, parts: list[str], tree: object
) -> Path:
    """Let rank 0 write; return the checkpoint's path, or raise, on every rank."""
    written = ""
    with DeferredFailure("save", members) as attempt:
        if members.rank == 0:
            written = str(publish(path, step, members.size, parts, pieces(tree)))
            clear(path, keep)
    of_ranks = everyone("save", members, [attempt.failure, written])
    attempt.end([failure for failure, _ in of_ranks])
    return Path(of_ranks[0][1])
