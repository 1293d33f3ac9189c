"""What the other ranks of the job write into the folder of the flight records."""

from __future__ import annotations

import os
import re

from flashlight_py.distributed.recorder.flight_record import Flight, read_fields

__all__ = ["ANSWER", "OtherRecords"]

ANSWER = "another rank has written its own"
"""The reason of a record that answers another; it is not answered again, or there were no end."""

_NAME = re.compile(r"rank\d+\.json")

# Which file it is, and when it was written (``st_mtime_ns``): a later record is another file.
_Version = tuple[int, int]


class OtherRecords:
    """Notices what the other ranks of ``flight``'s job write, from now on.

    The folder may be the user's own, or shared with other jobs: other files in it do not count.
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._changed = 0, 0  # when, as of the last two looks
        self._seen: dict[str, _Version] = {}
        self._new()

    def have_written(self, after: float) -> bool:
        """Return whether another rank has written for a reason of its own since the last question.

        Only what was written later than ``after`` counts, an ``st_mtime``: the clock of whoever
        keeps the folder, as NFS may tell of a file long after it was written.
        """
        new = self._new()
        return any(when > after * 1e9 and self._has_own_reason(path) for path, (_, when) in new)

    def _new(self) -> list[tuple[str, _Version]]:
        """Return the others' files that have come or changed since the last look."""
        assert self._flight.folder is not None
        try:
            changed = self._changed[1], os.stat(self._flight.folder).st_mtime_ns
            # Looked at once more: it may change again in the same tick of its clock.
            if self._changed == changed == changed[::-1]:
                return []
            found = self._versions()
        except OSError:  # not there yet, or out of reach for a while
            return []
        before, self._seen, self._changed = self._seen, found, changed
        return [(path, version) for path, version in found.items() if before.get(path) != version]

    def _versions(self) -> dict[str, _Version]:
        assert self._flight.file is not None
        assert self._flight.folder is not None
        with os.scandir(self._flight.folder) as entries:
            files = [
                entry
                for entry in entries
                if _NAME.fullmatch(entry.name)
                and entry.name != self._flight.file.name
                and entry.is_file(follow_symlinks=False)
            ]
            found = [(file.path, file.stat(follow_symlinks=False)) for file in files]
        return {path: (status.st_ino, status.st_mtime_ns) for path, status in found}

    def _has_own_reason(self, path: str) -> bool:
        try:
            fields = read_fields(path)
        except (OSError, ValueError):  # replaced meanwhile, or somebody else's
            return False
        return bool(fields.get("job") == self._flight.job and fields.get("reason") != ANSWER)
