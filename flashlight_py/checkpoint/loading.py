"""Load: rank 0 looks for the newest checkpoint that is whole, and every rank gets that one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.checkpoint.directory import Manifest, is_checkpoint, newest_first, read
from flashlight_py.checkpoint.parts import (
    DeferredFailure,
    Stateful,
    check_agreement,
    check_generators,
    check_parts,
    everyone,
    given_parts,
    set_generator_states,
    where,
)
from flashlight_py.checkpoint.tensors import from_bytes
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.groups.world import group_or_world
from flashlight_py.errors import CheckpointError
from flashlight_py.parallel.leaf_sync import is_leaf_by_leaf

_log = logging.getLogger("flashlight_py")


class Checkpoint(NamedTuple):
    """A checkpoint that was loaded: its step, its path on rank 0, and ``extra`` as it was saved.

    ``ranks`` is how many saved it; ``skipped`` why newer ones were not used, one text each.
    """

    step: int
    path: Path
    extra: Any
    ranks: int
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Found:
    """The find of rank 0: a checkpoint that is whole, or none; its bytes stay there."""

    path: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...]


_NOTHING = _Found(None, None, ()), np.empty(0, np.uint8)


def load(
    path: str | os.PathLike[str],
    module: Stateful | None = None,
    *,
    optimizer: Stateful | None = None,
    sampler: Stateful | None = None,
    schedule: Stateful | None = None,
    rng: Any = None,
    group: ProcessGroup | None = None,
) -> Checkpoint | None:
    """Go on from the newest whole checkpoint in the directory ``path``; None: there is none.

    Collective, blocking. Rank 0 alone reads, and what it has read is broadcast: all ranks go on
    from the same checkpoint, and ``path`` need not be seen by the others. A checkpoint that is
    truncated or damaged is skipped, with a warning of the logger ``flashlight_py`` that says why,
    and the one before is used. The path of a single checkpoint is taken as well; then it must be
    whole.

    Arrays are copied into those of the module and the optimizer, in place, across devices if need
    be. Another number of ranks may load than has saved; then a rank beyond those keeps the random
    numbers that it has, with a warning. It takes as much memory as the checkpoint has bytes.

    Args:
        path: the directory that was given to :func:`flashlight_py.save`; that of rank 0 counts.
        module: made like the one that was saved, as the next three; None: not loaded.
        optimizer: made like the one that was saved.
        sampler: made like the one that was saved.
        schedule: made like the one that was saved, for this optimizer.
        rng: as it was given to ``save``: its generators are set in place, and the package's own.
            Of a ``module`` that was distributed with ``leaves`` every rank gets those of rank 0.
        group: the ranks that load together, default the world.

    Returns:
        The step and whatever was saved as ``extra``; None where no checkpoint was saved yet.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the checkpoint has no such part, or the part does not fit: another shape or
            number of parameters. Parts before it in the order above have been changed then.
        MismatchError: the ranks load different parts; on every rank, and nothing is changed.
        CheckpointError: there are checkpoints, and none can be used; on every rank. Says why.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    parts = given_parts(module=module, optimizer=optimizer, sampler=sampler, schedule=schedule)
    check_parts("load", parts)
    check_generators("load", rng)
    members = group_or_world(group)
    wanted = [*parts, *(["rng"] if rng else [])]
    check_agreement("load", members, everyone("load", members, {"parts": wanted}))
    found, state = _found(members, Path(path), wanted)
    if found.manifest is None or found.path is None:
        return None
    tree = _restored(members, found.path, state, parts, rng)
    manifest = found.manifest
    return Checkpoint(manifest.step, found.path, tree["extra"], manifest.ranks, found.skipped)


def _found(members: ProcessGroup, path: Path, wanted: Sequence[str]) -> tuple[_Found, Array]:
    """Return what rank 0 finds, and the state's bytes, on every rank."""
    found, state = _NOTHING
    with DeferredFailure("load", members) as attempt:
        if members.rank == 0:
            found, state = _newest_whole(path, where("load", members))
            _check_wanted(found, wanted)
    failure, found = members.broadcast_object((attempt.failure, found))
    attempt.end([failure])
    if found.manifest is not None:
        content = state if members.rank == 0 else np.empty(found.manifest.state.nbytes, np.uint8)
        state = members.broadcast(content)
    return found, state


def _newest_whole(path: Path, begin: str) -> tuple[_Found, Array]:
    """Return the newest checkpoint that is whole, and its state's bytes; warn of what is skipped.

    Raises:
        CheckpointError: there are checkpoints, and none can be used.
    """
    candidates = [path] if is_checkpoint(path) else newest_first(path)
    skipped: list[str] = []
    for candidate in candidates:
        try:
            manifest, state = read(candidate)
        except (OSError, ValueError) as error:
            skipped.append(f"{candidate.name}: {error}")
            continue
        for reason in skipped:
            _log.warning(
                "%s: the checkpoint %s. It is skipped; %s is used instead",
                *(begin, reason, candidate.name),
            )
        return _Found(candidate, manifest, tuple(skipped)), state
    if skipped:
        raise CheckpointError(
            f"{begin}: none of the {len(skipped)} checkpoint(s) at {path} can be used: "
            f"{'; '.join(skipped)}. Bring one back, or remove them to begin anew"
        )
    return _NOTHING


def _check_wanted(found: _Found, wanted: Sequence[str]) -> None:
    lacking = found.manifest.lacking(wanted) if found.manifest else []
    if lacking and found.manifest:
        raise ValueError(
            f"load: {found.path} was saved with {', '.join(found.manifest.parts) or 'no part'}, so "
            f"it has no {' and no '.join(lacking)}; load what was saved"
        )


def _restored(
    members: ProcessGroup, path: Path, state: Array, parts: Mapping[str, Stateful], rng: Any
) -> dict[str, Any]:
    """Put the state into ``parts`` and ``rng``, on all ranks or raise on all; return the tree."""
    tree: dict[str, Any] = {}
    with DeferredFailure("load", members) as attempt:
        tree = from_bytes(state)
        try:
            for name, part in parts.items():
                part.load_state_dict(tree[name])
        except ValueError as error:
            error.args = (f"load: the {name} of {path}: {error}",)
            raise
        if rng:
            is_alike = is_leaf_by_leaf(parts.get("module"))
            _restore_random_numbers(members, rng, tree["ranks"], 0 if is_alike else members.rank)
    attempt.end(everyone("load", members, attempt.failure))
    return tree


def _restore_random_numbers(
    members: ProcessGroup, rng: Any, ranks: Sequence[Any], whose: int
) -> None:
    if whose < len(ranks):
        set_generator_states(rng, ranks[whose])
        return
    _log.warning(
        "%s: the checkpoint has random numbers of %d rank(s); this one keeps its own",
        *(where("load", members), len(ranks)),
    )
