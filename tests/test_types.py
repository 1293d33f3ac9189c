"""A type checker finds the installed package and infers the types of public calls."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.launch.launcher import run

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_type_checker_infers_the_declared_types(tmp_path: Path) -> None:
    """The checker runs outside of the checkout, so that it finds only the installed package."""
    program = shutil.copy(ROOT / "tests" / "typed_program.py", tmp_path / "program.py")
    options = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'user'}"]
    env = {name: value for name, value in os.environ.items() if "PYTHONPATH" not in name}
    command = [sys.executable, "-m", "mypy", *options, program]
    run(command, code=0, timeout=110, cwd=tmp_path, env=env)
