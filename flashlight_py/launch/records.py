"""Flight records of ranks on several hosts, brought to one folder so that they can be compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from flashlight_py import system
from flashlight_py.launch.loop import Poll

# Of a record, of which a usual one has 0.2 MB; and of all records of a host.
MOST_BYTES, MOST_BYTES_OF_HOST = 4 << 20, 64 << 20


class Notes:
    """A pipe by which the ranks of a host say where they have written their flight records."""

    def __init__(self, loop: Poll) -> None:
        self._loop = loop
        self._reading, self.descriptor = system.pipe()
        for end in (self._reading, self.descriptor):
            system.set_blocking(end, False)
        self._text, self._is_open = b"", True
        loop.watch(self._reading, self._read)

    def variable(self) -> str:
        """Return what ranks need to know: the descriptor, and how to recognise it."""
        return f"{self.descriptor}:{system.fstat(self.descriptor).st_ino}"

    def paths(self) -> Mapping[int, Path]:
        """Return where each rank has left its last record, of those that have."""
        self._read()
        # Text behind the last end of a line has not been written whole.
        lines = os.fsdecode(self._text).split("\n")[:-1]
        notes = (line.partition(" ") for line in lines)
        return {
            int(rank): Path(path)
            for rank, _, path in notes
            if rank.isdecimal() and os.path.isabs(path)
        }

    def close(self) -> None:
        """Take no more notes; may be called again."""
        if self._is_open:
            self._is_open = False
            self._loop.forget(self._reading)
            system.close(self._reading)
            system.close(self.descriptor)

    def _read(self) -> None:
        try:
            while data := system.read(self._reading, 1 << 16):
                self._text += data
        except BlockingIOError:
            pass


def send_records(paths: Mapping[int, Path], report: Callable[..., None]) -> None:
    """Report each ``record`` at ``paths``, by rank, or why it is ``left_out``."""
    left = MOST_BYTES_OF_HOST
    for rank, path in sorted(paths.items()):
        try:
            if not path.is_file():  # the user has removed it meanwhile, or put something else there
                continue
            size = path.stat().st_size
            if size <= min(left, MOST_BYTES):
                report("record", rank, str(path.parent), path.read_bytes())
                left -= size
                continue
            limit = f"is left of the {MOST_BYTES_OF_HOST} of a host"
            limit = f"the {MOST_BYTES} of one record" if size > MOST_BYTES else limit
            why = f"it has {size} bytes, more than {limit}"
        except OSError as error:
            why = f"it cannot be read ({error.strerror})"
        report("left_out", rank, str(path), why)


def store_records(found: Mapping[int, tuple[str, bytes]], size: int) -> str:
    """Write records to rank 0's folder, or a new one where this host has none of that name.

    ``found`` has, by rank, the folder on the rank's host and the record. Returns what to tell the
    user; "" where there are no records.
    """
    from flashlight_py.distributed.internal import flight_record

    if not found:
        return ""
    name, first = found[min(found)]
    try:
        job = Path(str(json.loads(first)["job"])).name
    except (ValueError, KeyError, TypeError) as error:
        return f"what rank {min(found)} has left at {name} is no flight record: {error!r}"
    folder, default = Path(name), flight_record.default_folder(job)
    chosen = folder.is_dir() and folder.name != default.name
    if not chosen:
        folder = default
    try:
        for rank, (_, data) in found.items():
            flight = flight_record.Flight(folder, rank, size, job, chosen)
            if not flight.file.exists() or flight.file.read_bytes() != data:
                flight_record.store_record(flight, data.decode())
    except (OSError, UnicodeError) as error:
        return f"the flight records cannot be written to {folder}: {error}"
    return (
        f"flight records of {len(found)} of {size} ranks are on {system.gethostname()}; to compare "
        f"them: python -m flashlight_py.trace diff {folder}"
    )
