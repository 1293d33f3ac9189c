"""The flight record: a readable file per rank with its last calls, and where its threads stand.

It is written after a failed call, at SIGUSR1, and when another rank has written its own. A thread
waits for the signal, because the main thread may hang in a library: faulthandler writes the stacks
into a pipe inside the signal handler, and the thread adds the calls. An existing handler for
SIGUSR1 stays, and this one is not installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import json
import logging
import math
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.call_site import PACKAGE, line_of
from flashlight_py.distributed.rendezvous.secret import create_private
from flashlight_py.errors import CollectiveTimeoutError, MismatchError, PeerLostError

FORMAT = "flashlight_py flight record 1"
RECORDS = "FLASHLIGHT_RECORDS"
"""The environment variable with a launcher's pipe: its descriptor and inode. It takes paths."""
# Jobs of this user whose records stay among the temporary files: the newest.
KEPT_JOBS = 16
_PREFIX = "flashlight-trace-"
_log = logging.getLogger("flashlight_py")


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

    ``threads`` are the stacks of the threads in lines, by default those of this moment. Raises
    OSError if the file cannot be written, or another user owns the folder.
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
    part = flight.folder / f".rank{flight.rank}-{system.random_bytes(6).hex()}"
    try:
        # Half a character, as in a file's name, is written as JSON writes it.
        create_private(part, text.encode(errors="backslashreplace"))
        part.replace(flight.file)
    finally:
        part.unlink(missing_ok=True)
    return flight.file


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a flight record.

    Raises OSError if the file cannot be read, and ValueError if it is no flight record.
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


# When it is written -------------------------------------------------------------------------------


ANSWER = "another rank has written its own"
"""The reason of a record that answers another; it is not answered again, or there were no end."""

_NAME = re.compile(r"rank\d+\.json")


class OtherRecords:
    """Finds what the other ranks of ``flight``'s job write, from now on.

    The folder may be the user's own, or shared with other jobs: other files in it do not count.
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._changed = 0, 0  # when, as of the last two looks
        self._seen = set[tuple[str, int, int]]()  # a later record has another inode or time
        self._new()

    def have_written(self, after: float) -> bool:
        """Return whether another rank has written for its own reason since the last question.

        Only files later than ``after`` count, a time of the file system: NFS may list them late.
        """
        for path, _, when in self._new():
            with suppress(OSError, ValueError):  # replaced meanwhile, or somebody else's
                if when > after * 1e9:
                    fields = read_fields(path)
                    if fields.get("job") == self._flight.job and fields.get("reason") != ANSWER:
                        return True
        return False

    def _new(self) -> set[tuple[str, int, int]]:
        """Return path, inode and time of the others' records since the last look."""
        try:
            changed = self._changed[1], os.stat(self._flight.folder).st_mtime_ns
            # Looked at once more: it may change again in the same tick of its clock.
            if self._changed == changed == changed[::-1]:
                return set()
            found = set()
            with os.scandir(self._flight.folder) as entries:
                for entry in entries:
                    is_record = _NAME.fullmatch(entry.name) and entry.name != self._flight.file.name
                    if is_record and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        found.add((entry.path, status.st_ino, status.st_mtime_ns))
        except OSError:  # not there yet, or out of reach for a while
            return set()
        before, self._seen, self._changed = self._seen, found, changed
        return found - before


# Only the first of several failures is written; ranks that have just written do not answer it.
_QUIET_SECONDS = 10.0
# How often a rank looks for others' records; a network's file system notifies nobody.
_LOOK_SECONDS = 0.5
# More than the stacks of a hundred threads.
_PIPE_BYTES = 1 << 20
# Seconds that a thread waits for another one to write. A longer one is interrupted by a signal
# handler, which may wait for this thread.
_LOCK_SECONDS = 1.0
# Until all stacks have arrived through the pipe, once the first has.
_WRITING_SECONDS = 0.05


