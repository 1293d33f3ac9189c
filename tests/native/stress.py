"""Build a native stress test by its Makefile and run it; it must end well."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["stress"]

NATIVE = Path(__file__).parent
BUILD = NATIVE.parents[1] / "build" / "native"


def stress(folder: str, configuration: str, **variables: int | str) -> None:
    """Make ``configuration`` (plain, address, thread) in ``folder``, relative to this one."""
    settings = [f"OUT={BUILD / folder}", *(f"{name}={value}" for name, value in variables.items())]
    command = ["make", "-s", "-j2", "-C", str(NATIVE / folder), configuration, *settings]
    # Without what a make that runs this test says to those that it starts.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    assert "all right" in ended.stdout
