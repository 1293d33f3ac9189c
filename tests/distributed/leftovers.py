"""Find what a test left behind: processes of this session, and shared memory without a user."""

import os
import time
from pathlib import Path

from tests.distributed import processes
from tests.distributed.harness import living_processes

MARK = "FLASHLIGHT_TEST_SESSION"
# Time for processes that are ending anyway, such as those of a launcher that has just returned.
ENDING_SECONDS = 2.0
# How long the files may stay with which ranks find out whether they share memory.
JOINING_SECONDS = 5.0
# Processes that serve several tests.
helpers: set[int] = set()


def segments() -> set[Path]:
    """The shared-memory files of flashlight_py."""
    return set(Path("/dev/shm").glob("*flashlight*"))


def orphaned(files: set[Path]) -> set[Path]:
    """Those of ``files`` that no living process has mapped, so that nobody will remove them.

    A world that is just being made, by another test session too, has some for a moment.
    """
    ends = time.monotonic() + JOINING_SECONDS
    while (left := _unmapped(files)) and time.monotonic() < ends:
        time.sleep(0.1)  # no event when a file goes
    return left


def _unmapped(files: set[Path]) -> set[Path]:
    if not files:
        return files
    maps = "\n".join(_text(pid, "maps") for pid in processes.running())
    return {file for file in files if str(file) not in maps and file.exists()}


def end_processes() -> dict[int, str]:
    """Wait for this session's stray processes, kill those that stay, return their commands."""
    strays = _strays()
    if not strays:
        return {}
    processes.await_end(set(strays), ENDING_SECONDS)
    stayed = _strays()
    processes.kill(set(stayed), ENDING_SECONDS)
    return stayed


def _strays() -> dict[int, str]:
    mark = f"{MARK}={os.environ[MARK]}"
    allowed = living_processes() | helpers | {os.getpid()}
    return {
        pid: _text(pid, "cmdline").replace("\0", " ").strip()
        for pid in processes.running()
        if pid not in allowed and mark in _text(pid, "environ")
    }


def _text(pid: int, name: str) -> str:
    """A file of /proc/<pid>, empty where the process is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
