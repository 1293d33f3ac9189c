"""The last error that a rank has written, and what led to it: the lines tracebacks end at."""

from __future__ import annotations

__all__ = ["Tail"]

# Between tracebacks of one chain.
_LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
_HEADS = (b"Traceback (most recent call last)", b'  File "')  # the second: of a SyntaxError


class Tail:
    """Reads the lines of a standard error and keeps what the last tracebacks have ended with.

    ``errors`` are those of one chain; the last one is the exception itself.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._is_inside = self._is_linked = False

    def read(self, line: bytes) -> None:
        """Read one line; its end does not matter."""
        if line.startswith(_HEADS):
            self._is_inside = True
        elif line.startswith(_LINKS):
            self._is_linked = True
        elif self._is_inside and line.strip() and not line.startswith((b" ", b"\t")):
            before = self.errors if self._is_linked else []
            self.errors = [*before, line.decode(errors="replace").strip()]
            self._is_inside = self._is_linked = False
