"""A folder in which the launchers of a job tell each other: one file for each word of each."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Board"]

# How often a launcher shows that it lives, in seconds.
_LIFE_SECONDS = 5.0


class Board:
    """What launchers tell in ``folder``, which exists; this one is that of number ``node``."""

    def __init__(self, folder: Path, node: int) -> None:
        self.folder, self._node = folder, node
        self._shown_at = float("-inf")
        self._since = 0.0
        self.show_life()

    def tell(self, kind: str, attempt: int, value: Any) -> None:
        """Send the others ``value`` (JSON), the first time; nothing if the folder is gone."""
        file = self._file(kind, attempt, self._node)
        if file.exists():
            return
        hidden = file.with_name(f".{file.name}")
        with suppress(FileNotFoundError):
            hidden.write_text(json.dumps(value))
            hidden.rename(file)  # it appears whole

    def told(self, kind: str, attempt: int) -> dict[int, Any]:
        """Return what has been told, by node."""
        found: dict[int, Any] = {}
        with suppress(FileNotFoundError):  # the folder has gone meanwhile
            for file in self.folder.glob(f"{kind}-{attempt}-*"):
                found[int(file.name.rpartition("-")[2])] = json.loads(file.read_text())
        return found

    def is_gone(self) -> bool:
        """Return whether somebody has removed it."""
        return not self.folder.is_dir()

    def show_life(self) -> None:
        """Show that this launcher lives; to be called often."""
        now = time.monotonic()
        if now < self._shown_at + _LIFE_SECONDS:
            return
        self._shown_at = now
        with suppress(FileNotFoundError):
            self._sign(self._node).touch()
            self._since = self._since or self._seen(self._node)

    def silence_of(self, node: int) -> float:
        """Return for how many seconds ``node`` has not shown that it lives, up to our last sign.

        Both times are of the file system's clock, since those of the hosts may differ.
        """
        return self._seen(self._node) - self._seen(node)

    def remove(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, kind: str, attempt: int, node: int) -> Path:
        return self.folder / f"{kind}-{attempt}-{node}"

    def _seen(self, node: int) -> float:
        """Return when ``node`` showed that it lives; at our own first sign, if it never has."""
        try:
            return self._sign(node).stat().st_mtime
        except FileNotFoundError:
            return self._since

    def _sign(self, node: int) -> Path:
        return self.folder / f"alive-{node}"
