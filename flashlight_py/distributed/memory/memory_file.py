"""Memory that several processes of one user map: files that leave nothing behind.

If the processes see each other, it is a file without a name (``memfd_create``), which ends with the
last of them. Containers of one pod share /dev/shm, but often not their processes: there the file
has a name until all have mapped it, and the next such file removes those of killed owners.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flashlight_py.distributed.rendezvous.store import Store, boot_id_and_namespace
from flashlight_py.errors import DistributedError, OutOfMemoryError, UnavailableEverywhereError

DIRECTORY = Path("/dev/shm")
_PREFIX = "flashlight-"
# A file this young, in seconds, may belong to somebody who is about to lock it.
_YOUNG = 60.0


def process_space() -> str:
    """Return a text that is equal for processes of one kernel that see each other in /proc.

    Empty if other processes cannot open this one's files there.
    """
    space = boot_id_and_namespace("pid")
    is_open = space and os.stat("/proc/self").st_uid == os.geteuid()  # else it may not be traced
    return space if is_open and hasattr(os, "memfd_create") else ""  # Python may be older than it


def needs_names(spaces: Sequence[str]) -> bool:
    """Return whether processes of these spaces, of one kernel, do not all see each other."""
    kernels = {space.partition(" ")[0] for space in spaces}
    return "" in spaces or len(set(spaces)) > len(kernels)


class MemoryFile:
    """An empty file in memory, which this user's processes open at ``path``, until :meth:`close`.

    Raises OSError if it cannot be made.
    """

    def __init__(self, named: bool) -> None:
        name = f"{_PREFIX}{secrets.token_hex(12)}"
        self._named = named
        if named:
            _remove_orphans()
            self.path = str(DIRECTORY / name)
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            self.fd = os.open(self.path, flags, 0o600)
            fcntl.flock(self.fd, fcntl.LOCK_SH)  # it has an owner that lives
        else:
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
            os.fchmod(self.fd, 0o600)
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Take its name away; memory that is mapped stays."""
        if self._named:
            Path(self.path).unlink(missing_ok=True)
        os.close(self.fd)


@contextlib.contextmanager
def open_memory(path: str) -> Iterator[int]:
    """Open another process's file. Raises OSError if it is missing, or of another user."""
    without_links = 0 if path.startswith("/proc/") else os.O_NOFOLLOW
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | without_links)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} belongs to somebody else")
        yield fd
    finally:
        os.close(fd)


def _remove_orphans() -> None:
    """Remove this user's files whose owners have died between making and mapping them."""
    for path in DIRECTORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime <= _YOUNG:
                continue
            with open_memory(str(path)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an owner that lives shares it
                path.unlink()


def map_together(store: Store, map_path: Callable[[str, bool], Any], named: bool) -> Any:
    """Have rank 0 make a file in memory and every rank map it. Collective; two exchanges.

    ``map_path(path, create)`` raises OSError if it fails; ``named``: the file needs a name,
    which it has until all have mapped it. Every rank raises OutOfMemoryError if a rank lacks
    memory, and UnavailableEverywhereError if a rank cannot map the file for another reason.
    """
    mapped, file, path, error = None, None, "", ("", "")
    try:
        if store.rank == 0:
            file, error = _attempt(lambda: MemoryFile(named))
            if not any(error):
                mapped, error = _attempt(lambda: map_path(file.path, True))
        mine = json.dumps(["" if file is None else file.path, any(error)])
        path, has_failed = json.loads(store.exchange(mine.encode())[0])
        if not has_failed and store.rank != 0:
            mapped, error = _attempt(lambda: map_path(path, False))
        _raise_together(store, error)
    finally:  # also where a rank was lost meanwhile, or a signal handler raised
        if file is not None:
            file.close()
        elif path and named:
            # As soon as all have mapped it, so nothing can be left behind, also by kill -9; and for
            # a rank 0 that has died.
            Path(path).unlink(missing_ok=True)
    return mapped


def made_together(store: Store, make: Callable[[], Any]) -> Any:
    """Return what ``make`` does, if every rank can make it: else raise as ``map_together``."""
    made, error = _attempt(make)
    _raise_together(store, error)
    return made


def _attempt(do: Callable[[], Any]) -> tuple[Any, tuple[str, str]]:
    """Return what ``do`` does; or why it failed, for lack of memory and otherwise."""
    try:
        return do(), ("", "")
    except OutOfMemoryError as error:
        return None, (error.lack, "")
    except DistributedError:  # some are OSErrors; the others would not be there either
        raise
    except (OSError, MemoryError) as error:
        text = str(error) or repr(error)
        is_memory = isinstance(error, MemoryError) or error.errno == errno.ENOMEM
        return None, (text, "") if is_memory else ("", text)


def _raise_together(store: Store, error: tuple[str, str]) -> None:
    """Raise what ``map_together`` does if a rank has an ``error`` of ``_attempt``. Collective."""
    answers = [answer.decode().split("\0") for answer in store.exchange("\0".join(error).encode())]
    lacks, others = (
        "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        for texts in zip(*answers, strict=True)
    )
    if lacks:
        words = f"rank {store.rank} of {store.size}: there is not enough memory. {lacks}"
        error_of_all = OutOfMemoryError(words)
        error_of_all.lack = error[0]  # others add their ranks, by the numbers of a larger group
        raise error_of_all
    if others:
        raise UnavailableEverywhereError(
            f"shared memory cannot be used: {others}. Give it more room (a container "
            f"needs more memory, or its {DIRECTORY} more space: docker run --shm-size=1g)"
        )
