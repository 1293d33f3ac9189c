"""The ranks of this host: processes that are started together, heard, signalled and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from flashlight_py.launch import kernel
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.output import STREAMS, Source

__all__ = ["Ranks", "end_leftovers"]

_CHUNK = 1 << 16
# How long to wait for killed processes to be gone, in seconds: one may hang in the kernel.
_KILLED_SECONDS = 5.0


class Ranks:
    """Processes by rank. ``hear_output`` is called with what they write, ``hear_end`` at the end.

    Whatever a rank has written is heard before its end. Each leads a session, so that a signal
    reaches what it has started as well; and dies with this process.
    """

    def __init__(
        self,
        loop: Loop,
        hear_output: Callable[[Source, bytes], None],
        hear_end: Callable[[int, int], None],
    ) -> None:
        self._loop = loop
        self._hear_output, self._hear_end = hear_output, hear_end
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: dict[Source, int] = {}

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdin: int | None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start ``rank``; ``stdin`` is a descriptor, None: nothing to read; it inherits the others.

        Raises:
            OSError: the program cannot be started.
        """
        me = os.getpid()
        ours, theirs = zip(*(os.pipe() for _ in STREAMS), strict=True)
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=theirs[0],
                stderr=theirs[1],
                start_new_session=True,
                pass_fds=descriptors,
                # Nothing is unsafe about it: the launcher has one thread.
                preexec_fn=lambda: kernel.die_with_parent(me),  # noqa: PLW1509
            )
        finally:
            for end in theirs:
                os.close(end)
            self._listen(rank, ours)
        self._processes[rank] = process
        self._loop.child(process.pid, lambda code: self._on_end(rank, code))

    def signal(self, number: int) -> None:
        """Send ``number`` to every rank that has not ended, and to what is in its group."""
        for process in self._processes.values():
            if process.returncode is None:  # its number cannot be another's before it is reaped
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def finish(self, grace: float) -> list[int]:
        """End what the ranks have left, and close the pipes; as ``end_leftovers``, in seconds."""
        stuck = end_leftovers(self._loop, grace)
        for source in list(self._pipes):
            self._drain(source)
            self._close(source)
        return stuck

    def _listen(self, rank: int, descriptors: Sequence[int]) -> None:
        for stream, descriptor in zip(STREAMS, descriptors, strict=True):
            source = Source(rank, stream)
            os.set_blocking(descriptor, False)
            self._pipes[source] = descriptor
            self._loop.watch(descriptor, lambda source=source: self._read(source))  # type: ignore[misc]

    def _read(self, source: Source) -> bool:
        """Pass on what can be read at once; False if nothing can."""
        try:
            data = os.read(self._pipes[source], _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(source)
            return False
        self._hear_output(source, data)
        return True

    def _drain(self, source: Source) -> None:
        """Read what was written before now: at most what a pipe holds, others may write on."""
        for _ in range(16):
            if source not in self._pipes or not self._read(source):
                return

    def _close(self, source: Source) -> None:
        descriptor = self._pipes.pop(source, None)
        if descriptor is not None:
            self._loop.forget(descriptor)
            os.close(descriptor)

    def _on_end(self, rank: int, code: int) -> None:
        self._processes[rank].returncode = code
        for stream in STREAMS:
            self._drain(Source(rank, stream))
        self._hear_end(rank, code)


def end_leftovers(loop: Loop, grace: float) -> list[int]:
    """End what ranks have started and left behind: SIGTERM, and SIGKILL after ``grace`` seconds.

    Returns the processes that are still there, because the kernel does not let them go.
    """
    asked: set[int] = set()
    ends = time.monotonic() + grace
    while loop.reap() and time.monotonic() < ends:
        for pid in set(kernel.children()) - asked:
            asked.add(pid)
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # one that is stopped would not hear it
        loop.once(ends)
    ends = time.monotonic() + _KILLED_SECONDS
    while loop.reap() and time.monotonic() < ends:
        for pid in kernel.children():  # again and again: killed ones leave theirs to us
            os.kill(pid, signal.SIGKILL)
        loop.once(ends)
    return kernel.children()
