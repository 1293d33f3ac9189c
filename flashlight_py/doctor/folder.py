"""What the file system of a rendezvous folder must keep, tried out there.

The rendezvous by file needs no locks and no links: a file is created exclusively, becomes visible
by a rename, whole, and is found by listing. What hosts see of each other's files cannot be tried
from one; a network file system is named, so that it is known.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flashlight_py.doctor.finding import Finding, State

__all__ = ["look", "promises"]

RIVALS, ROUNDS = 4, 8
_REMEDY = "give FILE_PATH a folder on another file system, such as a home directory on NFS"
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "panfs")


def look(folder: Path) -> Iterator[Finding]:
    """Tell which file system ``folder`` is on, and whether it keeps each promise."""
    try:
        with tempfile.TemporaryDirectory(prefix=".flashlight-doctor-", dir=folder) as inside:
            yield _file_system(folder)
            for name, keep in promises().items():
                yield _tried(name, keep, Path(inside))
    except OSError as error:
        remedy = "FILE_PATH needs a folder that exists and that every rank may write to"
        yield Finding("writable", State.FAILED, str(error), remedy)


def promises() -> dict[str, Callable[[Path], str]]:
    """Return what is needed, by name: functions of a folder; "" is kept, else what happened."""
    return {
        "exclusive create": _one_creator,
        "rename": _whole_or_absent,
        "listing": _listed_at_once,
        "ownership": _own_files,
    }


def _tried(name: str, keep: Callable[[Path], str], folder: Path) -> Finding:
    inside = folder / name.replace(" ", "-")
    inside.mkdir()
    try:
        problem = keep(inside)
    except OSError as error:
        problem = str(error)
    return Finding(name, State.FAILED, problem, _REMEDY) if problem else _KEPT[name]


_KEPT = {
    name: Finding(name, State.OK, detail)
    for name, detail in {
        "exclusive create": f"of {RIVALS} that create a file at once, one succeeds",
        "rename": "a file appears with all of its content",
        "listing": "a new file is listed, and a removed one is not",
        "ownership": "new files are ours alone to read and write",
    }.items()
}


def _create(file: Path, content: bytes = b"") -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o600), "wb") as stream:
        stream.write(content)


def _one_creator(folder: Path) -> str:
    for number in range(ROUNDS):
        winners: list[int] = []
        start = threading.Barrier(RIVALS)

        def rival(me: int, file: Path, winners: list[int], start: threading.Barrier) -> None:
            start.wait()
            try:
                _create(file)
            except FileExistsError:
                return
            winners.append(me)

        file = folder / str(number)
        rivals = [
            threading.Thread(target=rival, args=(me, file, winners, start)) for me in range(RIVALS)
        ]
        for each in rivals:
            each.start()
        for each in rivals:
            each.join()
        if len(winners) != 1:
            return f"{len(winners)} of {RIVALS} created the same file with O_EXCL, expected 1"
    return ""


def _whole_or_absent(folder: Path) -> str:
    content = os.urandom(100_000)
    for number in range(ROUNDS):
        temporary, file = folder / "temporary", folder / str(number)
        _create(temporary, content)
        temporary.rename(file)
        if file.read_bytes() != content:
            return "a file that was renamed holds something else than was written"
        if temporary.exists():
            return "a file that was renamed is there under its old name too"
    return ""


def _listed_at_once(folder: Path) -> str:
    names = {str(number) for number in range(ROUNDS)}
    for name in names:
        _create(folder / name)
    if set(os.listdir(folder)) != names:
        return f"{ROUNDS} new files, and the listing has {len(os.listdir(folder))}"
    for name in names:
        (folder / name).unlink()
    return "" if not os.listdir(folder) else "removed files are still listed"


def _own_files(folder: Path) -> str:
    _create(folder / "first")
    _create(folder / "second")
    first, second = ((folder / name).stat() for name in ("first", "second"))
    if first.st_uid != second.st_uid:
        return f"our files belong to users {first.st_uid} and {second.st_uid}"
    if first.st_mode & 0o077:
        return f"others may read our files: mode {first.st_mode & 0o777:o}, 600 was asked for"
    return ""


def _file_system(folder: Path) -> Finding:
    mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    kind, mount = file_system_of(folder.resolve(), mounts)
    if kind.startswith(_NETWORK):
        return Finding("file system", State.OK, f"{kind}, mounted at {mount}: for several hosts")
    detail = f"{kind}, mounted at {mount}: for the ranks of this host, unless others mount it"
    return Finding("file system", State.OK, detail)


def file_system_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return the kind of file system that ``path`` is on, and where it is mounted (proc(5))."""
    found = ("unknown", "/")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) >= len(found[1]):
            found = (after.split()[0], mount)
    return found
