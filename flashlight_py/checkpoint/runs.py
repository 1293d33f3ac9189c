"""Save and load: each rank sends its own state and rank 0 writes; it reads, and all get that."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from flashlight_py import errors, random
from flashlight_py.checkpoint.directory import Manifest, candidates, publish, read
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import (
    COMPOSED,
    check_integer,
    exchange_bytes,
    group_or_world,
    in_step,
)
from flashlight_py.parallel.agreement import differences
from flashlight_py.parallel.leaf_sync import is_leaf_by_leaf
from flashlight_py.safetensors import from_bytes, pack, pieces

_log = logging.getLogger("flashlight_py")
# What a rank raises for another rank's failure of that kind; any other is a CheckpointError.
_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class Stateful(Protocol):
    """Anything whose state can be taken and given back: modules, optimizers, samplers."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: dicts, lists, tuples, arrays, numbers, strings, None."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from ``state``."""


class _Several:
    """Parts of one kind, such as the optimizers of two networks, by name or position."""

    def __init__(self, parts: Mapping[Any, Stateful] | Sequence[Stateful]) -> None:
        items = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
        self.parts = {str(name): part for name, part in items}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Any) -> None:
        if state.keys() != self.parts.keys():
            raise ValueError(f"expected {sorted(self.parts)}, it has {sorted(state)}")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
        except ValueError as error:
            error.args = (f"{name!r}: {error}",)
            raise


Part: TypeAlias = Stateful | Mapping[str, Stateful] | Sequence[Stateful]


@in_step()
def save(
    path: str | os.PathLike[str], module: Part | None = None, *, optimizer: Part | None = None,
    sampler: Part | None = None, schedule: Part | None = None, rng: Any = None, step: int = 0,
    extra: Any = None, keep: int = 3, group: ProcessGroup | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint into the directory ``path``; keep the newest ``keep`` of them.

    Collective, blocking. Rank 0 writes its own module, optimizer, sampler, schedule and extra: in
    data-parallel training they are the same on all ranks. The random state is saved for every
    rank. When this function returns on any rank, the checkpoint is on the disk of rank 0. If the
    machine stops earlier, the earlier checkpoints are still complete.

    A checkpoint is a directory ``<number>-step-<step>`` with ``state.safetensors``, which other
    tools can read, and ``manifest.json``, with lengths and digests. It gets its name by a rename
    once all of it is on the disk. No pickle is in it. CuPy arrays are brought to the host. Only one
    job at a time may save into a directory.

    Args:
        path: the directory, created if it does not exist; rank 0's path is used.
        module: an object with ``state_dict()`` and ``load_state_dict()``, or a list, tuple or dict
            of such objects. Its arrays have any shape and a boolean, integer, floating (up to 64
            bits), bfloat16 or complex dtype.
        optimizer: like ``module``, for example ``fl.optim.AdamOptimizer``.
        sampler: like ``module``, for example ``fl.DistributedSampler``; equally far on all ranks.
        schedule: like ``module``, for example ``fl.optim.CosineAnnealingLR``.
        rng: True for the package's random numbers (dropout, initialisation), or generators of
            NumPy or CuPy (one, or a list, tuple or dict of them), whose state is saved as well.
        step: of the training, at least 0; the same on every rank.
        extra: whatever else: dicts, lists, tuples, arrays, numbers, strings, None.
        keep: number of checkpoints to keep, at least 1. Older ones are removed; of a link only the
            link. An old checkpoint that cannot be removed is a warning. Other entries stay.
        group: the ranks that save together, default the world. The others wait while rank 0
            writes: that must not take longer than the group's timeout.

    Returns:
        The path of the new checkpoint.

    Raises:
        TypeError: an argument is of the wrong kind, or holds what cannot be saved.
        ValueError: ``step`` or ``keep`` is too small.
        MismatchError: the ranks pass different steps, other arguments, or samplers that are not
            equally far; on every rank, and nothing is written.
        CheckpointError: rank 0 cannot write, such as to a full disk; on every rank.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> import tempfile
        >>> model, folder = fl.nn.Linear(3, 2), tempfile.mkdtemp()
        >>> fl.save(folder, module=model, step=10).name
        '000001-step-10'
        >>> fl.load(folder, module=model).step
        10
    """
    check_integer("save", "step", step)
    check_integer("save", "keep", keep, least=1)
    own = {"module": module, "optimizer": optimizer, "sampler": sampler, "schedule": schedule}
    parts = checked_parts("save", rng, **own)
    step = int(step)  # NumPy's integers are taken too; JSON knows Python's only
    members = group_or_world(group)
    states: dict[str, Any] = {}
    numbers = np.empty(0, np.uint8)  # this rank's random numbers, as a file
    settings = {"step": step, "parts": sorted(parts), "rng": bool(rng)}
    with Attempt("save", members) as attempt:
        states = {name: part.state_dict() for name, part in parts.items()}
        if rng:
            numbers = np.concatenate(list(pieces(generator_states(rng))))
        settings["sampler"] = json.dumps(pack(states.get("sampler"))[0], sort_keys=True)
        pack({"extra": extra})  # names what cannot be saved
    attempt.agree(settings)
    lengths = attempt.share(numbers.size)
    joined, ranks = members.gather(numbers), []
    if joined is not None and any(lengths):
        ends = zip(accumulate(lengths), lengths, strict=True)
        ranks = [from_bytes(joined[end - length : end]) for end, length in ends]
    tree = {**states, "extra": extra, "ranks": ranks}
    written = ""
    with Attempt("save", members) as attempt:
        if members.rank == 0:
            names = [*parts, *(["rng"] if rng else [])]
            written = str(publish(Path(path), step, members.size, names, pieces(tree), keep))
    return Path(attempt.share(written)[0])


