"""Copies the flight records of ranks on several hosts into one folder, to compare the records."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from flashlight_py import system
from flashlight_py.launch.channel import Reader
from flashlight_py.launch.loop import Poll

# Maximum bytes of one record (usually 0.2 MB) and of all records of a host.
MOST_BYTES, MOST_BYTES_OF_HOST = 4 << 20, 64 << 20


class RecordPipe:
    """A pipe to which the ranks of a host write the paths of their flight records."""

    def __init__(self, loop: Poll) -> None:
        self._reading, self.descriptor = system.pipe()
        system.set_blocking(self.descriptor, False)
        self._loop, self._reader, self._lines = loop, Reader(self._reading), list[bytes]()
        loop.watch(self._reading, self._read)

    def variable(self) -> str:
        """Return the value of the variable RECORDS: descriptor, and inode to identify the pipe."""
        return f"{self.descriptor}:{system.fstat(self.descriptor).st_ino}"

    def paths(self) -> Mapping[int, Path]:
        """Return the path of the latest record of each rank that has written a record."""
        self._read()
        entries = (os.fsdecode(line).rstrip("\n").partition(" ") for line in self._lines)
        return {
            int(rank): Path(path)
            for rank, _, path in entries
            if rank.isdecimal() and os.path.isabs(path)
        }

    def close(self) -> None:
        self._loop.unwatch(self._reading)
        system.close(self._reading)
        system.close(self.descriptor)

    def _read(self) -> None:
        self._lines += self._reader.lines()


def send_records(paths: Mapping[int, Path], report: Callable[..., None]) -> None:
    """Call ``report`` with each record, or with the reason if it is too large or unreadable."""
    remaining = MOST_BYTES_OF_HOST
    for rank, path in sorted(paths.items()):
        try:
            if not path.is_file():  # the user has removed or replaced the record
                continue
            size = path.stat().st_size
            if size <= min(remaining, MOST_BYTES):
                report("record", rank, str(path.parent), path.read_bytes())
                remaining -= size
                continue
            limit = f"the remaining {remaining} of {MOST_BYTES_OF_HOST} for a host"
            limit = f"the limit of {MOST_BYTES} for one record" if size > MOST_BYTES else limit
            reason = f"it has {size} bytes, more than {limit}"
        except OSError as error:
            reason = f"it cannot be read ({error.strerror})"
        report("left_out", rank, str(path), reason)


def store_records(records: Mapping[int, tuple[str, bytes]], size: int) -> str:
    """Write the records of all hosts into one folder on this host, and return a message.

    ``records`` has for each rank the folder on the rank's host, and the content of the record. If
    the user chose the folder of the lowest rank and it exists on this host, the records are written
    to it. Otherwise they are written to the default folder.
    """
    from flashlight_py.distributed.internal import flight_record

    if not records:
        return ""
    name, content = records[min(records)]
    try:
        job = Path(str(json.loads(content)["job"])).name
    except (ValueError, KeyError, TypeError) as error:
        return f"the record of rank {min(records)} from {name} is no flight record: {error!r}"
    folder, default = Path(name), flight_record.default_folder(job)
    is_chosen_by_user = folder.is_dir() and folder.name != default.name
    if not is_chosen_by_user:
        folder = default
    try:
        for rank, (_, data) in records.items():
            flight = flight_record.Flight(folder, rank, size, job, is_chosen_by_user)
            if not flight.file.exists() or flight.file.read_bytes() != data:
                flight_record.store_record(flight, data.decode())
    except (OSError, UnicodeError) as error:
        return f"the flight records cannot be written to {folder}: {error}"
    return (
        f"flight records of {len(records)} of {size} ranks are on {system.gethostname()}; to "
        f"compare them: python -m flashlight_py.trace diff {folder}"
    )
