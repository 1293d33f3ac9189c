"""Checkpoints: saved states from which a killed training program can continue.

Rank 0 writes and reads the files, and broadcasts the loaded state. A checkpoint appears in its
directory complete or not at all. It is a directory ``<number>-step-<step>`` with two files. A new
checkpoint has a larger number than all earlier checkpoints, even if its step is smaller. While a
directory is being written or removed, its name begins with a full stop. If a process is killed
meanwhile, the next ``save`` removes this directory.

The manifest contains the length and the SHA-256 of the state file. A thread computes the SHA-256
during the write, because hashing and writing take about the same time on a fast disk. Functions
for files raise OSError for a system error, and ValueError if a file does not match the manifest.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from flashlight_py import errors, random
from flashlight_py._version import __version__
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup, internal
from flashlight_py.parallel.agreement import differences
from flashlight_py.parallel.leaf_sync import is_leaf_by_leaf
from flashlight_py.safetensors import flatten_tree, from_bytes, pieces

__all__ = ["Checkpoint", "load", "save"]

_log = logging.getLogger("flashlight_py")
# If a rank raises one of these classes, the other ranks raise it too. Otherwise: CheckpointError.
_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}

PIECE_BYTES = 8 << 20
SMALL_BYTES = 1 << 14  # bytes; the digest of fewer bytes takes less time than a thread's start


class Content(NamedTuple):
    """Identity of a file's content: its length in bytes and its hexadecimal SHA-256."""

    nbytes: int
    sha256: str


def write_durable(file: Path, chunks: Iterable[Array]) -> Content:
    """Create ``file`` from ``chunks`` (uint8), and return when the data is on the disk.

    At most two chunks are in memory: a chunk is written while the previous chunk is digested.
    """
    with open(file, "xb") as stream:
        sha256 = _sha256_of(chunks, stream.write)
        stream.flush()
        os.fsync(stream.fileno())
        return Content(stream.tell(), sha256)


def read_durable(file: Path, expected: Content) -> Array:
    """Return the bytes of ``file``; raise ValueError if they do not match ``expected``."""
    with open(file, "rb") as stream:
        present = os.fstat(stream.fileno()).st_size
        if present != expected.nbytes:
            raise ValueError(f"{file.name}: expected {expected.nbytes} bytes, got {present}")
        content = np.empty(present, np.uint8)

        def read(part: memoryview) -> None:
            if stream.readinto(part) < part.nbytes:
                raise ValueError(f"{file.name}: expected {expected.nbytes} bytes, got fewer")

        if _sha256_of([content], read) != expected.sha256:
            raise ValueError(f"{file.name}: expected the SHA-256 of the manifest, got another")
    return content


def sync_directory(directory: Path) -> None:
    """Block until the names in ``directory`` are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, which opens no folders
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of(chunks: Iterable[Array], move: Callable[[memoryview], object]) -> str:
    """Call ``move`` to read or write each part of ``chunks``. Return the SHA-256 of all parts."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1, thread_name_prefix="flashlight-digest") as thread:
        added = thread.submit(digest.update, b"")
        for chunk in chunks:
            for begin in range(0, chunk.size, PIECE_BYTES):
                part = chunk[begin : begin + PIECE_BYTES].data
                move(part)
                added.result()
                if part.nbytes > SMALL_BYTES:
                    added = thread.submit(digest.update, part)
                else:
                    digest.update(part)
        added.result()
    return digest.hexdigest()


FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """Content of the manifest file. ``parts`` lists the names of the saved parts, as "module"."""

    step: int
    ranks: int
    parts: tuple[str, ...]
    state: Content
    version: str

    def encode(self) -> bytes:
        """Return the manifest as JSON with a digest, by which ``decode`` detects damage."""
        content = {"format": FORMAT, **asdict(self), "state": self.state._asdict()}
        return _text({"manifest": content, "sha256": _digest(content)})

    @classmethod
    def decode(cls, file: bytes) -> "Manifest":
        """Return the manifest; raise ValueError if ``file`` is damaged or of a later version."""
        try:
            decoded = json.loads(file)
            content = dict(decoded["manifest"])
            is_intact = decoded["sha256"] == _digest(content) and file == _text(decoded)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"its manifest is truncated or damaged ({error})") from error
        if not is_intact:
            raise ValueError("its manifest needs a matching SHA-256, got another")
        if content.pop("format") != FORMAT:
            raise ValueError(f"got a later format. Install flashlight_py {content['version']}")
        parts, state = tuple(content.pop("parts")), Content(**content.pop("state"))
        return cls(parts=parts, state=state, **content)


