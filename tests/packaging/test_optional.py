"""The package without one optional part passes its tests, and a type checker finds its types."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.launch.launcher import run
from tests.packaging.building import ROOT, environment
from tests.test_layers import WINGS

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "wheelhouse")


@pytest.mark.slow
@pytest.mark.timeout(600)
# All tests with several processes use flashlight_py.testing, so they would fail without it.
@pytest.mark.parametrize("package", [name for name in WINGS if name != "testing"])
def test_core_works_if_an_optional_package_is_deleted(package: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=NOT_COPIED))
    path = copy / "flashlight_py" / package.replace(".", "/")
    for deleted in (path, path.with_suffix(".py"), copy / "tests" / package):
        if deleted.is_dir():
            shutil.rmtree(deleted)
        else:
            deleted.unlink(missing_ok=True)
    assert not path.exists()
    tests = "-m", "pytest", "-q", "tests/test_tiny.py", "tests/test_layers.py"
    for command in (["scripts/stubs"], tests):
        path = environment(PYTHONPATH=str(copy))
        run([sys.executable, *command], code=0, timeout=None, cwd=copy, env=path)


@pytest.mark.slow
def test_type_checker_infers_the_declared_types(tmp_path: Path) -> None:
    """The checker runs outside of the checkout, so that it finds only the installed package."""
    program = shutil.copy(ROOT / "tests" / "typed_program.py", tmp_path / "program.py")
    options = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'user'}"]
    env = {name: value for name, value in os.environ.items() if "PYTHONPATH" not in name}
    command = [sys.executable, "-m", "mypy", *options, program]
    run(command, code=0, timeout=110, cwd=tmp_path, env=env)
