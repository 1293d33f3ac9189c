"""Output of ranks: complete lines prefixed with the rank, on the terminal or in files."""

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
PARTIAL_SECONDS = 0.15  # seconds until a line without an end, such as a prompt, is shown
LONGEST_LINE = 1 << 16  # bytes; longer lines are split
_COLOURS = (36, 33, 32, 35, 34, 31)


class Source(NamedTuple):
    """Standard output ("out") or standard error ("err") of a rank."""

    rank: int
    stream: str


class RankOutput:
    """A writer of complete lines from chunks of output of ``size`` ranks.

    Each line gets the prefix ``[rank]``. Standard output and standard error are written to the two
    ``descriptors``, which are numbers or objects like ``sys.stdout``. If ``folder`` is set, output
    is instead appended to the files ``rank-R.out`` and ``rank-R.err`` in this folder. If a write
    fails (closed pipe, full disk), later output to the same stream or file is dropped, ``error``
    describes the failure, and ``on_error`` is called. No exception is raised.
    """

    def __init__(
        self, size: int, folder: Path | None = None,
        descriptors: tuple[int | TextIO, int | TextIO] = (1, 2),
    ) -> None:  # fmt: skip
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
        self._partial_lines: dict[Source, bytes] = {}
        self._read_at: dict[Source, float] = {}
        self._open: Source | None = None  # source of the unfinished line at the cursor
        self.on_error: Callable[[], None] = lambda: None

    def take(self, source: Source, data: bytes) -> None:
        if self._folder is not None:
            self._store(source, data)
        data = self._partial_lines.get(source, b"") + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > LONGEST_LINE:
            end = len(data)
        lines, self._partial_lines[source] = data[:end], data[end:]
        self._read_at[source] = system.monotonic()
        if source.stream == "err":
            for line in lines.splitlines():
                self._tails[source.rank].read(line)
        if lines:
            self._show(source, lines)

    def flush_at(self) -> float:
        """Return when ``flush`` must be called, in the time of ``time.monotonic``, or infinity."""
        return min(self._due_times().values(), default=math.inf)

    def flush(self, now: float = math.inf) -> None:
        """Show the unfinished lines that began PARTIAL_SECONDS or more before ``now``."""
        for source, due_time in self._due_times().items():
            if due_time <= now:
                partial_line, self._partial_lines[source] = self._partial_lines[source], b""
                self._show(source, partial_line)

    @property
    def error(self) -> str:
        """A message with the streams or files that could not be written and the reasons, or ""."""
        return "; ".join(
            f"{sink} cannot be written: {error.strerror}" for sink, error in self._failed.items()
        )

    def end(self) -> None:
        """Show the unfinished lines, each with a line end added, and close the files."""
        for source, partial_line in self._partial_lines.items():
            if partial_line:
                if source.stream == "err":
                    self._tails[source.rank].read(partial_line)
                self._show(source, partial_line + b"\n")
        self._partial_lines.clear()
        self._end_open_line()
        for file in self._files.values():
            with self._recording_failure(str(file.name)):
                file.close()
        self._files.clear()

    def say(self, text: str) -> None:
        self._end_open_line()
        self._put("err", f"flrun: {text}\n".encode())

    def last_errors(self, rank: int) -> list[str]:
        return self._tails[rank].errors

    def files_of(self, rank: int) -> str:
        """Return the path of the standard error file of ``rank``, or "" if ``folder`` is None."""
        return "" if self._folder is None else str(self._folder / f"rank-{rank}.err")

    def _due_times(self) -> dict[Source, float]:
        """Return the times at which unfinished lines on a terminal must be shown."""
        return {
            source: self._read_at[source] + PARTIAL_SECONDS
            for source, partial_line in self._partial_lines.items()
            if partial_line and self._is_terminal[source.stream] and self._folder is None
        }

    def _store(self, source: Source, data: bytes) -> None:
        assert self._folder is not None
        path = self._folder / f"rank-{source.rank}.{source.stream}"
        if str(path) in self._failed:
            return
        with self._recording_failure(str(path)):
            if source not in self._files:
                self._files[source] = path.open("ab", buffering=0)
            write_whole(self._files[source].fileno(), data)

    def _put(self, stream: str, data: bytes) -> None:
        sink = self._sinks[stream]
        if _WORDS[stream] not in self._failed:
            with self._recording_failure(_WORDS[stream]):
                if isinstance(sink, int):
                    write_whole(sink, data)
                else:
                    sink.write(data.decode(errors="replace"))
                    sink.flush()

    @contextmanager
    def _recording_failure(self, sink: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed[sink] = error
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
