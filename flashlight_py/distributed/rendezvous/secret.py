"""The secret of a job, and how two processes prove to each other that they know it.

The job's secret is in the environment: FLASHLIGHT_SECRET, which launchers set, or MASTER_SECRET.
Without these variables, processes of one host use the user's secret, a file that no other user may
read. Processes of several hosts then have no secret, and any process that reaches rank 0 can join.
"""

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
# End of a nonce. If the listener is an HTTP server, it answers this empty line immediately.
_LINE_END = b"\r\n\r\n"
FILE_NAME = "flashlight-secret"
REMEDY = (
    "start every rank with the same MASTER_SECRET in its environment, for example from "
    "MASTER_SECRET=$(openssl rand -hex 32)"
)
# O_NONBLOCK: opening a FIFO must not block before fstat detects it.
FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"))


def nonce() -> bytes:
    """Return new random bytes, which the other side must use in its proof."""
    return system.random_bytes(NONCE_BYTES - len(_LINE_END)) + _LINE_END


def proof(key: bytes, *facts: bytes) -> bytes:
    """Return 32 bytes that prove knowledge of ``key``: an HMAC-SHA-256 of ``facts``."""
    framed = b"".join(len(fact).to_bytes(8, "big") + fact for fact in facts)
    return hmac.digest(key, b"flashlight_py" + framed, "sha256")


def derived_key(payloads: Roster, key: bytes) -> bytes:
    """Return a key that is equal on all processes with the same ``key`` and ``payloads``."""
    return proof(key, payloads.body)


@dataclass(frozen=True)
class Secret:
    """The secret of this process.

    The field ``from_job`` is the job's secret from the environment or its launcher, ``of_user`` the
    secret of the user's processes on this host (b"" if absent). ``one_host`` is True if all ranks
    are on this host. ``source`` says in messages where the secret comes from.
    """

    from_job: bytes = field(repr=False)
    of_user: bytes = field(default=b"", repr=False)
    one_host: bool = False
    source: str = ""

    @classmethod
    def find(cls, one_host: bool, environ: Mapping[str, str] = system.environ) -> "Secret":
        """Return the secret in ``environ`` (default: ``os.environ``), or in the user's file.

        Raises RendezvousError if a variable is empty, or the file cannot be created or is public.
        """
        for name in VARIABLES:
            if name in environ:
                if not environ[name]:
                    raise RendezvousError(f"{name} must not be empty. Unset it, or {REMEDY}")
                return cls(os.fsencode(environ[name]), b"", one_host, name)
        try:
            file = private_folder(environ) / FILE_NAME
            return cls(b"", _read_or_create(file), one_host, str(file))
        except OSError as error:
            raise RendezvousError(
                f"cannot create a file for the secret of this user's jobs ({error}); {REMEDY}"
            ) from error

    # Each end tries to bind to the other end's address. If this works, both ends are on one host
    # and can read the user's file, even if MASTER_ADDR is not a name of the loopback.
    @property
    def common(self) -> bytes:
        """The secret of all ranks; b"" if the job has no secret and may use several hosts."""
        return self.from_job or (self.of_user if self.one_host else b"")

    def key(self, other: tuple[Any, ...]) -> bytes:
        """Return the secret shared with the process at the socket address ``other``."""
        # A comparison with the own address is not enough: a client may use any address of its host.
        return self.common or (self.of_user if is_own(other[0], other[2:]) else b"")


def private_folder(environ: Mapping[str, str]) -> Path:
    """Return a private folder of this user; created in the temporary folder if needed.

    Raises RendezvousError if other users may read or write the folder.
    """
    user = system.user_id()
    for name in (environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"):
        if name and os.path.isabs(name) and not _folder_problem(Path(name)):
            return Path(name)
    last = Path(tempfile.gettempdir()) / f"flashlight-{user}"
    with suppress(FileExistsError):
        last.mkdir(mode=0o700)
    if problem := _folder_problem(last):
        raise RendezvousError(
            f"{last}, the folder for the secret of this user's jobs, {problem}. Remove the folder, "
            f"set XDG_RUNTIME_DIR to a private folder, or {REMEDY}"
        )
    return last


def _folder_problem(path: Path) -> str:
    """Return why ``path`` is not a private, writable folder of this user, or ""."""
    try:
        problem = _ownership_problem(path.lstat(), stat.S_ISDIR)
        return problem or ("" if os.access(path, os.W_OK | os.X_OK) else "is not writable")
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _ownership_problem(status: os.stat_result, is_kind: Any) -> str:
    if not is_kind(status.st_mode) or status.st_uid != system.user_id():
        return "belongs to another user or is a link"
    # On Windows, the mode says nothing, and other users cannot read the temporary folder.
    is_public = status.st_mode & 0o077 and hasattr(os, "geteuid")
    return "may be read by other users" if is_public else ""


def create_private(file: Path, content: bytes) -> None:
    """Create ``file`` for this user only. If it raises OSError, no new file remains."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS, 0o600)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(content)
    except OSError:
        file.unlink(missing_ok=True)  # on a full disk, an empty file may exist
        raise


def _read_or_create(file: Path) -> bytes:
    """Return the content of ``file``. The first process creates it atomically."""
    if not os.path.lexists(file):
        temporary = file.with_name(f"{file.name}.{system.random_bytes(8).hex()}")
        try:
            create_private(temporary, system.random_bytes(NONCE_BYTES).hex().encode())
            with suppress(FileExistsError):  # another process was faster
                os.link(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    with open(os.open(file, os.O_RDONLY | FLAGS), "rb") as opened:
        problem = _ownership_problem(os.fstat(opened.fileno()), stat.S_ISREG)
        content = opened.read(4 * NONCE_BYTES)
    if not problem and len(content) != 2 * NONCE_BYTES:
        problem = "is damaged"
    if problem:
        raise RendezvousError(
            f"{file}, with the secret of this user's jobs, {problem}. Remove the file"
        )
    return content
