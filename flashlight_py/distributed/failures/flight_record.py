"""The flight record: a readable file per rank with its newest calls and the stacks of its threads.

A rank writes its file after a failed call, at SIGUSR1, and after another rank has written a file. A
separate thread writes it, because the main thread may hang in a library. At SIGUSR1, faulthandler
writes the stacks to a pipe, and the thread adds the calls. If the program already handles SIGUSR1,
the signal writes no record.
"""

import contextlib
import ctypes
import faulthandler
import json
import logging
import math
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.rendezvous.secret import create_private
from flashlight_py.errors import CollectiveTimeoutError, MismatchError, PeerLostError

FORMAT = "flashlight_py flight record 1"
RECORDS = "FLASHLIGHT_RECORDS"
"""Environment variable: descriptor and inode of a launcher's pipe for the paths of records."""
# Number of jobs of this user whose records are kept in the temporary folder.
KEPT_JOBS = 16
_PREFIX = "flashlight-trace-"
_log = logging.getLogger("flashlight_py")


@dataclass(frozen=True)
class Flight:
    """The folder for the record of this process, and the rank, size and job of the process.

    ``chosen``: True if the user chose the folder. Only then may the folder be a link or belong to
    another user.
    """

    folder: Path
    rank: int = 0
    size: int = 1
    job: str = ""
    chosen: bool = False

    @property
    def file(self) -> Path:
        return self.folder / f"rank{self.rank}.json"


def new_job() -> str:
    begun = time.strftime("%Y%m%d-%H%M%S", time.localtime(system.wall_clock()))
    return f"{begun}-{system.random_bytes(4).hex()}"


