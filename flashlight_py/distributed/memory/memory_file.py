"""Files in memory that several processes of one user map, and checks of the available memory.

No file outlives its processes.

If the processes see each other in /proc, the file has no name (``memfd_create``), and the kernel
frees it after the last process. Containers of one pod often share /dev/shm but not /proc. For them,
the file has a name in /dev/shm until all processes have mapped it. If the process that created the
file is killed before that, a later job removes the file.
"""

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.cores import control_groups
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.verbs import BARRIER

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from flashlight_py import system
from flashlight_py.distributed.rendezvous.store import Store, boot_id_and_namespace
from flashlight_py.errors import DistributedError, OutOfMemoryError, UnavailableEverywhereError

DIRECTORY = Path("/dev/shm" if system.IS_LINUX else tempfile.gettempdir())
# O_TEMPORARY of Windows removes the file when no process has it open. Other systems have locks.
_FLAGS = os.O_RDWR | sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY", "O_TEMPORARY")
)
_PREFIX = "flashlight-"
# Age in seconds at which a file without a lock is removed. A newer file may get its lock soon.
_YOUNG = 60.0


def process_space() -> str:
    """Return a text that is equal for processes of one kernel that see each other in /proc.

    Return "" if other processes cannot open the files of this process in /proc.
    """
    space = boot_id_and_namespace("pid")
    is_open = space and os.stat("/proc/self").st_uid == os.geteuid()  # else /proc denies access
    return space if is_open and hasattr(os, "memfd_create") else ""  # absent in some Pythons


def needs_names(spaces: Sequence[str]) -> bool:
    """Return whether files need names. ``spaces`` has the ``process_space`` of each process."""
    return "" in spaces or len(set(spaces)) > len({space.partition(" ")[0] for space in spaces})


