"""The output of ranks: whole lines under the number of the rank, on the terminal or in files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from flashlight_py import system
from flashlight_py.launch.channel import write_whole
from flashlight_py.launch.failures import Tail

STREAMS = ("out", "err")
_WORDS = {"out": "standard output", "err": "standard error"}
PARTIAL_SECONDS = 0.15  # until the beginning of a line, such as a question, is shown on a terminal
LONGEST_LINE = 1 << 16  # bytes; longer lines are shown in parts
_COLOURS = (36, 33, 32, 35, 34, 31)


class Source(NamedTuple):
    """Standard output ("out") or error ("err") of a rank."""

    rank: int
    stream: str


class RankOutput:
    """Takes what ``size`` ranks write, as it arrives, and writes lines.

    Each line goes to the descriptor of its stream, or an object like ``sys.stdout``, behind
    ``[rank]``. With ``folder``, output is appended to ``rank-R.out`` and ``rank-R.err`` there.

    If something cannot be written (nobody reads it, the disk is full), all that follows is dropped,
    ``error`` says so, and ``on_error`` is called; nothing is raised.
    """

    def __init__(
        self,
        size: int,
        folder: Path | None = None,
        descriptors: tuple[int | TextIO, int | TextIO] = (1, 2),
    ) -> None:
        self._tails: dict[int, Tail] = defaultdict(Tail)
        self._sinks = dict(zip(STREAMS, descriptors, strict=True))
        self._folder = folder
        self._files: dict[Source, BinaryIO] = {}
        self._failed: dict[str, OSError] = {}
        self._width = len(str(size - 1))
        self._is_terminal = {
            name: isinstance(sink, int) and system.isatty(sink)
            for name, sink in self._sinks.items()
        }
        self._rests: dict[Source, bytes] = {}
        self._read_at: dict[Source, float] = {}
        self._open: Source | None = None  # whose line the cursor stands in
        self.on_error: Callable[[], None] = lambda: None

    def take(self, source: Source, data: bytes) -> None:
        if self._folder is not None:
            self._store(source, data)
        data = self._rests.get(source, b"") + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > LONGEST_LINE:
            end = len(data)
        lines, self._rests[source] = data[:end], data[end:]
        self._read_at[source] = system.monotonic()
        if source.stream == "err":
            for line in lines.splitlines():
                self._tails[source.rank].read(line)
        if lines:
            self._show(source, lines)

    def flush_at(self) -> float:
        """Return when ``flush`` should be called, of ``time.monotonic``; inf: no need."""
        return min(self._due().values(), default=math.inf)

    def flush(self, now: float = math.inf) -> None:
        """Show, on terminals, also lines that have no end yet: those that are due ``now``."""
        for source, due in self._due().items():
            if due <= now:
                rest, self._rests[source] = self._rests[source], b""
                self._show(source, rest)

    @property
    def error(self) -> str:
        """The streams that could not be written, and why; "" if all could."""
        return "; ".join(
            f"{what} cannot be written: {error.strerror}" for what, error in self._failed.items()
        )

    def end(self) -> None:
        """Show what is left, as whole lines, and close the files."""
        for source, rest in self._rests.items():
            if rest:
                if source.stream == "err":
                    self._tails[source.rank].read(rest)
                self._show(source, rest + b"\n")
        self._rests.clear()
        self._end_open_line()
        for file in self._files.values():
            with self._noting(str(file.name)):
                file.close()
        self._files.clear()

    def say(self, text: str) -> None:
        self._end_open_line()
        self._put("err", f"flrun: {text}\n".encode())

    def last_errors(self, rank: int) -> list[str]:
        """Return the lines that the last chain of tracebacks of ``rank`` has ended with."""
        return self._tails[rank].errors

    def files_of(self, rank: int) -> str:
        """Return where the errors of ``rank`` can be read; "" if not in a file."""
        return "" if self._folder is None else str(self._folder / f"rank-{rank}.err")

    def _due(self) -> dict[Source, float]:
        """Return when lines on a terminal that have begun and not ended are to be shown."""
        return {
            source: self._read_at[source] + PARTIAL_SECONDS
            for source, rest in self._rests.items()
            if rest and self._is_terminal[source.stream] and self._folder is None
        }

    def _store(self, source: Source, data: bytes) -> None:
        assert self._folder is not None
        path = self._folder / f"rank-{source.rank}.{source.stream}"
        if str(path) in self._failed:
            return
        with self._noting(str(path)):
            if source not in self._files:
                self._files[source] = path.open("ab", buffering=0)
            write_whole(self._files[source].fileno(), data)

    def _put(self, stream: str, data: bytes) -> None:
        sink = self._sinks[stream]
        if _WORDS[stream] not in self._failed:
            with self._noting(_WORDS[stream]):
                if isinstance(sink, int):
                    write_whole(sink, data)
                else:
                    sink.write(data.decode(errors="replace"))
                    sink.flush()

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed[what] = error
            self.on_error()

    def _show(self, source: Source, text: bytes) -> None:
        if self._folder is not None:
            return
        number = f"[{source.rank:>{self._width}}]"
        if self._is_terminal[source.stream]:
            number = f"\033[{_COLOURS[source.rank % len(_COLOURS)]}m{number}\033[0m"
        prefix = f"{number} ".encode()
        body = text.removesuffix(b"\n").replace(b"\r\n", b"\n").replace(b"\r", b"\r" + prefix)
        body = body.replace(b"\n", b"\n" + prefix)
        if self._open != source:
            self._end_open_line()
            body = prefix + body
        is_whole = text.endswith(b"\n")
        self._put(source.stream, body + (b"\n" if is_whole else b""))
        self._open = None if is_whole else source

    def _end_open_line(self) -> None:
        if self._open is not None:
            self._put(self._open.stream, b"\n")
            self._open = None