class Watchdog:
    """Writes the record of ``flight`` when it is time to, until ``stop``."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self._written, self._explained = -math.inf, -math.inf
        # The handler of a signal may dump while its thread is writing.
        self._lock = system.RLock()
        self._others = OtherRecords(flight)
        with contextlib.ExitStack() as undo:
            self._reader, self._writer = _pipe(os.O_CLOEXEC | os.O_NONBLOCK, undo)
            with suppress(OSError):  # more than this user may have: the default will do
                fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._stopping, self._stop = _pipe(os.O_CLOEXEC, undo)
            self._answers_signal = _take(signal.SIGUSR1, self._writer)
            undo.callback(self.release_signal)
            self._thread = system.Thread(target=self._run, name="flashlight-watchdog", daemon=True)
            kept = undo.pop_all()
        try:
            self._thread.start()
        except RuntimeError:  # there is none; but after what a signal's handler raises there is one
            kept.close()
            raise

    def stop(self, is_child: bool = False) -> None:
        """End the thread, which does not run in a child that was forked, and let go of all else."""
        self.release_signal()
        system.close(self._stop)
        if not is_child:
            self._thread.join()
        for end in (self._reader, self._writer, self._stopping):
            system.close(end)

    def release_signal(self) -> None:
        """Release SIGUSR1, unless somebody else has taken it meanwhile."""
        if self._answers_signal and system.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            faulthandler.unregister(signal.SIGUSR1)

    def record(self, reason: str, threads: list[str] | None = None) -> Path:
        """Write the record and return its path. Raises OSError if it cannot be written."""
        with self._alone():
            self._written = system.wall_clock()  # nearly; it counts also where the writing fails
            path = write_record(self.flight, reason, threads)
            self._written = path.stat().st_mtime  # by the clock that dates the others' files
            return path

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from writing, as a rule: each record replaces the other as a whole."""
        has_lock = self._lock.acquire(timeout=_LOCK_SECONDS)
        try:
            yield
        finally:
            if has_lock:
                self._lock.release()

    def write(
        self, reason: str, threads: list[str] | None = None, level: int = logging.WARNING
    ) -> Path | None:
        """Write the record and return its path, logged at ``level``; None where that fails."""
        said = f"rank {self.flight.rank} of {self.flight.size}: the flight record ({reason})"
        try:
            path = self.record(reason, threads)
        except OSError as error:
            _log.warning("%s cannot be written: %s", said, error)
            return None
        _log.log(level, "%s is in %s", said, path)
        return path

    def explain(self, error: BaseException) -> None:
        """Write the record for a failed call, and say in its message where it is."""
        if not isinstance(error, CollectiveTimeoutError | PeerLostError | MismatchError):
            return
        if system.monotonic() - self._explained < _QUIET_SECONDS:
            return
        self._explained = system.monotonic()
        reason = f"{type(error).__name__}: {error}"
        path = self.write(reason, level=logging.INFO)  # the error says where it is
        if path is not None and error.args:
            compare = f"python -m flashlight_py.trace diff {path.parent}"
            where = f"The last calls of this rank are in {path}; to compare the ranks: {compare}"
            end = "\n\n" if "\n" in str(error.args[0]) else ". "  # after a traceback
            error.args = (f"{error.args[0]}{end}{where}", *error.args[1:])

    def _run(self) -> None:
        """Wait for the signal, for others' records and for the end."""
        while True:
            ready, _, _ = system.select([self._reader, self._stopping], [], [], _LOOK_SECONDS)
            if self._stopping in ready:
                return
            if ready:
                self.write("SIGUSR1", self._stacks().splitlines())
                continue
            with self._alone():  # unless this rank has its own reason meanwhile
                if self._others.have_written(after=self._written + _QUIET_SECONDS):
                    self.write(ANSWER, level=logging.INFO)

    def _stacks(self) -> str:
        """Read what the signal's handler writes, which it may not have done yet."""
        text = b""
        while system.select([self._reader], [], [], _WRITING_SECONDS)[0]:
            text += system.read(self._reader, _PIPE_BYTES)
        return text.decode(errors="replace")


def _pipe(flags: int, undo: contextlib.ExitStack) -> tuple[int, int]:
    """Return the reading and the writing end of a pipe, which ``undo`` closes."""
    ends = system.pipe2(flags)
    for end in ends:
        undo.callback(system.close, end)
    return ends


def _take(number: signal.Signals, file: int) -> bool:
    """Have the stacks written to ``file`` when the signal arrives, unless somebody else handles it.

    MPICH does, to be notified of processes that have ended: its handler is called afterwards.
    """
    handler = _handler(number)
    by_mpi = "mpi4py" in sys.modules and system.getsignal(number) is signal.SIG_DFL
    if handler != signal.SIG_DFL and not (by_mpi and handler != signal.SIG_IGN):
        return False
    faulthandler.register(number, file, all_threads=True, chain=handler != signal.SIG_DFL)
    return True


def _handler(number: signal.Signals) -> int:
    """Return SIG_DFL, SIG_IGN, or the address of the signal's handler, which may be of C code."""
    action = (ctypes.c_void_p * 64)()  # a struct sigaction, which begins with the handler, and more
    ctypes.CDLL(None).sigaction(number, None, action)
    return action[0] or signal.SIG_DFL


current: Watchdog | None = None


def start(flight: Flight) -> None:
    """Begin to watch over this rank."""
    global current  # noqa: PLW0603  (a process is one rank)
    current = Watchdog(flight)
    journal.on_failure = current.explain


def stop(is_child: bool = False) -> None:
    """End what ``start`` has begun; in a child that was forked its thread is not there."""
    global current
    journal.on_failure = None
    watchdog, current = current, None
    if watchdog is not None:
        watchdog.stop(is_child)


os.register_at_fork(after_in_child=partial(stop, is_child=True))


def dump(reason: str = "asked for") -> Path:
    """Write this rank's flight record now, whatever runs, and return its path. Not collective.

    It holds the last calls of this process (verb, bytes, dtype, shape, line of user code, times)
    and where its threads stand. Other ranks of the host notice, and write theirs within a second.

    Raises:
        OSError: it cannot be written.
    """
    if current is not None:
        return current.record(reason)
    return write_record(Flight(default_folder(f"alone-{system.getpid()}")), reason)