class Checkpoint(NamedTuple):
    """A checkpoint that was loaded: its step, its path on rank 0, and ``extra`` as it was saved.

    ``ranks`` is how many saved it; ``skipped`` why newer ones were not used, one text each.
    """

    step: int
    path: Path
    extra: Any
    ranks: int
    skipped: tuple[str, ...] = ()


class _Found(NamedTuple):
    """The find of rank 0: a checkpoint that is whole; its bytes stay there."""

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...]


@in_step()
def load(
    path: str | os.PathLike[str], module: Part | None = None, *, optimizer: Part | None = None,
    sampler: Part | None = None, schedule: Part | None = None, rng: Any = None,
    group: ProcessGroup | None = None,
) -> Checkpoint | None:  # fmt: skip
    """Go on from the newest whole checkpoint in the directory ``path``; None: there is none.

    Collective, blocking. Rank 0 alone reads, and broadcasts what it has read; ``path`` need not be
    seen by the others. A checkpoint that is truncated or damaged is skipped, with a warning of the
    logger ``flashlight_py`` that says why, and the one before is used. If a job replaces it
    meanwhile, the newer one is used. The path of a single checkpoint is taken as well; then it must
    be whole.

    Arrays are copied into those of the module and the optimizer, in place, across devices if need
    be. Another number of ranks may load than has saved; then a rank beyond those keeps the random
    numbers that it has, with a warning. It takes as much memory as the checkpoint has bytes.

    Args:
        path: the directory that was given to :func:`flashlight_py.save`; that of rank 0 counts.
        module: made like the one that was saved, as the next three; None: not loaded.
        optimizer, sampler, schedule: the same, the schedule for this optimizer.
        rng: as it was given to ``save``: its generators are set in place, and the package's own.
            Of a ``module`` that was distributed with ``leaves`` every rank gets those of rank 0.
        group: the ranks that load together, default the world.

    Returns:
        The step and whatever was saved as ``extra``; None if the directory does not exist, or
        contains no checkpoint.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the checkpoint has no such part, or the part does not fit: another shape or
            number of parameters. Parts before it in the order above have been changed then.
        MismatchError: the ranks load different parts; on every rank, and nothing is changed.
        CheckpointError: there are checkpoints, and none can be used; or ``path`` is a file, cannot
            be read, or is a link to nothing, such as a disk that is not mounted; on every rank.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    own = {"module": module, "optimizer": optimizer, "sampler": sampler, "schedule": schedule}
    parts = checked_parts("load", rng, **own)
    members = group_or_world(group)
    wanted = [*parts, *(["rng"] if rng else [])]
    Attempt("load", members).agree({"parts": wanted})
    found: _Found | None = None
    state = np.empty(0, np.uint8)
    with Attempt("load", members) as attempt:
        if members.rank == 0:
            found, state = _newest_whole(Path(path), where("load", members))
            lacking = [part for part in wanted if found and part not in found.manifest.parts]
            if lacking and found:
                raise ValueError(
                    f"load: {found.path} was saved with "
                    f"{', '.join(found.manifest.parts) or 'no part'}, so it has no "
                    f"{' and no '.join(lacking)}; load what was saved"
                )
    failure, found = members.broadcast_object((attempt.failure, found))
    attempt.end([failure])
    if found is None:
        return None
    content = state if members.rank == 0 else np.empty(found.manifest.state.nbytes, np.uint8)
    state = members.broadcast(content)  # its error is the group's, and not one to share
    tree: dict[str, Any] = {}
    with Attempt("load", members) as attempt:
        tree = from_bytes(state)
        _restore(members, found.path, tree, parts, rng)
    attempt.share()
    manifest = found.manifest
    return Checkpoint(manifest.step, found.path, tree["extra"], manifest.ranks, found.skipped)


def _newest_whole(path: Path, begin: str) -> tuple[_Found | None, Array]:
    """Return the newest checkpoint that is whole, and its state; warn of what is skipped."""
    reasons: dict[Path, str] = {}
    # Listed again after each failure: a job that saves may have replaced the checkpoint.
    while untried := [each for each in candidates(path) if each not in reasons]:
        newest = untried[0]
        try:
            manifest, state = read(newest)
        except (OSError, ValueError) as error:
            reasons[newest] = f"{newest.name}: {error}"
            continue
        skipped = tuple(text for each, text in reasons.items() if os.path.lexists(each))
        for reason in skipped:
            _log.warning(
                "%s: the checkpoint %s. It is skipped; %s is used instead",
                *(begin, reason, newest.name),
            )
        return _Found(newest, manifest, skipped), state
    if reasons:
        raise errors.CheckpointError(
            f"{begin}: none of the {len(reasons)} checkpoint(s) at {path} can be used: "
            f"{'; '.join(reasons.values())}. Restore one from a backup, or pass another folder to "
            "begin anew"
        )
    return None, np.empty(0, np.uint8)


def _restore(
    members: ProcessGroup, path: Path, tree: dict[str, Any], parts: Mapping[str, Stateful], rng: Any
) -> None:
    try:
        for name, part in parts.items():
            part.load_state_dict(tree[name])
    except ValueError as error:
        error.args = (f"load: the {name} of {path}: {error}",)
        raise
    module, of_ranks = parts.get("module"), tree["ranks"]
    modules = module.parts.values() if isinstance(module, _Several) else [module]
    whose = 0 if any(map(is_leaf_by_leaf, modules)) else members.rank
    if not rng:
        return
    if whose >= len(of_ranks):
        _log.warning(
            "%s: the checkpoint has random numbers of %d rank(s); this one keeps its own",
            *(where("load", members), len(of_ranks)),
        )
        return
    named, saved = _named(rng), of_ranks[whose]["given"]
    if named.keys() != saved.keys():
        raise ValueError(
            f"load: the rng that was saved has the generators {sorted(saved)}, the one given has "
            f"{sorted(named)}; pass the same"
        )
    for name, generator in named.items():
        random.set_state_of(generator, saved[name])
    random.load_state_dict(of_ranks[whose]["package"])


def checked_parts(what: str, rng: object, **parts: Part | None) -> dict[str, Stateful]:
    """Return the parts that are not None; a TypeError if one, or ``rng``, is something else."""
    given: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
    inside: dict[str, Any] = {}
    for name, part in list(given.items()):
        if part and isinstance(part, (list, tuple, dict)):
            given[name] = _Several(part)
            inside |= {f"{name} {at!r}": each for at, each in given[name].parts.items()}
    for name, part in {**given, **inside}.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(part, method, None)):
                raise TypeError(f"{what}: {name}, a {type(part).__name__}, has no {method}()")
    if rng is not None:
        try:
            generator_states(rng)
        except TypeError as error:
            raise TypeError(f"{what}: rng: {error}") from error
    return given


def where(what: str, group: ProcessGroup) -> str:
    return f"[{what}] rank {group.rank} of {group.size}"


class Attempt:
    """A ``with`` block of "save" or "load" that keeps its exception until others were notified."""

    def __init__(self, what: str, group: ProcessGroup) -> None:
        self._what, self._group = what, group
        self._error: Exception | None = None

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._error = error if isinstance(error, Exception) else None
        return self._error is not None

    @property
    def failure(self) -> list[str] | None:
        """The report to the others: the kind of the exception and its text; None: there is none."""
        return None if self._error is None else [type(self._error).__name__, str(self._error)]

    def share(self, mine: object = None) -> list[Any]:
        """Return what every rank passes, and JSON can hold, if none failed. Collective, blocking.

        Raises the errors of ``Work.wait`` and :meth:`end`; if a rank did not arrive, it says that
        all must.
        """
        sent = json.dumps([self.failure, mine]).encode()
        call = next(call for call in COMPOSED if call.startswith(f"{self._what}("))
        try:
            texts = exchange_bytes(self._group.backend(), sent, call)
        except (errors.PeerLostError, errors.CollectiveTimeoutError) as error:
            error.args = (f"{where(self._what, self._group)}: in {call}: {error}",)
            raise
        of_ranks = [json.loads(text) for text in texts]
        self.end([failure for failure, _ in of_ranks])
        return [given for _, given in of_ranks]

    def agree(self, mine: Mapping[str, Any]) -> None:
        """Share arguments, and refuse those that are not the same on all ranks."""
        if differing := differences(self.share(mine)):
            raise errors.MismatchError(
                f"{where(self._what, self._group)}: the ranks pass different arguments: "
                f"{', '.join(differing)}. Nothing was done; pass the same on every rank"
            )

    def end(self, failures: Sequence[Any]) -> None:
        """Raise if one of ``failures``, those of the ranks in order, is not None.

        This rank's own error; or one of the same kind, TypeError, ValueError or CheckpointError,
        with the report of the first rank that failed. A failure of another kind is a
        CheckpointError.
        """
        if isinstance(self._error, TypeError | ValueError | errors.CheckpointError):
            raise self._error
        for rank, failure in enumerate(failures):
            if failure:
                kind, text = failure
                error = _KINDS.get(kind, errors.CheckpointError)
                place = where(self._what, self._group)
                raise error(f"{place}: rank {rank} failed: {kind}: {text}") from self._error


def generator_states(rng: object) -> dict[str, Any]:
    """Return the states of the package's own generators, and of those in ``rng``."""
    own = {name: random.state_of(each) for name, each in _named(rng).items()}
    return {"package": random.state_dict(), "given": own}


def _named(rng: object) -> dict[str, Any]:
    if rng is True:
        return {}
    if isinstance(rng, Mapping):
        return {str(name): each for name, each in rng.items()}
    several = list(rng) if isinstance(rng, list | tuple) else [rng]
    return {str(number): each for number, each in enumerate(several)}
