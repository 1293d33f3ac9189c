"""Wheels, empty environments and copies of the sources for the tests of installations."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "*.egg-info", "*.so", "*.missing.txt", "__pycache__", "build", "dist", "wheelhouse"
)


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with this interpreter's tools and without this checkout."""
    beside = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", **more}


def run(*command: object, **variables: str) -> str:
    """Return the output of the command; print all of it if the command fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd="/",
        env=environment(**variables),
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}"
    return done.stdout


def empty_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def copy_of_sources(folder: Path) -> Path:
    """Copy the sources into a separate folder, so builds do not share products."""
    return Path(shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE))


class Wheel(NamedTuple):
    """A wheel of ``make wheel``, its sources, and the output of the compiler and of the build."""

    file: Path
    sources: Path
    compiled: str
    output: str
