"""What the file system of a rendezvous folder must keep, tried out there.

The rendezvous by file needs no locks and no links: a file is created exclusively, becomes visible
by a rename, whole, and is found by listing. What hosts see of each other's files cannot be tried
from one; a network file system is named, so that it is known.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashlight_py.doctor.finding import Finding, State

RIVALS, ROUNDS = 4, 8
_REMEDY = "choose for FILE_PATH a folder on another file system, such as a home directory on NFS"
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "panfs")


def look(folder: Path) -> Iterator[Finding]:
    """Report which file system ``folder`` is on, and whether it keeps each promise."""
    try:
        with tempfile.TemporaryDirectory(prefix=".flashlight-doctor-", dir=folder) as inside:
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
            kind, mount = file_system_of(folder.resolve(), mounts)
            network = kind.startswith(_NETWORK)
            whose = "several hosts" if network else "the ranks of this host, unless others mount it"
            yield Finding("file system", State.OK, f"{kind}, mounted at {mount}: for {whose}")
            for name, (promise, broken) in PROMISES.items():
                try:
                    problem = broken(Path(tempfile.mkdtemp(dir=inside)))
                except OSError as error:
                    problem = str(error)
                failed = Finding(name, State.FAILED, problem, _REMEDY)
                yield failed if problem else Finding(name, State.OK, promise)
    except OSError as error:
        remedy = "FILE_PATH needs a folder that exists and that every rank may write to"
        yield Finding("writable", State.FAILED, str(error), remedy)


def _create(file: Path, content: bytes = b"") -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o600), "wb") as stream:
        stream.write(content)


def _many_creators(folder: Path) -> str:
    barrier = threading.Barrier(RIVALS)

    def created(file: Path) -> bool:
        barrier.wait()
        try:
            _create(file)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(RIVALS) as rivals:
        for number in range(ROUNDS):
            winners = sum(rivals.map(created, [folder / str(number)] * RIVALS))
            if winners != 1:
                return f"{winners} of {RIVALS} created the same file with O_EXCL, expected 1"
    return ""


def _partial_rename(folder: Path) -> str:
    content, temporary = os.urandom(100_000), folder / "temporary"
    for number in range(ROUNDS):
        _create(temporary, content)  # fails if the old name is there still
        if temporary.rename(folder / str(number)).read_bytes() != content:
            return "a file that was renamed holds something else than was written"
    return ""


def _late_listing(folder: Path) -> str:
    names = {str(number) for number in range(ROUNDS)}
    for name in names:
        _create(folder / name)
    if set(os.listdir(folder)) != names:
        return f"{ROUNDS} new files, and the listing has {len(os.listdir(folder))}"
    for name in names:
        (folder / name).unlink()
    return "removed files are still listed" if os.listdir(folder) else ""


def _others_files(folder: Path) -> str:
    _create(folder / "first")
    _create(folder / "second")
    first, second = ((folder / name).stat() for name in ("first", "second"))
    if first.st_uid != second.st_uid:
        return f"our files belong to users {first.st_uid} and {second.st_uid}"
    if first.st_mode & 0o077:
        return f"others may read our files: mode {first.st_mode & 0o777:o}, 600 was asked for"
    return ""


# What is needed, by name: in words, and a function of an empty folder that returns how the promise
# was broken there, or "".
PROMISES = {
    "exclusive create": (f"of {RIVALS} that create a file at once, one succeeds", _many_creators),
    "rename": ("a file appears with all of its content", _partial_rename),
    "listing": ("a new file is listed, and a removed one is not", _late_listing),
    "ownership": ("new files are ours alone to read and write", _others_files),
}


def file_system_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return the kind of file system that ``path`` is on, and where it is mounted (proc(5))."""
    found = ("unknown", "/")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) >= len(found[1]):
            found = (after.split()[0], mount)
    return found
