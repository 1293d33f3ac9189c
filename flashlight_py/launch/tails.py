"""The last error that a rank has written: the line at which its traceback ends."""

from __future__ import annotations

__all__ = ["Tail"]

_HEADS = (b"Traceback (most recent call last)", b'  File "')  # the second: of a SyntaxError


class Tail:
    """Reads the lines of a standard error and keeps what the last traceback has ended with."""

    def __init__(self) -> None:
        self.error = ""
        self._is_inside = False

    def read(self, line: bytes) -> None:
        """Read one line; its end does not matter."""
        if line.startswith(_HEADS):
            self._is_inside = True
        elif self._is_inside and line.strip() and not line.startswith((b" ", b"\t")):
            self.error = line.decode(errors="replace").strip()
            self._is_inside = False
