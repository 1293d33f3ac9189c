"""What the ranks of ``spawn`` print, shown where this program's own output goes: in a notebook.

A notebook, a test or ``contextlib.redirect_stdout`` puts an object in the place of ``sys.stdout``;
what a process inherits would go past it. So ranks then write into pipes, which are read by the
thread that called ``spawn``, while it waits for them.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

__all__ = ["Relay"]

_CHUNK = 1 << 16


class Relay:
    """The pipes of one run's ranks, by the descriptor that we read; none where none is needed."""

    def __init__(self) -> None:
        self._replaced: dict[str, TextIO] = {
            name: getattr(sys, name)
            for name in ("stdout", "stderr")
            if getattr(sys, name) not in (None, getattr(sys, f"__{name}__"))
        }
        self._sources: dict[int, tuple[int, TextIO]] = {}
        self._rests: dict[int, bytes] = {}

    @property
    def descriptors(self) -> list[int]:
        """What to wait for, to call ``read`` when it is ready."""
        return list(self._sources)

    def pipes(self, rank: int) -> dict[str, int]:
        """Return what ``rank`` shall write to, by stream; the caller closes these descriptors."""
        theirs = {}
        for name, stream in self._replaced.items():
            ours, theirs[name] = os.pipe()
            os.set_blocking(ours, False)
            self._sources[ours] = (rank, stream)
        return theirs

    def read(self, descriptor: int) -> bool:
        """Show the whole lines that have come; False if nothing had, or it was the end."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        lines, separator, rest = (self._rests.get(descriptor, b"") + data).rpartition(b"\n")
        self._rests[descriptor] = rest
        self._show(descriptor, lines + separator)
        if not data:
            self._close(descriptor)
        return bool(data)

    def close(self) -> None:
        """Show what can be read now, and close the pipes, also where others hold their ends."""
        for descriptor in self.descriptors:
            for _ in range(16):  # what a pipe holds; others may write on
                if not self.read(descriptor):
                    break
            self._close(descriptor)

    def _show(self, descriptor: int, lines: bytes) -> None:
        rank, stream = self._sources[descriptor]
        if lines:
            text = lines.decode(errors="replace").splitlines(keepends=True)
            stream.write("".join(f"[{rank}] {line}" for line in text))
            stream.flush()

    def _close(self, descriptor: int) -> None:
        if descriptor not in self._sources:
            return  # it came to its end before
        rest = self._rests.pop(descriptor, b"")
        self._show(descriptor, rest + b"\n" if rest else b"")
        del self._sources[descriptor]
        os.close(descriptor)