def _text(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _digest(content: Any) -> str:
    return hashlib.sha256(_text(content)).hexdigest()


MANIFEST, STATE = "manifest.json", "state.safetensors"

_NAME = re.compile(r"\d{6,}-step-\d+", re.ASCII)
_TEMPORARY = re.compile(r"\.(writing|removing)-[0-9a-f]{16}", re.ASCII)


def publish(
    directory: Path, step: int, ranks: int, parts: Iterable[str], state: Iterable[Array], keep: int
) -> Path:
    """Write a checkpoint with the bytes of ``state``, and return its path.

    The directory gets its final name when its content is on the disk. If writing fails, the
    directory is removed. Finally, the oldest of more than ``keep`` checkpoints are removed.
    """
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)
    for path in list(directory.iterdir()):  # Leftovers of killed processes may fill the disk.
        if _TEMPORARY.fullmatch(path.name):
            _remove(path)
    before = newest_first(directory)
    temporary = directory / f".writing-{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        content = write_durable(temporary / STATE, state)
        manifest = Manifest(step, ranks, tuple(parts), content, __version__)
        write_durable(temporary / MANIFEST, [np.frombuffer(manifest.encode(), np.uint8)])
        sync_directory(temporary)
        number = _number(before[0]) + 1 if before else 1
        path = temporary.rename(directory / f"{number:06d}-step-{step}")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(directory)
    # A user's folder may have the name of a checkpoint. Only a checkpoint has a state file.
    for old in [folder for folder in before if os.path.exists(folder / STATE)][keep - 1 :]:
        _remove(old)
    return path


def read_checkpoint(checkpoint: Path) -> tuple[Manifest, Array]:
    """Return the manifest and the verified bytes of the state (uint8)."""
    manifest = Manifest.decode((checkpoint / MANIFEST).read_bytes())
    return manifest, read_durable(checkpoint / STATE, manifest.state)


def newest_first(directory: Path) -> list[Path]:
    """Return the paths in ``directory`` that have names of checkpoints, newest first."""
    try:
        # One listing of a large folder may miss a checkpoint that is replaced at the same time.
        listings = (list(directory.iterdir()) for _ in range(5))
        paths = ([path for path in listing if _NAME.fullmatch(path.name)] for listing in listings)
        return sorted(next(filter(None, paths), []), key=_number, reverse=True)
    except OSError as error:
        nearest = next(entry for entry in (directory, *directory.parents) if os.path.lexists(entry))
        if isinstance(error, FileNotFoundError) and nearest.is_dir():
            return []
        raise OSError(
            f"expected the folder of a run or of a checkpoint, got {directory}: {error}. Pass the "
            "folder that was passed to save, or mount its disk"
        ) from error


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints in ``path``, newest first, or ``[path]`` if it is a checkpoint."""
    siblings = newest_first(path.parent) if _NAME.fullmatch(path.name) else []
    files = [path / MANIFEST, *(checkpoint / STATE for checkpoint in (path, *siblings))]
    return newest_first(path) or [path] * any(map(os.path.exists, files))


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link (not its target). Log a warning if this fails."""
    try:
        if _NAME.fullmatch(path.name):
            # A partly removed folder must not have the name of a checkpoint.
            path = path.rename(path.parent / f".removing-{secrets.token_hex(8)}")
        (shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink)(path)
    except OSError as error:
        _log.warning("[save] rank 0: cannot remove %s: %s. Remove it by hand", path, error)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


class Stateful(Protocol):
    """An object with a state, such as a module, an optimizer or a sampler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: dicts, lists, tuples, arrays, numbers, strings, None."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore ``state``."""


class _Several:
    """A list or dict of objects that is passed as one part, for example two optimizers."""

    def __init__(self, parts: Mapping[Any, Stateful] | Sequence[Stateful]) -> None:
        items = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
        self.parts = {str(name): part for name, part in items}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Any) -> None:
        if state.keys() != self.parts.keys():
            raise ValueError(f"expected the parts {sorted(self.parts)}, got {sorted(state)}")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
        except ValueError as error:
            error.args = (f"{name!r}: {error}",)
            raise


# Path, manifest, and texts about newer checkpoints that were skipped (see ``Checkpoint``).
Intact: TypeAlias = tuple[Path, Manifest, tuple[str, ...]]
Part: TypeAlias = Stateful | Mapping[str, Stateful] | Sequence[Stateful]


