"""Run the launcher for a test: its exit code, its words, and how long it took."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

LAUNCH = (sys.executable, "-m", "flashlight_py.launch")


def write(folder: Path, program: str, name: str = "program.py") -> Path:
    """A script of ``program``, whose lines may be indented."""
    file = folder / name
    file.write_text(textwrap.dedent(program))
    return file


def launch(*arguments: object, timeout: float = 30.0, **options: Any) -> Any:
    """Run to the end, with what it prints as text."""
    command = [*LAUNCH, *map(str, arguments)]
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