def default_folder(job: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{job}"


def write_record(flight: Flight, reason: str, threads: Sequence[str] | None = None) -> Path:
    """Write or replace the record of this rank and return its path.

    ``threads`` has the stacks of the threads as lines. If it is None, the current stacks are used.
    Raises OSError if the file cannot be written or another user owns the folder.
    """
    text = record_text(flight, reason, stacks() if threads is None else threads)
    path = store_record(flight, text)
    # Some launchers collect the records of all hosts. They read the path of a record from a pipe.
    descriptor, _, inode = system.environ.get(RECORDS, "").partition(":")
    with contextlib.suppress(OSError, ValueError):  # the pipe does not exist or is closed
        status = os.fstat(int(descriptor))
        if stat.S_ISFIFO(status.st_mode) and str(status.st_ino) == inode:
            system.write(int(descriptor), f"{flight.rank} {path.absolute()}\n".encode())
    return path


def store_record(flight: Flight, text: str) -> Path:
    """Write ``text`` to the file of ``flight``. Raises the same errors as ``write_record``."""
    flight.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not flight.chosen:
        if _age(flight.folder) is None:
            raise PermissionError(f"flight record: {flight.folder} must be a folder of this user")
        folders = flight.folder.parent.glob(f"{_PREFIX}*")
        aged = [(age, folder) for folder in folders if (age := _age(folder)) is not None]
        for _, folder in sorted(aged)[KEPT_JOBS:]:
            shutil.rmtree(folder, ignore_errors=True)  # another rank may remove it too
    # Write another file and rename it, so that readers never see an incomplete record.
    part = flight.folder / f".rank{flight.rank}-{system.random_bytes(6).hex()}"
    try:
        # File names may contain lone surrogates, which become JSON escapes.
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
            raise ValueError(f"format must be {FORMAT!r}, got {fields['format']!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no flight record: {error}") from error
    return dict(fields)


def _age(folder: Path) -> float | None:
    """Return the seconds since ``folder`` changed, or None if it is no folder of this user."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == system.user_id()
    return system.wall_clock() - status.st_mtime if is_own else None


def record_text(flight: Flight, reason: str, threads: Sequence[str]) -> str:
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
    calls = [_readable(record.as_dict(), now) for record in journal.recent_records()]
    rows = [f"{json.dumps(name)}: {json.dumps(group)}" for name, group in journal.groups().items()]
    lines.append(_block("groups", rows, "{}"))
    lines.append(_block("calls", [json.dumps(call, ensure_ascii=False) for call in calls]))
    lines.append(_block("threads", [json.dumps(line, ensure_ascii=False) for line in threads]))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _readable(fields: dict[str, Any], now: int) -> dict[str, Any]:
    started, ended = fields["started"], fields.get("ended")
    return {
        "state": "failed" if "error" in fields else "running" if ended is None else "ended",
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
    del frame  # without ``del``, the frame would refer to itself
    return lines


def stands_at() -> str:
    """Return the line of user code that the main thread runs, as "folder/file.py:12 in f"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = frame.f_code.co_filename
        is_installed = not path.startswith(_LIBRARY) or "site-packages" in path
        if is_installed and not path.startswith((journal.PACKAGE, "<frozen")):
            return f"{journal.line_of(frame.f_code, frame.f_lasti)} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


ANSWER = "another rank has written its own"
"""Reason of a record that a rank writes because another rank wrote one. No rank answers it."""


class OtherRecords:
    """Finds records of the same job that other ranks write after the creation of this object.

    Other files are ignored, because the folder may belong to the user or to several jobs.
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._changed = 0, 0  # modification times of the folder at the last two checks
        self._seen = set[tuple[Path, int, int]]()  # path, inode and time of each record so far
        self._new_records()

    def have_written(self, after: float) -> bool:
        """Return whether another rank has written a record since the last call of this method.

        Ignores records with the reason ``ANSWER``. Also ignores files up to the time ``after``
        (seconds of the file system), because network file systems may show old files late.
        """
        for path, _, when in self._new_records():
            with contextlib.suppress(OSError, ValueError):  # the file was removed, or is no record
                if when > after * 1e9:
                    fields = read_fields(path)
                    if fields.get("job") == self._flight.job and fields.get("reason") != ANSWER:
                        return True
        return False

    def _new_records(self) -> set[tuple[Path, int, int]]:
        """Return path, inode and time of other ranks' records that are new since the last call."""
        try:
            changed = self._changed[1], os.stat(self._flight.folder).st_mtime_ns
            # Two changes may have the same time. So read the folder again after its time changed.
            if self._changed == changed == changed[::-1]:
                return set()
            records = set()
            for path in self._flight.folder.glob("rank*.json"):
                status = path.lstat()
                if path != self._flight.file and stat.S_ISREG(status.st_mode):
                    records.add((path, status.st_ino, status.st_mtime_ns))
        except OSError:  # missing, or temporarily unreachable
            return set()
        before, self._seen, self._changed = self._seen, records, changed
        return records - before


# Minimum seconds between two automatic records. SIGUSR1 and ``dump`` always write one.
_QUIET_SECONDS = 10.0
# Seconds between checks for records of other ranks.
_LOOK_SECONDS = 0.5
# Size of the pipe in bytes: more than the stacks of a hundred threads.
_PIPE_BYTES = 1 << 20
# Maximum seconds to wait while another thread writes a record. A signal handler may have
# interrupted that thread, and may wait for this thread. After this time, this thread writes, too.
_LOCK_SECONDS = 1.0
# If the pipe has no new data for this number of seconds, the stacks are complete.
_WRITING_SECONDS = 0.05


class Watchdog:
    """A thread that writes the record of ``flight`` at SIGUSR1, or after another rank wrote one."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self._written, self._explained = -math.inf, -math.inf
        # Re-entrant: a signal handler may write a record while its thread writes one.
        self._lock = system.RLock()
        self._others = OtherRecords(flight)
        with contextlib.ExitStack() as undo:
            self._reader, self._writer = _pipe(undo)
            self._stopping, self._stop = _pipe(undo)
            self._answers_signal = _answer_sigusr1(self._reader, self._writer)
            undo.callback(self.release_signal)
            self._thread = system.Thread(target=self._run, name="flashlight-watchdog", daemon=True)
            resources = undo.pop_all()
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no new thread
            resources.close()
            raise

    def stop(self, is_child: bool = False) -> None:
        """End the thread and release all resources. A forked child has no such thread."""
        self.release_signal()
        system.close(self._stop)
        if not is_child:
            self._thread.join()
        for end in (self._reader, self._writer, self._stopping):
            system.close(end)

    def release_signal(self) -> None:
        """Stop handling SIGUSR1, unless other code has installed a handler since."""
        if self._answers_signal and system.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            faulthandler.unregister(signal.SIGUSR1)

    def record(self, reason: str, threads: list[str] | None = None) -> Path:
        with self._locked():
            self._written = system.wall_clock()  # used if writing fails
            path = write_record(self.flight, reason, threads)
            self._written = path.stat().st_mtime  # from the clock of the file system
            return path

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        has_lock = self._lock.acquire(timeout=_LOCK_SECONDS)
        try:
            yield
        finally:
            if has_lock:
                self._lock.release()

    def write(
        self, reason: str, threads: list[str] | None = None, level: int = logging.WARNING
    ) -> Path | None:
        """Write the record and log its path at ``level``. Return the path, or None on failure."""
        subject = f"rank {self.flight.rank} of {self.flight.size}: the flight record ({reason})"
        try:
            path = self.record(reason, threads)
        except OSError as error:
            _log.warning("%s cannot be written: %s", subject, error)
            return None
        _log.log(level, "%s is in %s", subject, path)
        return path

    def explain(self, error: BaseException) -> None:
        """Write the record after a failed call, and add its path to the text of ``error``."""
        if not isinstance(error, CollectiveTimeoutError | PeerLostError | MismatchError):
            return
        if system.monotonic() - self._explained < _QUIET_SECONDS:
            return
        self._explained = system.monotonic()
        reason = f"{type(error).__name__}: {error}"
        path = self.write(reason, level=logging.INFO)  # no warning: the error will show the path
        if path is not None and error.args:
            compare = f"python -m flashlight_py.trace diff {path.parent}"
            advice = f"The last calls of this rank are in {path}. To compare ranks, run {compare}"
            end = "\n\n" if "\n" in str(error.args[0]) else ". "  # after a traceback
            error.args = (f"{error.args[0]}{end}{advice}", *error.args[1:])

    def _run(self) -> None:
        while True:
            ready, _, _ = system.select([self._reader, self._stopping], [], [], _LOOK_SECONDS)
            if self._stopping in ready:
                return
            if ready:
                text = b""
                while system.select([self._reader], [], [], _WRITING_SECONDS)[0]:
                    text += system.read(self._reader, _PIPE_BYTES)
                self.write("SIGUSR1", text.decode(errors="replace").splitlines())
                continue
            with self._locked():  # wait while another thread writes the record
                if self._others.have_written(after=self._written + _QUIET_SECONDS):
                    self.write(ANSWER, level=logging.INFO)


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = system.pipe()
    for end in ends:
        undo.callback(system.close, end)
    return ends


def _answer_sigusr1(reader: int, writer: int) -> bool:
    """Let faulthandler write the stacks to the pipe at SIGUSR1. Return success.

    If the program already handles the signal, or on Windows, return False. A handler that MPICH has
    installed is no obstacle: it is called after faulthandler.
    """
    if not hasattr(signal, "SIGUSR1"):
        return False
    for end in (reader, writer):
        system.set_blocking(end, False)
    if system.IS_LINUX:
        import fcntl

        with contextlib.suppress(OSError):  # the pipe limit of this user is lower
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    number = signal.SIGUSR1
    handler = _handler(number)
    by_mpi = "mpi4py" in sys.modules and system.getsignal(number) is signal.SIG_DFL
    if handler != signal.SIG_DFL and not (by_mpi and handler != signal.SIG_IGN):
        return False
    faulthandler.register(number, writer, all_threads=True, chain=handler != signal.SIG_DFL)
    return True


def _handler(number: signal.Signals) -> int:
    """Return SIG_DFL, SIG_IGN, or the address of the handler, which may be C code."""
    action = (ctypes.c_void_p * 64)()  # room for a struct sigaction; it begins with the handler
    ctypes.CDLL(None).sigaction(number, None, action)
    return action[0] or signal.SIG_DFL


current: Watchdog | None = None


def start(flight: Flight) -> None:
    global current  # noqa: PLW0603  (a process is one rank)
    current = Watchdog(flight)
    journal.on_failure = current.explain


def stop(is_child: bool = False) -> None:
    """Undo ``start``. A forked child passes ``is_child``, because it has no watchdog thread."""
    global current
    journal.on_failure = None
    watchdog, current = current, None
    if watchdog is not None:
        watchdog.stop(is_child)


system.register_at_fork(after_in_child=partial(stop, is_child=True))


def dump(reason: str = "asked for") -> Path:
    """Write the flight record of this rank now, and return its path. Not collective.

    It contains the newest calls of this process (verb, bytes, dtype, shape, line of user code,
    times) and the stacks of its threads. Within a second, the other ranks of the host write their
    records too.

    Args:
        reason: Text that is stored in the record.

    Raises:
        OSError: If the file cannot be written.
    """
    if current is not None:
        return current.record(reason)
    return write_record(Flight(default_folder(f"alone-{system.getpid()}")), reason)
