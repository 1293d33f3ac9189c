"""One readable file per rank: its last calls, and where each of its threads stands."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.calls.call_site import PACKAGE, line_of
from flashlight_py.distributed.failures import journal

FORMAT = "flashlight_py flight record 1"
RECORDS = "FLASHLIGHT_RECORDS"
"""The environment variable with a launcher's pipe: its descriptor and inode. It takes paths."""
# Jobs of this user whose records stay among the temporary files: the newest.
KEPT_JOBS = 16
_PREFIX = "flashlight-trace-"


@dataclass(frozen=True)
class Flight:
    """The folder of this process's file, and its rank, size and job.

    A folder ``chosen`` by the user may be a link or belong to another user.
    """

    folder: Path
    rank: int = 0
    size: int = 1
    job: str = ""
    chosen: bool = False

    @property
    def file(self) -> Path:
        """The file of this rank."""
        return self.folder / f"rank{self.rank}.json"


def new_job() -> str:
    """Return a name that no other job has: the time, and what nobody can guess."""
    begun = time.strftime("%Y%m%d-%H%M%S", time.localtime(system.wall_clock()))
    return f"{begun}-{system.random_bytes(4).hex()}"


def default_folder(job: str) -> Path:
    """Return where a job's records go unless the user has said where."""
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{job}"


def write_record(flight: Flight, reason: str, threads: Sequence[str] | None = None) -> Path:
    """Write or replace this rank's file and return its path.

    ``threads`` are the stacks of the threads in lines, by default those of this moment.

    Raises:
        OSError: it cannot be written, or somebody else has put the folder there.
    """
    text = record_text(flight, reason, stacks() if threads is None else threads)
    path = store_record(flight, text)
    # A launcher that brings the records of several hosts together learns where this one is.
    descriptor, _, inode = system.environ.get(RECORDS, "").partition(":")
    with suppress(OSError, ValueError):  # there is none, or a program in between has closed it
        status = os.fstat(int(descriptor))
        if stat.S_ISFIFO(status.st_mode) and str(status.st_ino) == inode:
            system.write(int(descriptor), f"{flight.rank} {path.absolute()}\n".encode())
    return path


def store_record(flight: Flight, text: str) -> Path:
    """Write ``text`` to the file of ``flight``, whole or not at all; see ``write_record``."""
    flight.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not flight.chosen:
        if _age(flight.folder) is None:
            raise PermissionError(f"{flight.folder} is not a folder of this user's own")
        _remove_oldest(flight.folder.parent)
    # Readers see a whole file or none, also of a rank that dies meanwhile.
    part = flight.folder / f".rank{flight.rank}-{secrets.token_hex(6)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        # In any locale; half a character, as in a file's name, is written as JSON writes it.
        with open(
            os.open(part, flags, 0o600), "w", encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(text)
        part.replace(flight.file)
    finally:
        part.unlink(missing_ok=True)
    return flight.file


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a file holds that ``write_record`` has written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no flight record.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}, and this reads {FORMAT!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no flight record: {error}") from error
    return dict(fields)


def _remove_oldest(among: Path) -> None:
    """Remove the records of all but the newest jobs of this user, so that they cannot pile up."""
    aged = [(age, path) for path in among.glob(f"{_PREFIX}*") if (age := _age(path)) is not None]
    for _, path in sorted(aged)[KEPT_JOBS:]:
        shutil.rmtree(path, ignore_errors=True)  # another rank may be removing it as well


def _age(folder: Path) -> float | None:
    """Return how many seconds ago ``folder`` changed; None: it is gone, or not a folder of ours."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return system.wall_clock() - found.st_mtime if ours else None


def record_text(flight: Flight, reason: str, threads: Sequence[str]) -> str:
    """Return the file's text: JSON with one line for each call and for each line of a stack."""
    now = time.monotonic_ns()
    head = {
        "format": FORMAT,
        "job": flight.job,
        "rank": flight.rank,
        "size": flight.size,
        "host": system.gethostname(),
        "pid": system.getpid(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "reason": reason,
        "program": sys.argv,
        "stands_at": stands_at(),
        "now": now,
        "wall": system.wall_clock(),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    calls = [_readable(record.as_dict(), now) for record in journal.recent()]
    groups = [f"{json.dumps(name)}: {json.dumps(what)}" for name, what in journal.groups().items()]
    lines.append(_block("groups", groups, "{}"))
    lines.append(_block("calls", [json.dumps(call, ensure_ascii=False) for call in calls]))
    lines.append(_block("threads", [json.dumps(line, ensure_ascii=False) for line in threads]))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _readable(fields: dict[str, Any], now: int) -> dict[str, Any]:
    """Say first how the call stands and how long ago it was, for people."""
    started, ended = fields["started"], fields.get("ended")
    state = "failed" if "error" in fields else "running" if ended is None else "ended"
    return {
        "state": state,
        "seconds_ago": round((now - started) / 1e9, 6),
        "seconds": round(((ended or now) - started) / 1e9, 9),
        **fields,
    }


def _block(name: str, values: Sequence[str], ends: str = "[]") -> str:
    rows = ",\n".join(f"  {value}" for value in values)
    return f' "{name}": {ends[0]}\n{rows}\n {ends[1]}'


_RECORDER = str(Path(__file__).parent)
_LIBRARY = str(Path(threading.__file__).parent)


def stacks() -> list[str]:
    """Return where each thread stands, in lines, the innermost last; leaves out the recorder."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        entries = [
            line
            for entry in traceback.extract_stack(frame)
            if not entry.filename.startswith(_RECORDER)
            for line in "".join(traceback.format_list([entry])).rstrip().splitlines()
        ]
        lines += [f"Thread {names.get(ident, ident)} (most recent call last):", *entries]
    del frame  # this one, or one that it stands in: a cycle
    return lines


def stands_at() -> str:
    """Return the line of user code that the main thread is on, as "folder/file.py:12 in f"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = frame.f_code.co_filename
        is_installed = not path.startswith(_LIBRARY) or "site-packages" in path
        if is_installed and not path.startswith((PACKAGE, "<frozen")):
            return f"{line_of(frame.f_code, frame.f_lasti)} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