@internal.in_step()
def save(
    path: str | os.PathLike[str], module: Part | None = None, *, optimizer: Part | None = None,
    sampler: Part | None = None, schedule: Part | None = None, rng: Any = None, step: int = 0,
    extra: Any = None, keep: int = 3, group: ProcessGroup | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint into the directory ``path``, and return the path of the checkpoint.

    Collective, blocking. Rank 0 writes its own module, optimizer, sampler, schedule and extra,
    which are the same on all ranks in data-parallel training. The random state of every rank is
    saved. When the function returns on any rank, the checkpoint is on the disk of rank 0. If the
    machine stops earlier, the previous checkpoints are still complete.

    A checkpoint is a directory ``<number>-step-<step>``. It contains ``state.safetensors``, which
    other tools can read, and ``manifest.json`` with lengths and digests. The directory is renamed
    to this name when its content is on the disk. Pickle is not used, and CuPy arrays are copied to
    the host. Only one job at a time may save into a directory.

    Args:
        path: Directory, created if it does not exist. The path of rank 0 is used.
        module: Object with ``state_dict()`` and ``load_state_dict()``, or a list, tuple or dict of
            such objects. Its arrays may have any shape and a boolean, integer, floating (up to 64
            bits), bfloat16 or complex dtype.
        optimizer: Like ``module``, for example ``fl.optim.AdamOptimizer``.
        sampler: Like ``module``, for example ``fl.DistributedSampler``. All ranks must pass
            samplers with equal states.
        schedule: Like ``module``, for example ``fl.optim.CosineAnnealingLR``.
        rng: True to save the state of the package's random numbers (dropout, initialisation). To
            save also your generators, pass a generator of NumPy or CuPy, or a list, tuple or dict.
        step: Step of the training, at least 0, the same on every rank.
        extra: Any other state: dicts, lists, tuples, arrays, numbers, strings, None.
        keep: Number of checkpoints to keep, at least 1. Older checkpoints are removed. If this
            fails, a warning is logged. Other entries of the directory are not removed.
        group: Group that saves together. Default: the world. The other ranks wait while rank 0
            writes, so writing must not take longer than the timeout of the group.

    Raises:
        TypeError: If an argument has the wrong type, or contains an object that cannot be saved.
        ValueError: If ``step`` or ``keep`` is too small.
        MismatchError: If the ranks pass different steps, parts or states of samplers. Every rank
            raises, and nothing is written.
        CheckpointError: If rank 0 cannot write, for example to a full disk. Every rank raises.
        DistributedError: As :func:`flashlight_py.all_reduce`.

    Example:
        >>> import tempfile
        >>> model, folder = fl.nn.Linear(3, 2), tempfile.mkdtemp()
        >>> fl.save(folder, module=model, step=10).name
        '000001-step-10'
        >>> fl.load(folder, module=model).step
        10
    """
    internal.check_integer("save", "step", step)
    internal.check_integer("save", "keep", keep, least=1)
    passed = {"module": module, "optimizer": optimizer, "sampler": sampler, "schedule": schedule}
    parts = check_parts("save", rng, **passed)
    step = int(step)  # JSON accepts only Python's integers, not NumPy's
    members = internal.group_or_world(group)
    states: dict[str, Any] = {}
    numbers = np.empty(0, np.uint8)  # random states of this rank, encoded as safetensors
    settings = {"step": step, "parts": sorted(parts), "rng": bool(rng)}
    with Attempt("save", members) as attempt:
        states = {name: part.state_dict() for name, part in parts.items()}
        if rng:
            numbers = np.concatenate(list(pieces(generator_states(rng))))
        settings["sampler"] = json.dumps(flatten_tree(states.get("sampler"))[0], sort_keys=True)
        flatten_tree({"extra": extra})  # raises if extra cannot be saved
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
    """A loaded checkpoint: its step, its path on rank 0, and the saved ``extra``.

    ``ranks`` is the number of ranks that saved it. ``skipped`` has one text for each newer
    checkpoint that could not be used. The text contains the reason.
    """

    step: int
    path: Path
    extra: Any
    ranks: int
    skipped: tuple[str, ...] = ()


@internal.in_step()
def load(
    path: str | os.PathLike[str], module: Part | None = None, *, optimizer: Part | None = None,
    sampler: Part | None = None, schedule: Part | None = None, rng: Any = None,
    group: ProcessGroup | None = None,
) -> Checkpoint | None:  # fmt: skip
    """Continue from the newest intact checkpoint in the directory ``path``.

    Collective, blocking. Only rank 0 reads, and it broadcasts the state, so the other ranks need no
    access to ``path``. If a checkpoint is truncated or damaged, the logger ``flashlight_py`` warns
    with the reason, and the previous checkpoint is used. If another job replaces a checkpoint
    during the call, the newer one is used. ``path`` may also be a single intact checkpoint.

    Arrays are copied into the arrays of the module and the optimizer, in place, also to another
    device. The number of ranks may differ from the number that saved. If a rank has no saved random
    state, it keeps its state and logs a warning. The call needs as much memory as the checkpoint
    has bytes.

    Args:
        path: Directory that was passed to :func:`flashlight_py.save`. The path of rank 0 is used.
        module: Module whose parameters have the same names and shapes as when it was saved, or a
            list, tuple or dict of modules as passed to ``save``. None: no module is loaded.
        optimizer, sampler, schedule: Objects of the same kind as the saved objects, with the same
            structure as in ``save``. None: not loaded. ``schedule`` must belong to ``optimizer``.
        rng: The value passed to ``save``. The states of these generators and of the package's
            random numbers are restored. If ``module`` was distributed with ``leaves``, every rank
            gets the states of rank 0. None: no random state is restored.
        group: Group that loads together. Default: the world.

    Returns:
        A ``Checkpoint`` with the step and the saved ``extra``. None if the directory does not exist
        or contains no checkpoint.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a requested part was not saved or does not match (shape or number of
            parameters). Earlier parts, in the order of the arguments, have then been changed.
        MismatchError: If the ranks load different parts. Every rank raises; nothing is changed.
        CheckpointError: If there are checkpoints but none is intact, or ``path`` is a file, cannot
            be read, or is a broken link (a disk that is not mounted). Every rank raises.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    passed = {"module": module, "optimizer": optimizer, "sampler": sampler, "schedule": schedule}
    parts = check_parts("load", rng, **passed)
    members = internal.group_or_world(group)
    part_names = [*parts, *(["rng"] if rng else [])]
    Attempt("load", members).agree({"parts": part_names})
    intact: Intact | None = None
    state = np.empty(0, np.uint8)
    with Attempt("load", members) as attempt:
        if members.rank == 0:
            intact, state = _newest_intact(Path(path), context_of("load", members))
            saved = part_names if intact is None else intact[1].parts
            if intact and (lacking := [part for part in part_names if part not in saved]):
                raise ValueError(
                    f"load: expected {' and '.join(lacking)} in {intact[0]}, got a checkpoint with "
                    f"{', '.join(saved) or 'no part'}. Pass only saved parts"
                )
    failure, intact = members.broadcast_object((attempt.failure, intact))
    attempt.end([failure])
    if intact is None:
        return None
    directory, manifest, skipped = intact
    content = state if members.rank == 0 else np.empty(manifest.state.nbytes, np.uint8)
    state = members.broadcast(content)  # if it fails, all ranks raise, so no Attempt is needed
    tree: dict[str, Any] = {}
    with Attempt("load", members) as attempt:
        tree = from_bytes(state)
        _restore(members, directory, tree, parts, rng)
    attempt.share()
    return Checkpoint(manifest.step, directory, tree["extra"], manifest.ranks, skipped)


def _newest_intact(path: Path, context: str) -> tuple[Intact | None, Array]:
    """Return the newest intact checkpoint and the bytes of its state (uint8).

    If no checkpoint exists, return None and no bytes. If all are damaged, raise CheckpointError.
    Log a warning for each damaged checkpoint that is newer than the returned one.
    """
    reasons: dict[Path, str] = {}
    # The folder is listed again after each failure, because a job may have replaced the checkpoint.
    while untried := [entry for entry in checkpoints_in(path) if entry not in reasons]:
        newest = untried[0]
        try:
            manifest, state = read_checkpoint(newest)
        except (OSError, ValueError) as error:
            reasons[newest] = f"{newest.name}: {error}"
            continue
        skipped = tuple(text for path_tried, text in reasons.items() if os.path.lexists(path_tried))
        text = "%s: checkpoint skipped: %s. %s is used instead"
        for reason in skipped:
            _log.warning(text, context, reason, newest.name)
        return (newest, manifest, skipped), state
    if reasons:
        raise errors.CheckpointError(
            f"{context}: expected an intact checkpoint at {path}, got {len(reasons)} checkpoint(s) "
            f"that cannot be used: {'; '.join(reasons.values())}. Restore one from a backup, or "
            "pass another folder to start a new run"
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
    source_rank = 0 if any(map(is_leaf_by_leaf, modules)) else members.rank
    if not rng:
        return
    if source_rank >= len(of_ranks):
        text = "%s: the checkpoint has random states of %d rank(s) only; this rank keeps its state"
        _log.warning(text, context_of("load", members), len(of_ranks))
        return
    named, saved = _generators_by_name(rng), of_ranks[source_rank]["given"]
    if named.keys() != saved.keys():
        raise ValueError(
            f"load: expected rng with the saved generators {sorted(saved)}, got {sorted(named)}. "
            "Pass the same generators as to save"
        )
    for name, generator in named.items():
        random.set_state_of(generator, saved[name])
    random.load_state_dict(of_ranks[source_rank]["package"])


def check_parts(operation: str, rng: object, **parts: Part | None) -> dict[str, Stateful]:
    """Return the parts that are not None; raise TypeError if a part or ``rng`` has a wrong type."""
    parts_by_name: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
    nested_parts: dict[str, Any] = {}
    for name, part in list(parts_by_name.items()):
        if part and isinstance(part, (list, tuple, dict)):
            several = parts_by_name[name] = _Several(part)
            nested_parts |= {f"{name} {at!r}": nested for at, nested in several.parts.items()}
    for name, part in {**parts_by_name, **nested_parts}.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(part, method, None)):
                kind = type(part).__name__
                raise TypeError(f"{operation}: {name} must have {method}(), got a {kind}")
    if rng is not None:
        try:
            generator_states(rng)
        except TypeError as error:
            raise TypeError(f"{operation}: rng: {error}") from error
    return parts_by_name


def context_of(operation: str, group: ProcessGroup) -> str:
    return f"[{operation}] rank {group.rank} of {group.size}"


class Attempt:
    """Context manager that catches an exception and raises it after all ranks are notified."""

    def __init__(self, operation: str, group: ProcessGroup) -> None:
        self._operation, self._group = operation, group
        self._error: Exception | None = None

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._error = error if isinstance(error, Exception) else None
        return self._error is not None

    @property
    def failure(self) -> list[str] | None:
        """Class name and text of the exception that the block raised, or None if it raised none."""
        return None if self._error is None else [type(self._error).__name__, str(self._error)]

    def share(self, value: object = None) -> list[Any]:
        """Return the ``value`` of every rank, or raise on all ranks if a rank has failed.

        Collective, blocking. Raises the errors of :meth:`end`. If a rank ends or does not call this
        before the timeout, the other ranks raise PeerLostError or CollectiveTimeoutError.
        """
        sent = json.dumps([self.failure, value]).encode()
        call = next(call for call in internal.COMPOSED if call.startswith(f"{self._operation}("))
        try:
            texts = internal.exchange_bytes(self._group.backend(), sent, call)
        except (errors.PeerLostError, errors.CollectiveTimeoutError) as error:
            error.args = (f"{context_of(self._operation, self._group)}: in {call}: {error}",)
            raise
        of_ranks = [json.loads(text) for text in texts]
        self.end([failure for failure, _ in of_ranks])
        return [value for _, value in of_ranks]

    def agree(self, value: Mapping[str, Any]) -> None:
        """Raise MismatchError if ``value`` differs between ranks. Collective, blocking."""
        if differing := differences(self.share(value)):
            raise errors.MismatchError(
                f"{context_of(self._operation, self._group)}: expected equal arguments on every "
                f"rank, got {', '.join(differing)}. Nothing was done. Pass equal arguments"
            )

    def end(self, failures: Sequence[Any]) -> None:
        """Raise an exception if any rank failed. ``failures[r]`` is the ``failure`` of rank r.

        If this rank caught a TypeError, ValueError or CheckpointError, it raises this exception.
        Otherwise it raises the TypeError or ValueError of the first failed rank. If that rank
        caught an exception of another class, this rank raises CheckpointError.
        """
        if isinstance(self._error, TypeError | ValueError | errors.CheckpointError):
            raise self._error
        for rank, failure in enumerate(failures):
            if failure:
                kind, text = failure
                error = _KINDS.get(kind, errors.CheckpointError)
                context = context_of(self._operation, self._group)
                raise error(f"{context}: rank {rank} failed: {kind}: {text}") from self._error


def generator_states(rng: object) -> dict[str, Any]:
    """Return the states of the package's generators and of the generators in ``rng``."""
    user_states = {name: random.state_of(x) for name, x in _generators_by_name(rng).items()}
    return {"package": random.state_dict(), "given": user_states}


def _generators_by_name(rng: object) -> dict[str, Any]:
    if rng is True:
        return {}
    if isinstance(rng, Mapping):
        return {str(name): generator for name, generator in rng.items()}
    generators = list(rng) if isinstance(rng, list | tuple) else [rng]
    return {str(number): generator for number, generator in enumerate(generators)}
