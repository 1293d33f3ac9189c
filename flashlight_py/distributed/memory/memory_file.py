"""Files in memory that several processes of one user map. No file outlives its processes.

If the processes see each other in /proc, the file has no name (``memfd_create``), and the kernel
frees it after the last process. Containers of one pod often share /dev/shm but not /proc. For them,
the file has a name in /dev/shm until all processes have mapped it. If the process that created the
file is killed before that, a later job removes the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
    is_link = path.startswith("/proc/")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC if is_link else _FLAGS)
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
