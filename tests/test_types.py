"""A type checker finds the package where it is installed, and the types of what users call."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.launch.launcher import run

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_type_checker_infers_the_declared_types(tmp_path: Path) -> None:
    """Away from the checkout, so that only what is installed is found."""
    program = shutil.copy(ROOT / "tests" / "typed_program.py", tmp_path / "program.py")
    options = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'user'}"]
    env = {name: value for name, value in os.environ.items() if "PYTHONPATH" not in name}
    command = [sys.executable, "-m", "mypy", *options, program]
    run(command, code=0, timeout=110, cwd=tmp_path, env=env)