class MemoryFile:
    """An empty file in memory. Other processes of this user can open ``path`` until ``close``.

    Raises OSError if the file cannot be created.
    """

    def __init__(self, named: bool) -> None:
        name = f"{_PREFIX}{secrets.token_hex(12)}"
        self._named = named
        if named:
            _remove_orphans()
            self.path = str(DIRECTORY / name)
            self.fd = os.open(self.path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            if fcntl:
                fcntl.flock(self.fd, fcntl.LOCK_SH)  # locked while a process has it open
        else:
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
            os.fchmod(self.fd, 0o600)
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        if self._named:
            Path(self.path).unlink(missing_ok=True)
        os.close(self.fd)


@contextlib.contextmanager
def open_memory(path: str) -> Iterator[int]:
    """Open the file of another process. Raise OSError if it is missing or of another user."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC if path.startswith("/proc/") else _FLAGS)
    try:
        status = os.fstat(fd)
        if status.st_uid != system.user_id() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a file of this user")
        yield fd
    finally:
        os.close(fd)


def _remove_orphans() -> None:
    """Remove files of this user whose processes died before all ranks had mapped them."""
    for path in DIRECTORY.glob(f"{_PREFIX}*") if fcntl else ():
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime <= _YOUNG:
                continue
            with open_memory(str(path)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if a process has it open
                path.unlink()


def map_together(store: Store, map_path: Callable[[str, bool], Any], named: bool) -> Any:
    """Create a file in memory on rank 0 and map it on every rank. Collective.

    ``map_path(path, create)`` maps the file and raises OSError on failure. If ``named``, the file
    has a name until all ranks have mapped it. Every rank raises OutOfMemoryError if a rank lacks
    memory, and UnavailableEverywhereError if a rank cannot map the file for another reason.
    """
    mapped, file, path, error = None, None, "", ("", "")
    try:
        if store.rank == 0:
            file, error = _attempt(lambda: MemoryFile(named))
            if not any(error):
                mapped, error = _attempt(lambda: map_path(file.path, True))
        offer = json.dumps(["" if file is None else file.path, any(error)])
        path, has_failed = json.loads(store.exchange(offer.encode())[0])
        if not has_failed and store.rank != 0:
            mapped, error = _attempt(lambda: map_path(path, False))
        _raise_together(store, error)
    finally:  # runs even if another rank dies or a signal handler raises
        if file is not None:
            file.close()
        elif path and named:
            # No rank needs the name any more. Rank 0 may be dead, so every rank removes it.
            Path(path).unlink(missing_ok=True)
    return mapped


def made_together(store: Store, make: Callable[[], Any]) -> Any:
    """Return ``make()`` if it succeeds on every rank; otherwise raise like ``map_together``."""
    result, error = _attempt(make)
    _raise_together(store, error)
    return result


def _attempt(do: Callable[[], Any]) -> tuple[Any, tuple[str, str]]:
    """Return ``do()`` and a pair of error texts: for lack of memory, and for another error."""
    try:
        return do(), ("", "")
    except OutOfMemoryError as error:
        return None, (error.lack, "")
    except DistributedError:  # ``do`` has failed in another way
        raise
    except (OSError, MemoryError) as error:
        text = str(error) or repr(error)
        is_memory = isinstance(error, MemoryError) or error.errno == errno.ENOMEM
        return None, (text, "") if is_memory else ("", text)


def _raise_together(store: Store, error: tuple[str, str]) -> None:
    """Exchange the error texts of all ranks, and raise as ``map_together`` does. Collective."""
    answers = [answer.decode().split("\0") for answer in store.exchange("\0".join(error).encode())]
    shortages, failures = (
        "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        for texts in zip(*answers, strict=True)
    )
    if shortages:
        text = f"rank {store.rank} of {store.size}: there is not enough memory. {shortages}"
        group_error = OutOfMemoryError(text)
        group_error.lack = error[0]  # so that the caller can raise again, with its own rank number
        raise group_error
    if failures:
        raise UnavailableEverywhereError(
            f"shared memory cannot be used: {failures}. Give the container more "
            f"memory, or its {DIRECTORY} more space (docker run --shm-size=1g)"
        )


ROOT = Path("/")  # parent of /proc and /sys; tests replace it

# Number of bytes (all ranks of a host) below which no check is made. A check takes 0.1 ms.
LITTLE = 64 << 20
# Fraction of the available memory that remains free for other needs.
_RESERVE = 1 / 20
# Bytes that are allocated after one check. Other processes may allocate meanwhile.
_CHUNK_BYTES = 256 << 20

# For control groups of version 2 and 1: file of the limit, file of the used bytes, and prefix of
# names in memory.stat.
_FILES = [
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
]


def available(ranks: int = 1) -> tuple[int, str]:
    """Return the number of bytes that this process may still allocate, and the limiting resource.

    The memory of the machine is divided by ``ranks``, the number of processes that each allocate as
    much. The limits of control groups are not divided. File caches count as free. Free swap counts
    too, but not for control groups.
    """
    free: list[tuple[int, str]] = _if_known(_of_machine, ranks)
    for limit in _limits(ROOT):
        free += _if_known(_of_group, *limit)
    return min(free, default=(sys.maxsize, "no limit is known"))


def require_memory(nbytes: int, purpose: str, ranks: int = 1) -> None:
    """Raise MemoryError with ``purpose`` if ``ranks`` processes cannot get ``nbytes`` each."""
    if nbytes * ranks < LITTLE:
        return
    if nbytes >= 16 * LITTLE:  # read the limits again (1 ms)
        _limits.cache_clear()
    free, limit = available(ranks)
    if nbytes > free * (1 - _RESERVE):
        raise MemoryError(
            f"{purpose}: {nbytes:,} bytes are needed, and {max(free, 0):,} are available "
            f"({limit}), of which {_RESERVE:.0%} stay free. Use less memory, start fewer ranks on "
            "this host, or give the job more memory (docker run --memory, srun --mem)"
        )


def ordinary_empty(shape: tuple[int, ...], dtype: np.dtype[Any], ranks: int = 1) -> Array:
    """Return ``numpy.empty``. Raise MemoryError if the host has too little for ``ranks`` arrays."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes * ranks >= LITTLE:  # no text is built for small arrays
        require_memory(nbytes, f"an array of {dtype} {shape}", ranks)
    return np.empty(shape, dtype)


def shared_arrays(backend: Backend, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
    """Return the new, uninitialised arrays of all ranks, in memory that all ranks map. Collective.

    If the ranks of ``backend`` share no memory, return a list with one ordinary array. If memory is
    short, only this rank raises MemoryError, and the caller must notify the other ranks.
    """
    if backend.shared_by_all is not None:
        return backend.shared_by_all(shape, dtype)  # type: ignore[no-any-return]
    backend.start(Call(BARRIER, part_of="shared_empty")).wait()
    return [ordinary_empty(shape, dtype)]


def shared_array(backend: Backend, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    arrays = shared_arrays(backend, shape, dtype)
    return arrays[backend.rank if len(arrays) > 1 else 0]


def reserve(fd: int, nbytes: int, purpose: str) -> None:
    """Extend the file in memory ``fd`` to ``nbytes``, and allocate its pages.

    Without this, the kernel could kill a process that writes to the file. Raises MemoryError like
    ``require_memory``, and OSError if the file system is too small. The file then does not change.
    """
    before = os.fstat(fd).st_size
    if hasattr(os, "fstatvfs"):
        system = os.fstatvfs(fd)
        free = system.f_bavail * system.f_frsize if system.f_blocks else nbytes
        if nbytes - before > free:
            raise OSError(errno.ENOSPC, f"{purpose}: {nbytes:,} bytes are needed, {free:,} free")
    try:
        for start in range(before, nbytes, _CHUNK_BYTES):
            require_memory(nbytes - start, purpose)
            count = min(_CHUNK_BYTES, nbytes - start)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, start, count)
            else:
                os.lseek(fd, start, os.SEEK_SET)
                os.write(fd, bytes(count))
    except BaseException:
        os.ftruncate(fd, before)
        raise


def _of_machine(ranks: int) -> tuple[int, str]:
    table = _numbers(ROOT / "proc/meminfo")
    nbytes = 1024 * (int(table["MemAvailable:"]) + int(table.get("SwapFree:", 0)))
    shared = f", by each of {ranks} ranks" if ranks > 1 else ""
    return nbytes // ranks, f"MemAvailable of /proc/meminfo{shared}"


def _of_group(group: Path, limit: int, name: str, used: str, caches: str) -> tuple[int, str]:
    stat = _numbers(group / "memory.stat")
    cached = sum(int(stat.get(f"{caches}{kind}_file", 0)) for kind in ("inactive", "active"))
    return limit - int((group / used).read_text()) + cached, f"{name} of the control group {group}"


@functools.lru_cache(maxsize=1)
def _limits(root: Path) -> list[tuple[Path, int, str, str, str]]:
    """Return the control groups of this process whose limit is below the memory of the machine."""
    machine = _if_known(lambda: 1024 * int(_numbers(root / "proc/meminfo")["MemTotal:"]))
    limits = []
    for group, (name, used, caches) in itertools.product(control_groups(root), _FILES):
        values = _if_known(lambda file: int(file.read_text()), group / name)
        limits += [(group, limit, name, used, caches) for limit in values]
    return [limit for limit in limits if limit[1] < min(machine, default=sys.maxsize)]


def _numbers(path: Path) -> dict[str, str]:
    return dict(itertools.pairwise(path.read_text().split()))


def _if_known(read: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return ``[read(*arguments)]``, or [] if the value cannot be read."""
    try:
        return [read(*arguments)]
    # A file or a line may be missing, and a limit may be "max". Such a value counts as no limit: an
    # error on only one rank would block the other ranks.
    except (OSError, ValueError, KeyError, IndexError):
        return []
