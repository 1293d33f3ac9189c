"""Functions that run the launcher in a test."""

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAUNCH = (sys.executable, "-m", "flashlight_py.launch")

# A program whose ranks each have a child and wait until they are ended.
WAITING = """
import signal, subprocess
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print("ready")
signal.pause()
"""


def write(folder: Path, program: str, name: str = "program.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(program))
    return file


def launch(*arguments: object, timeout: float = 30.0, **options: Any) -> Any:
    """Run the launcher to the end; see ``run``."""
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return run([*LAUNCH, *arguments], timeout=timeout, **options)


def run(command: Sequence[object], code: int | None = None, **options: Any) -> Any:
    """Run a command to the end and capture text output; ``code`` is the expected exit code."""
    options = {"capture_output": True, "text": True, "timeout": 60.0, **options}
    done = subprocess.run([*map(str, command)], check=False, **options)
    assert code in (None, done.returncode), (done.returncode, done.stdout, done.stderr)
    return done


def begin(*arguments: object, **options: Any) -> subprocess.Popen[Any]:
    pipes: Any = {
        "stdin": subprocess.DEVNULL,
        **dict.fromkeys(("stdout", "stderr"), subprocess.PIPE),
    }
    return subprocess.Popen([*LAUNCH, *map(str, arguments)], **{**pipes, "text": True, **options})
