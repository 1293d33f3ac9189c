"""Leftovers of tests: processes of this session, and shared memory without a user."""

import os
import time
from pathlib import Path

from tests.distributed import processes
from tests.distributed.harness import living_processes

MARK = "FLASHLIGHT_TEST_SESSION"
# Seconds for processes that are ending, such as ranks of a launcher that has returned.
ENDING_SECONDS = 2.0
# Seconds until ranks remove their files that test for shared memory.
JOINING_SECONDS = 5.0
# Processes that serve several tests.
helpers: set[int] = set()


def segments() -> set[Path]:
    """Return the shared-memory files of flashlight_py."""
    return set(Path("/dev/shm").glob("*flashlight*"))


def unmapped_files(files: set[Path]) -> set[Path]:
    """Return the ``files`` that no living process has mapped, so that no process will remove them.

    A world that is being created, also by another test session, has some for a moment.
    """
    ends = time.monotonic() + JOINING_SECONDS
    while (left := _unmapped(files)) and time.monotonic() < ends:
        time.sleep(0.1)  # no event when a file is removed
    return left


def _unmapped(files: set[Path]) -> set[Path]:
    if not files:
        return files
    maps = "\n".join(_text(pid, "maps") for pid in processes.all_pids())
    return {file for file in files if str(file) not in maps and file.exists()}


def end_processes() -> dict[int, str]:
    """Wait for stray processes of this session, kill the remaining ones, and return their
    commands."""
    strays = _strays()
    if not strays:
        return {}
    processes.wait_for_end(set(strays), ENDING_SECONDS)
    stayed = _strays()
    processes.kill(set(stayed), ENDING_SECONDS)
    return stayed


def _strays() -> dict[int, str]:
    mark = f"{MARK}={os.environ[MARK]}"
    allowed = living_processes() | helpers | {os.getpid()}
    return {
        pid: _text(pid, "cmdline").replace("\0", " ").strip()
        for pid in processes.all_pids()
        if pid not in allowed and mark in _text(pid, "environ")
    }


def _text(pid: int, name: str) -> str:
    """Return a file of /proc/<pid>; empty if the process has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
