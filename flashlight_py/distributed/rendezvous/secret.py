"""The secret of a job, and how two processes prove to each other that they know it.

The environment has a job's secret: FLASHLIGHT_SECRET, which launchers set, or MASTER_SECRET.
Without one, processes of one host use the user's secret: a file that no other user may read.
Processes of several hosts have none in common then, and all that reach rank 0's port can join.
"""

from __future__ import annotations

import hmac
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.rendezvous.store import Roster
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import is_own

VARIABLES = ("FLASHLIGHT_SECRET", "MASTER_SECRET")
NONCE_BYTES = 32
# Ends a nonce: an HTTP server that listens there by mistake answers an empty line at once.
_LINE_END = b"\r\n\r\n"
FILE_NAME = "flashlight-secret"
REMEDY = (
    "start every rank with the same MASTER_SECRET in its environment, for example from "
    "MASTER_SECRET=$(openssl rand -hex 32)"
)
# O_NONBLOCK: a FIFO that somebody put there must not block the open before fstat sees it.
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def nonce() -> bytes:
    """Return fresh random bytes, which the other side's proof must be made of."""
    return system.random_bytes(NONCE_BYTES - len(_LINE_END)) + _LINE_END


def proof(key: bytes, *facts: bytes) -> bytes:
    """Return 32 bytes that only who knows ``key`` can make of ``facts``: an HMAC of SHA-256."""
    framed = b"".join(len(fact).to_bytes(8, "big") + fact for fact in facts)
    return hmac.digest(key, b"flashlight_py" + framed, "sha256")


def derived_key(payloads: Roster, key: bytes) -> bytes:
    """Return a key that all who know ``key`` and have the same ``payloads`` make alike."""
    return proof(key, payloads.body)


@dataclass(frozen=True)
class Secret:
    """The secret that this process knows. ``source`` says where from, for messages.

    ``given`` is what the environment says, ``of_user`` what the user's processes on this host know.
    ``one_host``: all ranks are known to be on this host.
    """

    given: bytes = field(repr=False)
    of_user: bytes = field(default=b"", repr=False)
    one_host: bool = False
    source: str = ""

    @classmethod
    def find(cls, one_host: bool, environ: Mapping[str, str] = system.environ) -> Secret:
        """Return the secret that ``environ`` (default: ``os.environ``) or else the user's file has.

        Raises RendezvousError if a variable is empty, or the file cannot be made or is not private.
        """
        for name in VARIABLES:
            if name in environ:
                if not environ[name]:
                    raise RendezvousError(f"{name} is set and empty; unset it, or {REMEDY}")
                return cls(os.fsencode(environ[name]), b"", one_host, name)
        try:
            file = folder(environ) / FILE_NAME
            return cls(b"", _read_or_create(file), one_host, str(file))
        except OSError as error:
            raise RendezvousError(
                f"no file can hold the secret of this user's jobs ({error}); {REMEDY}"
            ) from error

    # Both ends bind to the other's address to find out whether they share a host: the user's file
    # is the secret exactly where both can read it, however rank 0's host is called.
    @property
    def common(self) -> bytes:
        """The secret of all ranks; empty where they may be on several hosts without one."""
        return self.given or (self.of_user if self.one_host else b"")

    def key(self, other: tuple[Any, ...]) -> bytes:
        """Return what this process and the one at the socket address ``other`` both know."""
        # To compare it with our own end's is not enough: a client may choose any of its host's.
        return self.common or (self.of_user if is_own(other[0], other[2:]) else b"")


# The file of the user -------------------------------------------------------------------------


def folder(environ: Mapping[str, str]) -> Path:
    """Return the folder that is this user's alone; made among the temporary files if need be.

    Raises RendezvousError if other users may write to the folder or read it.
    """
    user = os.geteuid()
    for name in (environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"):
        if name and os.path.isabs(name) and not _objection(Path(name)):
            return Path(name)
    last = Path(tempfile.gettempdir()) / f"flashlight-{user}"
    with suppress(FileExistsError):
        last.mkdir(mode=0o700)
    if objection := _objection(last):
        raise RendezvousError(
            f"{last}, where the secret of this user's jobs would be, {objection}; remove it, set "
            f"XDG_RUNTIME_DIR to a folder that is yours alone, or {REMEDY}"
        )
    return last


def _objection(path: Path) -> str:
    """Return why ``path`` is no folder of this user alone; empty if it is one."""
    try:
        objection = _not_ours(path.lstat(), stat.S_ISDIR)
        return objection or ("" if os.access(path, os.W_OK | os.X_OK) else "cannot be written to")
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"


def _not_ours(status: os.stat_result, is_kind: Any) -> str:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid():
        return "belongs to another user or is a link or the like"
    return "may be read by other users" if status.st_mode & 0o077 else ""


def create_private(file: Path, content: bytes) -> None:
    """Create ``file`` for this user alone. If that raises OSError, no new file is left."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS, 0o600)
    try:
        with open(descriptor, "wb") as new:
            new.write(content)
    except OSError:
        file.unlink(missing_ok=True)  # on a full disk there is room for its name alone
        raise


def _read_or_create(file: Path) -> bytes:
    """Return what ``file`` holds. The first process makes it; it appears whole or not at all."""
    if not os.path.lexists(file):
        temporary = file.with_name(f"{file.name}.{system.random_bytes(8).hex()}")
        try:
            create_private(temporary, system.random_bytes(NONCE_BYTES).hex().encode())
            with suppress(FileExistsError):  # another process was first
                os.link(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    with open(os.open(file, os.O_RDONLY | FLAGS), "rb") as there:
        objection = _not_ours(os.fstat(there.fileno()), stat.S_ISREG)
        content = there.read(4 * NONCE_BYTES)
    if not objection and len(content) != 2 * NONCE_BYTES:
        objection = "is damaged"
    if objection:
        raise RendezvousError(
            f"{file}, with the secret of this user's jobs, {objection}; remove it"
        )
    return content
